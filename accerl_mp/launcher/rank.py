"""What a trainer rank does around `trainer.loop.run_trainer`: environment, output, and the wait for the supervisor's end."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from accerl_mp.config import Config
from accerl_mp.launcher.causes import without_disk
from accerl_mp.launcher.environment import gpu_plan, rank_environment
from accerl_mp.launcher.sweep import sweep
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE, PARENT_PID
from accerl_mp.transport.process import Process, exit_now, run_process

_SUPERVISOR_LEAVES_S = 45.0


def run_trainer(process: Process) -> None:
    # Here, not on top: an error while torch is imported is the rank's error, logged and reported like any other.
    from accerl_mp.trainer import loop

    loop.run_trainer(process)


def run_rank(run_dir: Path, rank: int, supervisor_pid: int | None, main: Callable[[Process], None] = run_trainer) -> NoReturn:
    """Exits with the rank's code. Rank 0 leaves last, so that nothing is left when torchrun returns."""
    paths = RunPaths(run_dir)
    _prepare(paths, rank)

    def leave(code: int) -> NoReturn:
        failed = supervisor_pid is not None and _wait_for_supervisor(paths, supervisor_pid) != 0
        exit_now(int(code or failed))

    try:
        run_process("trainer", main, ["--run-dir", str(run_dir), "--index", str(rank)], leave=leave)
    except SystemExit as end:
        leave(int(end.code or 0))


def _prepare(paths: RunPaths, rank: int) -> None:
    """Variables that torch reads when it is imported; standard output and error go to the rank's log."""
    config = Config.load(paths.args)
    os.environ.update(rank_environment(config, gpu_plan(config)))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun: it takes its ranks along
        os.environ[PARENT_PID] = str(os.getppid())
    path = paths.log("trainer", rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _wait_for_supervisor(paths: RunPaths, pid: int) -> int:
    """Returns its exit code. So that torchrun returns only when nothing of the run is left.

    waits for      the supervisor's end, at most 45 s, then kills it (its children follow) and removes what it would have
    """
    deadline = time.monotonic() + _SUPERVISOR_LEAVES_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                _report_killed(paths, code)
            return code
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _report_killed(paths, None)
    return 1


def _report_killed(paths: RunPaths, code: int | None) -> None:
    """The supervisor could neither say why the run ends nor clean up: do both for it."""
    file = paths.run_dir / FAILURE_FILE
    detail = "it was killed" if code is not None else f"it did not end within {_SUPERVISOR_LEAVES_S:.0f} s"
    if not file.exists():
        with without_disk("nobody will know why the run ended"):
            PeerLost("supervisor/0", code, str(paths.log("supervisor", 0)), detail).save(file)
    sweep(paths)
