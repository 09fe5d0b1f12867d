"""What each way of changing weights under running episodes costs, and how far sampling is from training then.

What is limited here: exactness against work done again. Tokens that were sampled over KV of older weights have other log-probabilities
than the trainer's, which `KL/TrainerInferK3` shows (tokens of the trainer's own version only); KV that is thrown away is prefilled again.
The limit is in the table itself: `recompute` with `version` is exact to rounding, `keep` with `episode` throws nothing away.

Runs of the demo's setting, a push after every step, modes alternating. Means over the rounds after the first.

    python bench/sync_modes.py --steps 6 --repeats 2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import Result, alternate, make_parser, parse
from bench.runs import Run, demo_flags, finished_run

MODES = {
    "keep, episode (default)": (),
    "keep, version": ("--prefix-cache-scope", "version"),
    "recompute, episode": ("--kv-on-sync", "recompute"),
    "recompute, version": ("--kv-on-sync", "recompute", "--prefix-cache-scope", "version"),
    "drain": ("--sync-mode", "drain"),
}
TAGS = {
    "KL/TrainerInferK3": ("nats/token", "lower"),
    "KL/OldNewK3TokenMean": ("nats/token", ""),
    "Sync/ElapsedSeconds": ("s", "lower"),
    "Sync/PushSeconds": ("s", "lower"),
    "Infer/PrefixCacheHitRate": ("share", "higher"),
}


def measure(steps: int, *flags: str) -> dict[str, float]:
    """One run's means."""
    with finished_run(demo_flags("--max-steps", str(steps), "--sync-every-optimizer-steps", "1", *flags)) as run:
        return {"trained samples": run.samples_per_s()} | {tag: _mean(run, tag) for tag in TAGS if _values(run, tag)}


def _values(run: Run, tag: str) -> list[float]:
    return [line[tag] for line in run.metrics()[1:] if tag in line]


def _mean(run: Run, tag: str) -> float:
    values = _values(run, tag)
    return sum(values) / len(values)


def main() -> None:
    parser = make_parser(__doc__, repeats=2)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run")
    args = parse(parser)
    modes = dict(list(MODES.items())[::3]) if args.quick else MODES
    if args.quick:
        args.steps, args.repeats = 3, 1
    result = Result("sync_modes", args)
    sides = {mode: lambda flags=flags: measure(args.steps, *flags) for mode, flags in modes.items()}
    runs = alternate(sides, repeats=args.repeats, warmup=0)
    for mode, values in runs.items():
        result.add("trained samples", [value["trained samples"] for value in values], "samples/s", "higher", mode=mode)
        for tag, (unit, better) in TAGS.items():
            if known := [value[tag] for value in values if tag in value]:
                result.add(tag, known, unit, better, mode=mode)
    result.finish()


if __name__ == "__main__":
    main()
