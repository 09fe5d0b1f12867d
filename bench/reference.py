"""The reference's own workload: tokens generated and trained a second, seconds a step and a push, against what it did on two H200s.

What is limited here: vLLM, which the 128 episodes wait for turn by turn, then the trainer. The reference's figures are of its own run
(SmolLM2-135M, the settings of accerl_mp/presets/reference-2gpu.args), not measured again here. Rates are from the end of round
`--skip` to the end of the last: by then rings and batches are full.

    MODEL_PATH=... TEXTWORLD_GAME_DIR=... python bench/reference.py --steps 80
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from bench.common import ROOT, Result, make_parser, parse
from bench.runs import Run, finished_run, words_of

PRESET = ROOT / "accerl_mp" / "presets" / "reference-2gpu.args"
REFERENCE = {"generated tokens": 1187.0, "trained tokens": 1036.0}
"""A second, on two H200s."""
REFERENCE_STEP_S, REFERENCE_PUSH_S = 1.40, 0.148
TIMES = 5.0
"""What we want of its rates, at least."""
MEANS = {
    "Sync/PushSeconds": "s",
    "Sync/ElapsedSeconds": "s",
    "Replay/TrainSampleTrainerVersionLagMean": "pushes",
    "KL/TrainerInferK3": "nats",
    "Infer/RequestsPerSec": "1/s",
    "Infer/RunningRequestsMean": "",
    "Infer/ReplyTokensMean": "tokens",
    "Infer/PrefixCacheHitRate": "",
    "Replay/TrainingSamplesConsumed": "samples a step",
    "Train/SegmentGlobalValidResponseTokens": "trained tokens a step",
}


def main() -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run")
    parser.add_argument("--skip", type=int, default=10, help="rounds that do not count")
    parser.add_argument("--preset", type=Path, default=PRESET, help="the workload's flags")
    parser.add_argument("--flags", default="", help="more flags of the run, in one word")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest that a run may take")
    parser.add_argument("--read", type=Path, help="start no run: read this run's folder")
    args = parse(parser)
    if args.quick:
        args.steps, args.skip = 5, 2
    result = Result("reference", args)
    if args.read:
        add_workload(result, Run(args.read, 0.0, 0.0), args.skip)
        result.finish()
        return
    flags = [*words_of(args.preset), "--max-steps", str(args.steps), *args.flags.split()]
    for repeat in range(args.repeats):
        with finished_run(flags, timeout_s=args.limit_s) as run:
            add_workload(result, run, args.skip, repeat=repeat)
    result.finish()


def add_workload(result: Result, run: Run, skip: int, **labels: Any) -> None:
    """What one run of the workload did, against the reference."""
    rates = {"generated tokens": run.mean("Infer/TokensPerSec", skip) or 0.0, "trained tokens": run.tokens_per_s(skip)}
    for name, theirs in REFERENCE.items():
        result.add(name, rates[name], "1/s", "higher", **labels)
        result.target(f"{name} a second, times the reference's", rates[name] / theirs, at_least=TIMES)
    steps = run.round_s(skip)
    result.add("step", steps, "s", "lower", **labels)
    mean_s = sum(steps) / len(steps)
    result.note(f"{mean_s:.3f} s a step, the reference {REFERENCE_STEP_S:.2f}; its push took {REFERENCE_PUSH_S:.3f} s")
    shares = sorted({tag for line in run.metrics()[skip:] for tag in line if tag.startswith("Time/")})
    for tag, unit in (MEANS | dict.fromkeys(shares, "of wall time")).items():
        if (value := run.mean(tag, skip)) is not None:
            result.add(tag, value, unit, **labels)


if __name__ == "__main__":
    main()
