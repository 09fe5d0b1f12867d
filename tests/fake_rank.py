"""A trainer rank without a trainer, for the supervisor's tests: `python -m tests.fake_rank --run-dir DIR`.

Rank 0 forks the real supervisor with roles of `tests.fake_role`; FAKE_MODES is "mode:count,mode:count".
"""

import os
import sys
import time
from pathlib import Path

from accerl_mp.launcher.rank import run_rank
from accerl_mp.launcher.roles import Role
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.transport.process import Process


def main(process: Process) -> None:
    """Trains nothing until the test says so by a file."""
    if os.environ.get("FAKE_IMPORTS"):  # torch on a machine that has no time for it
        time.sleep(600)
    process.health.set_state("running")
    if trained := os.environ.get("FAKE_TRAINED"):
        for word, number in zip(("optimizer_step", "saved_step", "policy_version"), trained.split(), strict=True):
            process.board.set(word, int(number))
    with process.health.waiting("the test to finish it", timeout_s=0) as wait:
        while not (process.paths.run_dir / "finish").exists():
            if (process.paths.run_dir / f"break-{process.index}").exists():
                raise RuntimeError("loss is nan")
            if (process.paths.run_dir / f"stick-{process.index}").exists():
                time.sleep(600)
            wait.check()
            time.sleep(0.02)
    process.board.set("finished", 1)


def roles() -> list[Role]:
    """The first one is named like a real role each: the table's names must differ."""
    return [_role(name, mode) for name, mode in (part.split(":") for part in os.environ["FAKE_MODES"].split(","))]


def _role(name: str, mode: str) -> Role:
    command = [sys.executable, "-c", f"from tests.fake_role import main, run_process; run_process({name!r}, main)"]
    limits = {"stop_timeout_s": 20, "start_timeout_s": 60} if "start" in mode else {"stop_timeout_s": 2, "start_timeout_s": 3}
    return Role(name, 1, command, lambda _index: dict(os.environ) | {"FAKE_MODE": mode}, **limits)


if __name__ == "__main__":
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        time.sleep(float(os.environ.get("FAKE_LATE_S", "0")))
    run_rank(run_dir, rank, fork_supervisor(run_dir, roles()) if rank == 0 else None, main)
