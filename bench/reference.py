"""The reference's own workload: tokens generated and trained a second, seconds a step and a push, against what it did on two H200s.

What is limited here: vLLM, which the 128 episodes wait for turn by turn, then the trainer. The reference's figures are of its own run
(SmolLM2-135M, the settings of accerl_mp/presets/reference-2gpu.args), not measured again here. Rates are from the end of round
`--skip` to the end of the last: by then rings and batches are full.

    MODEL_PATH=... TEXTWORLD_GAME_DIR=... python bench/reference.py --steps 80
"""

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

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


def measure(run: Run, skip: int) -> dict[str, Any]:
    """Rates and means over the rounds after `skip`."""
    first, *rounds = run.metrics()[skip:]
    ends = [line["time"] for line in (first, *rounds)]
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    total = ends[-1] - ends[0]

    def mean(tag: str) -> float | None:
        """Over time, of the rounds that have it."""
        known = [(line[tag], length) for line, length in zip(rounds, lengths, strict=True) if tag in line]
        return sum(value * length for value, length in known) / sum(length for _, length in known) if known else None

    return {
        "generated tokens": mean("Infer/TokensPerSec") or 0.0,
        "trained tokens": sum(line["Train/SegmentGlobalValidResponseTokens"] for line in rounds) / total,
        "step": total / len(rounds),
        "steps": lengths,
        "means": {tag: mean(tag) for tag in [*MEANS, *sorted(tag for tag in rounds[-1] if tag.startswith("Time/"))]},
    }


def main() -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run")
    parser.add_argument("--skip", type=int, default=10, help="rounds that do not count")
    parser.add_argument("--preset", type=Path, default=PRESET, help="the workload's flags")
    parser.add_argument("--flags", default="", help="more flags of the run, in one word")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest that a run may take")
    args = parse(parser)
    if args.quick:
        args.steps, args.skip = 5, 1
    result = Result("reference", args)
    flags = [*words_of(args.preset), "--max-steps", str(args.steps), *args.flags.split()]
    for repeat in range(args.repeats):
        with finished_run(flags, timeout_s=args.limit_s) as run:
            _add(result, measure(run, args.skip), repeat)
    result.finish()


def _add(result: Result, found: dict[str, Any], repeat: int) -> None:
    for name, theirs in REFERENCE.items():
        result.add(name, found[name], "1/s", "higher", repeat=repeat)
        result.target(f"{name} a second, times the reference's", found[name] / theirs, at_least=TIMES)
    result.add("step", found["steps"], "s", "lower", repeat=repeat)
    result.note(f"{found['step']:.3f} s a step, the reference {REFERENCE_STEP_S:.2f}; its push took {REFERENCE_PUSH_S:.3f} s")
    for tag, value in found["means"].items():
        if value is not None:
            unit = "% of wall time" if tag.startswith("Time/") else MEANS[tag]
            result.add(tag, 100 * value if tag.startswith("Time/") else value, unit, repeat=repeat)


if __name__ == "__main__":
    main()
