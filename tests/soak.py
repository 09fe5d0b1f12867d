"""A run on the demo's setting that is broken all the time: `python tests/soak.py --minutes M --chaos [--seed N]`.

Every 20 s a random process dies by SIGKILL or is stopped by SIGSTOP (rollout, ingest, stats, vLLM's front, its engine core or
its worker), and now and then the disk of the run folder (a small tmpfs) is full for a while. After M minutes the run is asked to
stop, and then: training went on, the books balance (`accerl_mp/ingest/conservation.py`), and nothing is left.

The last line on standard output is the summary as JSON; the exit code is 1 if anything is wrong.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.live_run import LiveRun  # noqa: E402

FLAGS = ["@accerl_mp/presets/demo.args", "--max-steps", "1000000", "--max-restarts", "100000", "--eval-every-rounds", "50"]
HANG_S = 15.0
DISK_MIB, DISK_FULL_S = 64, 12.0
EVERY_S = 20.0
RECOVERS_S = 300.0
"""Longest time after a fault until the next optimizer step."""


class Disk:
    """A small tmpfs for the run folder, if this user may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        ballast = self.folder / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class Chaos:
    """Breaks something, and sees that training goes on."""

    def __init__(self, run: LiveRun, disk: Disk, seed: int) -> None:
        self._run, self._disk, self._random = run, disk, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.recovery_s: list[float] = []
        self.problems: list[str] = []
        self._next = 0

    def strike(self) -> None:
        """One fault; returns when the run has made another step."""
        kind = ("kill", "stop", "kill", "disk")[self._next % 4]
        self._next += 1
        before, started = self._run.step, time.monotonic()
        if kind == "disk":
            self._fill()
        else:
            self._hit(kind)
        try:
            self._run.wait_for(lambda: self._run.step >= before + 2, f"a step after {kind}", RECOVERS_S, every_s=0.1)
        except AssertionError as error:
            self.problems.append(str(error))
            raise
        self.recovery_s.append(round(time.monotonic() - started, 1))

    def _hit(self, kind: str) -> None:
        target, pid = self._random.choice(self._targets())
        say(f"{kind} {target} (pid {pid})")
        self.done[f"{kind} {target.split('/')[0]}"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def _targets(self) -> list[tuple[str, int]]:
        rows = {row.name: row.pid for row in self._run.table.snapshot()}
        light = [(name, pid) for name, pid in rows.items() if pid and name.startswith(("rollout/", "ingest/", "stats/"))]
        front, *spawned = self._run.vllm_pids() or [0]
        # Names of vLLM's own processes: the engine core is the front's child, the worker is the core's.
        heavy = list(zip(("inference front", "inference core", "inference worker"), (front, *spawned), strict=False))
        return light + [(name, pid) for name, pid in heavy if pid]

    def _fill(self) -> None:
        if not self._disk.is_mounted:
            self.done["disk: not filled, no right to mount a tmpfs"] += 1
            return
        say("the disk is full")
        self.done["disk full"] += 1
        with self._disk.full():
            time.sleep(DISK_FULL_S)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def soak(folder: Path, *, minutes: float, chaos: bool, seed: int) -> dict[str, Any]:
    (folder / "disk").mkdir()
    disk = Disk(folder / "disk")
    flags = [*FLAGS, "--hang-timeout-s", str(HANG_S), "--seed", str(42 + seed), "--checkpoint-dir", str(folder / "exports")]
    run = LiveRun(folder / "disk" / "run", flags, output=folder / "output.txt")
    try:
        run.attach(300)
        run.wait_training(1, 300)
        say("training has begun")
        breaker, until = Chaos(run, disk, seed), time.monotonic() + 60 * minutes
        while time.monotonic() < until and not breaker.problems:
            time.sleep(min(EVERY_S, max(0.0, until - time.monotonic())))
            if chaos and time.monotonic() < until:
                with contextlib.suppress(AssertionError):
                    breaker.strike()
        return summary(run, breaker, minutes=minutes)
    finally:
        run.close()
        disk.close()


def summary(run: LiveRun, breaker: Chaos, *, minutes: float) -> dict[str, Any]:
    """Stops the run and counts."""
    steps, problems = run.step, breaker.problems
    restarts = {row.name: row.num_restarts for row in run.table.snapshot() if row.num_restarts}
    code = run.stop() if run.process.poll() is None else run.process.returncode
    if code != 0:  # its state is saved
        problems.append(f"launch.sh ended with {code}:\n{run.words()}")
    if left := run.left():
        problems.append(f"left behind: {left}")
    books = run.books()
    for unit in ("groups", "samples"):
        if books[unit]["imbalance"]:
            problems.append(f"{books[unit]['imbalance']} {unit} are unaccounted for")
    return {
        "minutes": minutes,
        "faults": dict(sorted(breaker.done.items())),
        "seconds_to_two_more_steps": {"median": median(breaker.recovery_s), "longest": max(breaker.recovery_s, default=0.0)},
        "restarts": restarts,
        "optimizer_steps": steps,
        "books": books,
        "left": left,
        "problems": problems,
    }


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--chaos", action="store_true", help="break things; without it the run is only watched")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accerl-soak-") as folder:
        report = soak(Path(folder), minutes=args.minutes, chaos=args.chaos, seed=args.seed)
    for problem in report["problems"]:
        say(problem)
    print(json.dumps(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
