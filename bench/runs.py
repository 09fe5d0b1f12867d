"""Whole runs through launch.sh, for bench/startup.py and bench/end_to_end.py, and what they leave to be read."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.common import ROOT, python_path

PRESET = ROOT / "accerl_mp" / "presets" / "demo.args"
_NOT_TRAINING = ("--eval-", "--save-checkpoint")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: Path
    started: float
    """Of the command, by time.time()."""
    wall_s: float

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that close a round."""
        return [line for line in self._lines() if "Train/Loss" in line]

    def values(self, tag: str) -> list[float]:
        """All that metrics.jsonl has of a tag, in order."""
        return [line[tag] for line in self._lines() if tag in line]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def logged_s(self, role: str, text: str) -> float:
        """Seconds from the command to the first line with `text` in that role's log."""
        path = self.folder / "logs" / f"{role}.log"
        line = next((line for line in path.read_text().splitlines() if text in line), None)
        if line is None:
            raise RuntimeError(f"{path} never says {text!r}")
        start = datetime.fromtimestamp(self.started)
        clock = datetime.strptime(line[:12], "%H:%M:%S.%f").time()
        return (datetime.combine(start.date(), clock) - start).total_seconds() % 86400

    def samples_per_s(self, skip: int = 1) -> float:
        """Trained samples a second of wall time, from the end of round `skip` to the end of the last."""
        return self._per_s("Replay/TrainingSamplesConsumed", skip)

    def tokens_per_s(self, skip: int = 1) -> float:
        """Trained tokens likewise."""
        return self._per_s("Train/SegmentGlobalValidResponseTokens", skip)

    def mean(self, tag: str, skip: int = 1) -> float | None:
        """Of the rounds after `skip` that have it, each as long as it took; None if none has."""
        known = [(line[tag], took) for line, took in zip(self.metrics()[skip:], self.round_s(skip), strict=True) if tag in line]
        return sum(value * took for value, took in known) / sum(took for _, took in known) if known else None

    def round_s(self, skip: int = 1) -> list[float]:
        """Seconds of each round after `skip`, which is at least 1."""
        ends = [line["time"] for line in self.metrics()[skip - 1 :]]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _per_s(self, tag: str, skip: int) -> float:
        return sum(line[tag] for line in self.metrics()[skip:]) / sum(self.round_s(skip))


def demo_flags(*others: str) -> list[str]:
    """The demo's own flags without evaluation and export, then `others`, which win."""
    return [word for words in _lines_of(PRESET) if not words[0].startswith(_NOT_TRAINING) for word in words] + list(others)


def words_of(preset: Path) -> list[str]:
    """The flags in a file, with the variables in them from the environment."""
    return [os.path.expandvars(word) for words in _lines_of(preset) for word in words]


def _lines_of(preset: Path) -> list[list[str]]:
    """The words of each line that has some, comments left out."""
    return [words for line in preset.read_text().splitlines() if (words := shlex.split(line, comments=True))]


@contextmanager
def finished_run(flags: Sequence[str], *, timeout_s: float = 900.0) -> Iterator[Run]:
    """`bash launch.sh FLAGS` to its end; its folder is there until the block ends. RuntimeError with its last words if it fails."""
    parent = Path(tempfile.mkdtemp(prefix="accerl-bench-run-"))
    folder = parent / "run"
    environment = dict(os.environ) | {"ACCERL_PYTHON": sys.executable, "PYTHONPATH": python_path()}
    started = time.time()
    try:
        command = ["bash", "launch.sh", *flags, "--log-dir", str(folder)]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"launch.sh ended with exit code {ended.returncode}:\n{(ended.stdout + ended.stderr)[-3000:]}")
        yield Run(folder, started, time.time() - started)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
