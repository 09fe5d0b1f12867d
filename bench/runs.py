"""Whole runs through launch.sh, for bench/startup.py and bench/end_to_end.py, and what they leave to be read."""

import json
import os
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
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "Train/Loss" in line]

    def logged_s(self, role: str, text: str) -> float:
        """Seconds from the command to the first line with `text` in that role's log."""
        path = self.folder / "logs" / f"{role}.log"
        line = next((line for line in path.read_text().splitlines() if text in line), None)
        if line is None:
            raise RuntimeError(f"{path} never says {text!r}")
        start = datetime.fromtimestamp(self.started)
        clock = datetime.strptime(line[:12], "%H:%M:%S.%f").time()
        return (datetime.combine(start.date(), clock) - start).total_seconds() % 86400

    def samples_per_s(self) -> float:
        """Trained samples a second of wall time, from the end of the first round to the end of the last."""
        rounds = self.metrics()
        return sum(line["Replay/TrainingSamplesConsumed"] for line in rounds[1:]) / (rounds[-1]["time"] - rounds[0]["time"])

    def tokens_per_s(self) -> float:
        """Trained tokens likewise."""
        rounds = self.metrics()
        tokens = sum(line["Train/SegmentGlobalValidResponseTokens"] for line in rounds[1:])
        return tokens / (rounds[-1]["time"] - rounds[0]["time"])


def demo_flags(*others: str) -> list[str]:
    """The demo's own flags without evaluation and export, then `others`, which win."""
    lines = [line.split("#", 1)[0].strip() for line in PRESET.read_text().splitlines()]
    return [word for line in lines if line and not line.startswith(_NOT_TRAINING) for word in line.split()] + list(others)


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
