"""A run on the demo's setting that is broken all the time: `python tests/soak.py --minutes M --chaos [--seed N]`.

Every 20 s (or when training has gone on, where that takes longer) something breaks: a random process (rollout, ingest, stats,
vLLM's front, its engine core or its worker) is killed, or stopped for good, or stopped for a while; or the disk of the run folder
(a small tmpfs) is full for a while. In a soak of 10 minutes or more a trainer rank is killed too, once and early: the whole run then
starts again from its saved state, and the books begin anew with it.

After M minutes the run is asked to stop, and then: training went on, every episode is accounted for, and nothing is left:
    episodes started = trained + expired + evicted + discarded + in flight (rollouts and rings)
Each of the two sides is counted where it happens (`accerl_mp/ingest/conservation.py`).

The last line on standard output is the summary as JSON; the exit code is 1 if anything is wrong.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from accerl_mp.recovery import Start  # noqa: E402
from accerl_mp.transport.saved_ring import unpack_rank  # noqa: E402
from tests.live_run import LiveRun  # noqa: E402
from tests.small_disk import SmallDisk  # noqa: E402

FLAGS = """
@accerl_mp/presets/demo.args --max-steps 1000000 --learning-rate 1e-7 --eval-every-rounds 50 --resume-every-rounds 2
--max-restarts 100000 --max-trainer-restarts 1 --hang-timeout-s 15
""".split()
"""The policy stays as it is: one that has learned to win every game leaves groups without signal, and nothing to train."""
GROUP_SIZE = 8
"""Of the demo; each episode of it is one sample."""
FIRST, THEN = ("kill", "stop", "disk", "kill rank"), ("kill", "pause", "kill", "stop", "kill", "disk")
RANK_MINUTES = 10.0
"""A soak shorter than this kills no rank: a cold start would be all that it shows."""
DISK_SIZE, DISK_FULL_S = "96m", 12.0
EVERY_S = 20.0
PAUSE_S = (1.0, 10.0)
"""Shorter than --hang-timeout-s: nobody is started again."""
RECOVERS_S, STARTS_AGAIN_S = 300.0, 480.0
"""Longest time after a fault until two more optimizer steps are done; and until a run that starts again has begun to train."""


class Chaos:
    """Breaks something, and sees that training goes on."""

    def __init__(self, run: LiveRun, disk: SmallDisk, seed: int, *, kills_ranks: bool) -> None:
        self._run, self._disk, self._random = run, disk, random.Random(seed)
        first = FIRST if kills_ranks else FIRST[:-1]
        self._kinds = itertools.chain(first, itertools.cycle(THEN))
        self.done: Counter[str] = Counter()
        self.recovery_s: list[float] = []
        self.num_before = 0
        """Episodes of groups in the books whose samples were trained or expired before the run started again."""
        self.problems: list[str] = []

    def strike(self) -> None:
        """One fault; returns when the run has made two more steps."""
        kind, started = next(self._kinds), time.monotonic()
        before = self._run.step
        try:
            match kind:
                case "disk":
                    self._fill()
                case "kill rank":
                    before = self._kill_rank()
                case _:
                    self._hit(kind)
            self._run.wait_for(lambda: self._run.step >= before + 2, f"two more steps after {kind}", RECOVERS_S, every_s=0.1)
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
            if kind == "pause":
                time.sleep(self._random.uniform(*PAUSE_S))
                os.kill(pid, signal.SIGCONT)

    def _kill_rank(self) -> int:
        """Returns the step at which the run trains again."""
        index, before = self._random.randrange(2), self._run.step
        say(f"kill trainer/{index} at step {before}")
        self.done["kill trainer rank"] += 1
        os.kill(self._run.row(f"trainer/{index}").pid, signal.SIGKILL)
        self._run.follow(STARTS_AGAIN_S)
        if (saved := Start.load(self._run.paths.resume).saved) is not None:  # its groups are put into the rings with what is left of them
            groups = [group for rank in range(saved.num_ranks) for group in unpack_rank(saved.rank_file(rank))[1]]
            self.num_before = sum(group.size - len(group.samples) for group in groups)
        self._run.wait_for(lambda: self._run.runs("trainer/0"), "the run to train again", STARTS_AGAIN_S, every_s=0.1)
        say(f"goes on at step {self._run.step}")
        return self._run.step

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


def soak(folder: Path, *, minutes: float, chaos: bool, seed: int, keep_logs: Path | None = None) -> dict[str, Any]:
    (folder / "disk").mkdir()
    disk = SmallDisk(folder / "disk", size=DISK_SIZE)
    flags = [*FLAGS, "--seed", str(42 + seed), "--checkpoint-dir", str(folder / "exports")]
    run = LiveRun(folder / "disk" / "run", flags, output=folder / "output.txt")
    try:
        run.attach(300)
        run.wait_training(1, 300)
        say("training has begun")
        breaker = Chaos(run, disk, seed, kills_ranks=minutes >= RANK_MINUTES)
        last = time.monotonic()
        until = last + 60 * minutes
        while time.monotonic() < until and not breaker.problems:
            time.sleep(max(0.0, min(last + EVERY_S, until) - time.monotonic()))
            last = time.monotonic()
            if chaos and last < until:
                with contextlib.suppress(AssertionError):
                    breaker.strike()
        return summary(run, breaker, minutes=minutes)
    finally:
        run.close()
        if keep_logs is not None:
            shutil.copytree(run.paths.run_dir / "logs", keep_logs, dirs_exist_ok=True)
            shutil.copy(run.output, keep_logs)
        disk.close()


def summary(run: LiveRun, breaker: Chaos, *, minutes: float) -> dict[str, Any]:
    """Stops the run and counts."""
    steps, problems = run.step, breaker.problems
    restarts = {row.name: row.num_restarts for row in run.table.snapshot() if row.num_restarts}
    asked = time.monotonic()
    code = run.stop() if run.process.poll() is None else run.process.returncode
    stop_s = round(time.monotonic() - asked, 1)
    if code != 0:  # its state is saved
        problems.append(f"launch.sh ended with {code}:\n{run.words()}")
    if left := run.left():
        problems.append(f"left behind: {left}")
    if code not in (0, None) and not (run.paths.run_dir / "books.json").exists():
        return {"minutes": minutes, "faults": dict(breaker.done), "optimizer_steps": steps, "left": left, "problems": problems}
    books = run.books()
    episodes = count_episodes(books, num_before=breaker.num_before)
    for unit, count in {"groups": books["groups"], "samples": books["samples"], "episodes": episodes}.items():
        if count["imbalance"]:
            problems.append(f"{count['imbalance']} {unit} are unaccounted for")
    return {
        "minutes": minutes,
        "faults": dict(sorted(breaker.done.items())),
        "seconds_to_two_more_steps": {"median": median(breaker.recovery_s), "longest": max(breaker.recovery_s, default=0.0)},
        "restarts": restarts,
        "seconds_to_stop": stop_s,
        "optimizer_steps": steps,
        "episodes": episodes,
        "books": books,
        "left": left,
        "problems": problems,
    }


def count_episodes(books: dict[str, Any], *, num_before: int) -> dict[str, int]:
    """The books in episodes; `num_before`: `Chaos.num_before`.

    That a group that was put into a ring has left a sample for each of its episodes is part of the check.
    """
    groups, samples = books["groups"], books["samples"]
    count = {
        "started": GROUP_SIZE * groups["started"],
        "trained": samples["trained"],
        "expired": samples["expired"],
        "evicted": samples["evicted"],
        "discarded": GROUP_SIZE * sum(groups[end] for end in ("zero_std", "rejected", "too_large", "set_aside"))
        + samples["refused"]
        + samples["torn"]
        + samples["left"],
        "in_flight": GROUP_SIZE * groups["in_flight"] + samples["in_rings"],
        "ended_before_the_restart": num_before,
    }
    return count | {"imbalance": count["started"] - sum(number for name, number in count.items() if name != "started")}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--chaos", action="store_true", help="break things; without it the run is only watched")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-logs", type=Path, help="copy the run's logs and its terminal here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accerl-soak-") as folder:
        report = soak(Path(folder), minutes=args.minutes, chaos=args.chaos, seed=args.seed, keep_logs=args.keep_logs)
    for problem in report["problems"]:
        say(problem)
    print(json.dumps(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
