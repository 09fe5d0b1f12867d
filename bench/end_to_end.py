r"""Whole runs: trained samples and tokens a second, win rate against wall time, asynchronous against `--synchronous`, and what scales.

What is limited here: the machine's cores (or GPUs), which trainer, vLLM and games share. The limit is the slower of two halves that
cannot overlap with themselves: what a synchronous run, measured in the same run, spends generating and what it spends training; the
asynchronous run cannot be faster than the longer half alone.

The demo's setting, without evaluation; rates are from the end of the first round to the end of the last. Asynchronous and synchronous
runs alternate. The scaling tables change one thing at a time: rollout workers, samples a step, model size. The knee is the last value
that still gave at least 10 % over the one before it; a row is the median of --repeats runs.

    python bench/end_to_end.py --workers 1 2 4 --samples 8 16 --models demo 4m
    MODEL_PATH=... TEXTWORLD_GAME_DIR=... python bench/end_to_end.py --preset accerl_mp/presets/one-gpu.args --steps 100 \
        --workers --samples --models      # whatever the preset is for, and no tables
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from bench.common import Result, alternate, make_parser, parse
from bench.models import model_folder
from bench.reference import PRESET, add_workload
from bench.runs import Run, demo_flags, finished_run, words_of

KNEE = 1.10


def measure(args: argparse.Namespace, *flags: str, **options: Any) -> dict[str, Any]:
    """One run, and its `summary`."""
    base = words_of(args.preset) if args.preset else demo_flags()
    with finished_run([*base, "--max-steps", str(args.steps), *args.flags.split(), *flags], timeout_s=args.limit_s) as run:
        return summary(args, run, **options)


def summary(args: argparse.Namespace, run: Run, *, result: Result | None = None, **labels: Any) -> dict[str, Any]:
    """What its rounds say. It is compared with what the reference did where a result is given."""
    rounds, wins = run.metrics(), _wins(run)
    shares = {tag: _mean(rounds, tag) for tag in sorted(set().union(*rounds)) if tag.startswith("Time/")}
    last_wins = [won for _, won in wins[-max(1, len(wins) // 4) :]]
    if result is not None and args.preset and args.preset.resolve() == PRESET:
        add_workload(result, run, args.skip, **labels)
    return {
        "samples_per_s": run.samples_per_s(args.skip),
        "tokens_per_s": run.tokens_per_s(args.skip),
        "samples": sum(line["Replay/TrainingSamplesConsumed"] for line in rounds),
        "wins": wins,
        "last_wins": sum(last_wins) / len(last_wins) if last_wins else 0.0,
        "held_out": run.values("Eval/WinRate"),
        "shares": shares,
    }


def _mean(rounds: list[dict[str, Any]], tag: str) -> float:
    values = [line[tag] for line in rounds[1:] if tag in line]
    return sum(values) / len(values) if values else 0.0


def _wins(run: Run) -> list[tuple[float, float]]:
    """(seconds since the first round began to count, share of the last episodes that were won)."""
    rounds = run.metrics()
    return [(line["time"] - rounds[0]["time"], line["TextWorld/WinRate"]) for line in rounds if "TextWorld/WinRate" in line]


def compare_modes(result: Result, args: argparse.Namespace) -> None:
    sides = {"asynchronous": (), "synchronous": ("--synchronous",)}
    folders = dict(zip(sides, (iter(args.read[::2]), iter(args.read[1::2])), strict=True)) if args.read else {}

    def run(side: str) -> dict[str, Any]:
        if folders:
            folder = Path(next(folders[side]))
            result.note(f"{side}: {(folder / 'command.txt').read_text().strip()}")
            return summary(args, Run(folder, 0.0, 0.0))
        options = {} if side == "synchronous" else {"result": result, "mode": side}
        return measure(args, *sides[side], **options)

    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    try:
        repeats = len(args.read) // 2 if args.read else args.repeats
        alternate({side: lambda side=side: runs[side].append(run(side)) for side in sides}, repeats=repeats, warmup=0)
    finally:
        report_modes(result, {side: values[: min(map(len, runs.values()))] for side, values in runs.items()})


def report_modes(result: Result, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Of whole pairs, however many there are."""
    if not runs["asynchronous"]:
        return
    for side, values in runs.items():
        result.add("trained samples", [value["samples_per_s"] for value in values], "samples/s", "higher", mode=side)
        result.add("trained tokens", [value["tokens_per_s"] for value in values], "tokens/s", "higher", mode=side)
        result.add("samples of a run", [value["samples"] for value in values], "samples", mode=side)
        result.add("win rate over the last quarter", [value["last_wins"] for value in values], "share won", "higher", mode=side)
        for name, index in {"before": 0, "at the end": -1}.items():
            if all(len(value["held_out"]) > abs(index) for value in values):  # a run that was cut short has no last one
                result.add(f"held-out win rate {name}", [value["held_out"][index] for value in values], "share won", "higher", mode=side)
        for value in values:
            result.series("win rate against wall time", value["wins"], x="s", y="share won", mode=side)
        for tag in values[0]["shares"]:
            result.add(tag, [100 * value["shares"].get(tag, 0.0) for value in values], "% of wall time", mode=side)
    ratio = result.ratio("samples/s asynchronous / synchronous", *([v["samples_per_s"] for v in values] for values in runs.values()))
    result.target("samples/s asynchronous / synchronous", ratio, at_least=1.6)


