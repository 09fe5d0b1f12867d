"""What all scripts in bench/ share: flags, repeats, alternated pairs, the table for people and the last line for programs.

A script measures, fills a Result and calls `finish()`. That prints a table and then, as the last line, one JSON object:

    bench, command, flags      which script, how it was called, every flag resolved
    date, commit, versions     of the code and the stack; a commit that ends in -dirty had changes on top
    hardware                   cores, CPU, memory, GPUs, and the load average at the start and at the end
    measures                   [{name, unit, better, labels, samples, median, p95}], one sample a repeat
    ratios                     [{name, samples, median, min, max}], one a pair of runs that alternated
    series                     [{name, x, y, labels, points}], curves of single runs, x and y are units
    targets                    [{name, wanted, got, met}]
    notes                      what a reader must know beside the numbers

Two things are compared only by runs that alternate (A B, B A, A B, ...): a machine that drifts or is shared then slows both alike.
Imports no torch; everything heavier than NumPy is imported by the script that needs it.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Column, Table

from accerl_mp.launcher.versions import stack
from accerl_mp.topology import visible_gpus

ROOT = Path(__file__).parents[1]
RESULT_FIELDS = ("bench", "command", "flags", "date", "commit", "versions", "hardware", "measures", "ratios", "series", "targets", "notes")

Better = Literal["higher", "lower", ""]
T = TypeVar("T")


def python_path() -> str:
    """PYTHONPATH of processes that a script starts: this repository, then what the user has set."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class ResultError(ValueError):
    """A file or a line that is no result of these scripts. Says what is missing."""


def make_parser(doc: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """The flags that every script has; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = "smaller and fewer, under two minutes on a CPU: does it still run? Its numbers mean little"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"measured repeats after a warm-up (default {repeats}; --quick: 2)")
    parser.add_argument("--out", type=Path, help="also write the last line, indented, to this file")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that whoever is ended (`timeout`) tidies up
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}: nothing would be measured; give 1 or more")
    if args.quick:
        args.repeats = min(args.repeats, 2)
    return args


class Result:
    """Collects what a script measures."""

    def __init__(self, bench: str, args: argparse.Namespace) -> None:
        self.bench = bench
        self._args = args
        self._load_at_start = os.getloadavg()
        self._measures: list[dict[str, Any]] = []
        self._ratios: list[dict[str, Any]] = []
        self._series: list[dict[str, Any]] = []
        self._targets: list[dict[str, Any]] = []
        self._notes: list[str] = []

    def add(self, name: str, samples: Sequence[float] | float, unit: str, better: Better = "", **labels: Any) -> float:
        """One measured thing, one sample a repeat; `labels` say under which setting. Returns the median."""
        values = [float(value) for value in np.atleast_1d(samples)]
        summary = {"samples": values, "median": float(np.median(values)), "p95": float(np.percentile(values, 95))}
        self._measures.append({"name": name, "unit": unit, "better": better, "labels": labels, **summary})
        return summary["median"]

    def ratio(self, name: str, over: Sequence[float], under: Sequence[float]) -> float:
        """`over` / `under`, pair by pair (the same repeat of both). Returns the median."""
        values = [a / b for a, b in zip(over, under, strict=True)]
        spread = {"samples": values, "median": float(np.median(values)), "min": min(values), "max": max(values)}
        self._ratios.append({"name": name, **spread})
        return spread["median"]

    def series(self, name: str, points: Sequence[tuple[float, float]], *, x: str, y: str, **labels: Any) -> None:
        """A curve of one run; it is in the last line and in plots, not in the table."""
        self._series.append({"name": name, "x": x, "y": y, "labels": labels, "points": [list(point) for point in points]})

    def target(self, name: str, got: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Reported, never asserted: a slow machine is no failure."""
        bounds = {">=": at_least, "<=": at_most}
        wanted = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        met = (at_least is None or got >= at_least) and (at_most is None or got <= at_most)
        self._targets.append({"name": name, "wanted": wanted, "got": float(got), "met": bool(met)})

    def note(self, text: str) -> None:
        self._notes.append(text)

    def finish(self) -> dict[str, Any]:
        """Print the table and the last line."""
        result = self._as_dict()
        print_result(result)
        if self._args.out:
            self._args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result), flush=True)
        return result

    def _as_dict(self) -> dict[str, Any]:
        versions = stack()
        return {
            "bench": self.bench,
            "command": shlex.join(["python", f"bench/{self.bench}.py", *sys.argv[1:]]),
            "flags": {name: str(value) if isinstance(value, Path) else value for name, value in vars(self._args).items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": versions.pop("accerl_mp", "unknown"),
            "versions": versions,
            "hardware": hardware() | {"load_at_start": self._load_at_start, "load_at_end": os.getloadavg()},
            "measures": self._measures,
            "ratios": self._ratios,
            "series": self._series,
            "targets": self._targets,
            "notes": self._notes,
        }


def repeat(measure: Callable[[], float], *, repeats: int, warmup: int = 1) -> list[float]:
    """What `measure` returns, `repeats` times after `warmup` runs that do not count."""
    return alternate({"": measure}, repeats=repeats, warmup=warmup)[""]


def alternate(sides: Mapping[str, Callable[[], T]], *, repeats: int, warmup: int = 1) -> dict[str, list[T]]:
    """Each side's returned values: A B, B A, A B, ... after `warmup` rounds that do not count. Index i of all sides is one pair."""
    values: dict[str, list[T]] = {name: [] for name in sides}
    for index in range(-warmup, repeats):
        for name in list(sides) if index % 2 == 0 else reversed(list(sides)):
            value = sides[name]()
            if index >= 0:
                values[name].append(value)
    return values


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """`with stopwatch() as seconds: ...`; afterwards `seconds()` is how long the block took."""
    start, end = time.perf_counter(), 0.0
    try:
        yield lambda: (end or time.perf_counter()) - start
    finally:
        end = time.perf_counter()


def memcpy_bytes_per_s(size_bytes: int, *, total_bytes: int = 1 << 28) -> float:
    """What one core copies between two buffers of this size: the limit of everything that moves bytes in memory."""
    source, target = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)
    count = max(1, total_bytes // size_bytes)
    np.copyto(target, source)
    with stopwatch() as seconds:
        for _ in range(count):
            np.copyto(target, source)
    return count * size_bytes / seconds()


def hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": len(visible_gpus()),
    }


