"""What a run has learned and how fast it went: a result made from a run folder, for plots.py and compare.py.

    python bench/learning.py RUN_DIR [--prepared "COMMAND" ...] [--out FILE.json]

Nothing is measured here: the numbers are those that the run wrote to metrics.jsonl while it trained. Rates are over the time from the
first round's end to the last's, waits, pushes and evaluations included. What limits them is in the run's own shares of time, which
stand beside them. The targets are the reference's own run of this model on two H200s (one for the trainer, one for vLLM).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from bench.common import Result

REFERENCE = {"generated tokens": 1187.0, "trained tokens": 1036.0, "a step": 1.40}
"""Tokens/s and seconds."""
Line = dict[str, Any]


def read_lines(run: Path) -> tuple[list[Line], list[Line]]:
    """Rounds and evaluations of metrics.jsonl, in their order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "Train/Loss" in line], [line for line in lines if "Eval/WinRate" in line]


def add_win_rates(result: Result, rounds: list[Line], evaluations: list[Line]) -> None:
    """Held-out games: before the first step, after the last, and on the way; training games beside them."""
    start = rounds[0]["time"]
    for name, line in (("before", evaluations[0]), ("after", evaluations[-1])):
        labels = {"step": line["step"], "episodes": int(line.get("Eval/Episodes", 0))}
        result.add(f"held-out win rate {name} RL", line["Eval/WinRate"], "share won", "higher", **labels)
    for games, lines, tag in (("held out", evaluations, "Eval/WinRate"), ("training, sliding window", rounds, "TextWorld/WinRate")):
        points = [(max(0.0, line["time"] - start), line[tag]) for line in lines if tag in line]
        result.series("win rate against wall time", points, x="s since the first step", y="share won", games=games)


def add_rates(result: Result, rounds: list[Line]) -> None:
    seconds = rounds[-1]["time"] - rounds[0]["time"]
    steps = rounds[-1]["step"] - rounds[0]["step"]
    trained = sum(line["Train/SegmentGlobalValidResponseTokens"] for line in rounds[1:])
    samples = sum(line["Replay/TrainingSamplesConsumed"] for line in rounds[1:])
    generated = [line["Infer/TokensPerSec"] for line in rounds[1:] if "Infer/TokensPerSec" in line]
    rates = {"generated tokens": float(sum(generated) / len(generated)), "trained tokens": trained / seconds, "a step": seconds / steps}
    result.add("generated tokens", generated, "tokens/s", "higher")
    result.add("trained tokens", rates["trained tokens"], "tokens/s", "higher")
    result.add("trained samples", samples / seconds, "samples/s", "higher")
    result.add("trained samples, in a train segment", _values(rounds, "Train/SamplesPerSec"), "samples/s", "higher")
    result.add("tokens of a trained sample", _values(rounds, "Rollout/EpisodeTokensMean"), "tokens")
    result.add("a step, everything included", rates["a step"], "s", "lower")
    result.add("requests", _values(rounds, "Infer/RequestsPerSec"), "requests/s", "higher")
    result.add("episodes", _values(rounds, "Rollout/EpisodesPerSec"), "episodes/s", "higher")
    for name in ("generated tokens", "trained tokens"):
        result.target(f"{name} a second, five times the reference's", rates[name], at_least=5 * REFERENCE[name])
    result.target("seconds a step, the reference's", rates["a step"], at_most=REFERENCE["a step"])


def add_rest(result: Result, rounds: list[Line]) -> None:
    """Pushes, the distance between trainer and vLLM, where each role's time went."""
    result.add("a push", [1e3 * value for value in _values(rounds, "Sync/PushSeconds")], "ms", "lower")
    result.add("generation stands still in a push", [1e3 * value for value in _values(rounds, "Sync/ElapsedSeconds")], "ms", "lower")
    result.add("policy lag of the oldest token", _values(rounds, "Replay/PolicyLagOldestMean"), "pushes", "lower")
    result.add("k3 between trainer and vLLM, equal weights", _values(rounds, "KL/TrainerInferK3"), "nats", "lower")
    for tag in sorted({tag for line in rounds for tag in line if tag.startswith("Time/")}):
        result.add("share of time", [100 * value for value in _values(rounds, tag)], "%", phase=tag.removeprefix("Time/"))
    for name, tag, unit in (
        ("k3 between trainer and vLLM, equal weights", "KL/TrainerInferK3", "nats"),
        ("entropy", "Train/Entropy", "nats"),
        ("generated tokens", "Infer/TokensPerSec", "tokens/s"),
        ("trained tokens in a train segment", "Train/TokensPerSec", "tokens/s"),
    ):
        result.series(name, [(line["step"], line[tag]) for line in rounds if tag in line], x="optimizer step", y=unit)


def _values(rounds: list[Line], tag: str) -> list[float]:
    """Of every round but the first, in which vLLM was still warming up."""
    return [line[tag] for line in rounds[1:] if tag in line] or [0.0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--prepared", nargs="*", default=[], metavar="COMMAND", help="what was run before it, for the notes")
    parser.add_argument("--out", type=Path, help="also write the last line, indented, to this file")
    args = parser.parse_args()
    rounds, evaluations = read_lines(args.run)
    if len(rounds) < 3 or len(evaluations) < 2:
        print(f"learning.py: {args.run} has {len(rounds)} rounds and {len(evaluations)} evaluations: too few", file=sys.stderr)
        return 2
    result = Result("learning", args)
    add_win_rates(result, rounds, evaluations)
    add_rates(result, rounds)
    add_rest(result, rounds)
    for command in [*args.prepared, *(args.run / "command.txt").read_text().splitlines()]:
        result.note(command)
    result.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