def scale(result: Result, what: str, values: list[Any], flags: Any, args: argparse.Namespace) -> None:
    """One row a value, all other things as in the demo; their runs alternate. One that fails is a note: what others measured stays."""
    runs: dict[Any, list[dict[str, Any]]] = {value: [] for value in values}
    try:
        for repeat in range(args.repeats):
            for value in values if repeat % 2 == 0 else reversed(values):
                try:
                    runs[value].append(measure(args, *flags(value)))
                except RuntimeError as error:
                    result.note(f"{what} {value}: no figure, {' '.join(str(error).split())[-300:]}")
    finally:
        report_table(result, what, {value: rows for value, rows in runs.items() if rows})


def report_table(result: Result, what: str, runs: dict[Any, list[dict[str, Any]]]) -> None:
    rates = {}
    for value, rows in runs.items():
        rates[value] = result.add("trained samples", [row["samples_per_s"] for row in rows], "samples/s", "higher", **{what: value})
        result.add("trained tokens", [row["tokens_per_s"] for row in rows], "tokens/s", "higher", **{what: value})
        for tag in ("Time/trainer/wait", "Time/rollout/reply", "Time/rollout/work"):
            if tag in rows[0]["shares"]:
                result.add(tag, [100 * row["shares"].get(tag, 0.0) for row in rows], "% of wall time", **{what: value})
    if len(rates) > 1:
        result.note(f"{what}: {knee(list(rates), list(rates.values()))}")


def knee(values: list[Any], rates: list[float]) -> str:
    """Where more stops helping."""
    for index in range(1, len(values)):
        if rates[index] < KNEE * rates[index - 1]:
            return f"the knee is at {values[index - 1]}: {values[index]} gives {rates[index] / rates[index - 1]:.2f} times its samples/s"
    return f"no knee up to {values[-1]}"


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--preset", type=Path, help="flags of the runs (default: the demo's, without its evaluations)")
    parser.add_argument("--flags", default="", help="more of them, in one word")
    parser.add_argument("--read", nargs="+", metavar="DIR", help="start no runs for the two modes: asynchronous, synchronous, ... by turns")
    parser.add_argument("--only-tables", action="store_true", help="leave out the two modes")
    parser.add_argument("--skip", type=int, default=1, help="rounds that do not count for the rates")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest that a run may take")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8], help="rollout processes, for the scaling table")
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 16, 32], help="most samples of a step and rank, likewise")
    parser.add_argument("--models", nargs="*", default=["demo", "4m"], help="models, likewise: demo, 4m, 25m, 0.75b or a folder")
    args = parse(parser)
    if args.read and len(args.read) % 2:
        parser.error(f"--read {' '.join(args.read)}: {len(args.read)} folders make no pairs")
    if args.quick:
        args.steps, args.repeats, args.workers, args.samples, args.models = 3, 1, [], [], []
    result = Result("end_to_end", args)
    try:
        measure_all(result, args)
    except (KeyboardInterrupt, SystemExit):
        result.note("ended before it was done: what had been measured by then")
        result.finish()
        raise
    result.finish()


def measure_all(result: Result, args: argparse.Namespace) -> None:
    if not args.only_tables:
        compare_modes(result, args)
    scale(result, "rollout_workers", args.workers, lambda number: ("--num-rollout-workers", str(number)), args)
    scale(result, "samples_per_step_and_rank", args.samples, lambda number: ("--batch-size", str(number)), args)
    with tempfile.TemporaryDirectory() as temporary:
        # Random weights win nothing: a group without signal must train too, or there is never a step.
        flags = ("--keep-zero-std-groups", "--model-path")
        scale(result, "model", args.models, lambda name: (*flags, str(model_folder(name, Path(temporary)))), args)


if __name__ == "__main__":
    main()