def read_result(path: Path) -> dict[str, Any]:
    """The result in a file that `--out` wrote, or in a script's captured output (its last line)."""
    text = path.read_text().strip()
    try:
        result = json.loads(text if text.startswith("{") else text.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ResultError(f"{path}: its last line is no JSON object ({error})") from error
    check_result(result, str(path))
    return result


def check_result(result: Any, name: str) -> None:
    """Raise ResultError unless this has the form that `Result.finish` writes."""
    if not isinstance(result, dict) or (missing := [field for field in RESULT_FIELDS if field not in result]):
        raise ResultError(f"{name}: not a result of bench/, without {', '.join(missing) if isinstance(result, dict) else 'an object'}")
    if not result["measures"]:
        raise ResultError(f"{name}: nothing was measured")
    for measure in result["measures"]:
        if not measure["samples"] or not np.isfinite([*measure["samples"], measure["median"], measure["p95"]]).all():
            raise ResultError(f"{name}: {measure['name']} has no finite samples")


def print_result(result: Mapping[str, Any]) -> None:
    """The tables for people."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    machine = result["hardware"]
    console.print(f"bench/{result['bench']}.py at {result['commit']}: {machine['cores']} cores, {machine['cpu']}, {machine['gpus']} GPUs")
    console.print(f"load average {machine['load_at_start'][0]:.1f} at the start, {machine['load_at_end'][0]:.1f} at the end")
    measures = Table("measure", "setting", "unit", *_right("median", "p95", "min", "max", "n"))
    for one in result["measures"]:
        setting = " ".join(f"{name}={value}" for name, value in one["labels"].items())
        numbers = (one["median"], one["p95"], min(one["samples"]), max(one["samples"]))
        measures.add_row(one["name"], setting, one["unit"], *map(short, numbers), str(len(one["samples"])))
    console.print(measures)
    if result["ratios"]:
        ratios = Table("ratio, pair by pair", *_right("median", "min", "max", "n"))
        for one in result["ratios"]:
            ratios.add_row(one["name"], *(short(one[key]) for key in ("median", "min", "max")), str(len(one["samples"])))
        console.print(ratios)
    for one in result["targets"]:
        console.print(f"target {one['name']}: wanted {one['wanted']}, got {short(one['got'])}: {'met' if one['met'] else 'MISSED'}")
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False)


def _right(*names: str) -> list[Any]:
    return [Column(name, justify="right") for name in names]


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
