"""torchrun for one run: `python -m accerl_mp.launcher.torchrun --run-dir DIR --nproc-per-node N --rdzv-endpoint HOST:PORT`.

torchrun's own talk goes to DIR/logs/torchrun.log; its ranks inherit the terminal. When a trainer rank has died, everything below
torchrun has ended; then torchrun is started again, with new ranks and a new supervisor, from the last saved state
(`--max-trainer-restarts`). Not torchrun's own restarts: those would not wait until the old supervisor has gone.
"""

import argparse
import contextlib
import ctypes
import io
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.launcher.children import send
from accerl_mp.launcher.claim import claim
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.resuming import plan_restart
from accerl_mp.launcher.summary import lost_lines, wait_until_over
from accerl_mp.recovery import StateError, announced_in
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import NOT_TRIED_AGAIN, PeerLost
from accerl_mp.transport.health import FAILURE_FILE, HealthTable, is_alive
from accerl_mp.transport.shared_files import descendants

_PR_SET_PDEATHSIG = 1
_TURN_S = 0.1


def main() -> None:
    """Exits with torchrun's code, of its last start."""
    parser = argparse.ArgumentParser("accerl_mp.launcher.torchrun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--rdzv-endpoint", default="127.0.0.1:0")
    args = parser.parse_args()
    flags = torchrun_flags(args.nproc_per_node, args.rdzv_endpoint)
    sys.exit(Launcher(RunPaths(args.run_dir), flags).run())


class Launcher:
    """Starts torchrun, and again while that may help.

    waits for      torchrun, without a limit: it is the run
    at the end     a signal to this process is passed on; launch.sh's last ones reach torchrun too (one process group). After one
                   nothing is started again
    a dead parent  launch.sh's death is the supervisor's business; if this process dies, torchrun is killed with it
    """

    def __init__(self, paths: RunPaths, flags: list[str], *, module: str = "accerl_mp.launcher") -> None:
        self._paths = paths
        self._words = [*flags, "-m", module, "--run-dir", str(paths.run_dir)]
        self._most = Config.load(paths.args).metrics.max_trainer_restarts
        self._was_signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Returns the exit code: not 0 where a stop leaves less than an earlier start had trained."""
        code = self._run()
        reached = Reached.load(self._paths.reached)
        if self._was_signalled and not reached.asked_to_end:
            with contextlib.suppress(OSError):  # the summary says "finished" then, where DIR/stop has no room either
                replace(reached, asked_to_end=1).save(self._paths.reached)
        return code or int(bool(lost_lines(self._paths, reached)))

    def _run(self) -> int:
        num_restarts, code, lost = 0, 2, None
        while True:
            # First of all: where launch.sh was killed, another start may have the folder by now, and no word of this one belongs in it.
            if taken := self._taken():  # also where the last start's supervisor does not end
                _say(f"the run is not started: {taken}")
                return code
            if lost is not None and not self._prepare_restart(lost, num_restarts):
                return code
            if self._is_asked_to_end:
                return 0 if lost is None else code
            before = announced_in(self._paths.resume)
            code = self._wait(_start_torchrun(self._paths, self._words))
            shutil.rmtree(self._paths.torchrun, ignore_errors=True)
            if code == 0:
                return code
            wait_until_over(self._paths)
            if self._is_asked_to_end:
                # A signal to all processes at once reaches torchrun too, which then ends with an error whatever its ranks have done.
                return 0 if self._paths.ended.exists() or self._has_learned_nothing(before) else code
            lost = PeerLost.load(self._paths.run_dir / FAILURE_FILE)
            # The first push of a start teaches nothing: a round was trained once a second one has begun.
            has_trained = announced_in(self._paths.resume) > before + 1
            refusal = restart_refusal(lost, num_restarts=num_restarts, most=self._most, has_trained=has_trained)
            if refusal is not None:
                _say(refusal)
                return code
            num_restarts += 1

    def _taken(self) -> str:
        try:
            return claim(self._paths, is_preparing=False)
        except OSError as error:
            return f"its folder cannot be claimed: {error}"

    def _has_learned_nothing(self, before: int) -> bool:
        """No push had begun in this start, so no step was trained: nothing is left unsaved. `before`: the last version before it."""
        return announced_in(self._paths.resume) == before and Reached.load(self._paths.reached).is_saved

    @property
    def _is_asked_to_end(self) -> bool:
        return self._was_signalled or self._paths.stop.exists()

    def _prepare_restart(self, lost: PeerLost, num_restarts: int) -> bool:
        """False: the start could not be written down; states are what they were."""
        try:
            start, damaged = plan_restart(self._paths, num_restarts=num_restarts)
            for text in damaged:
                _say(f"{text}: it is left out")
            start.save(self._paths.resume)
            PeerLost.clear(self._paths.run_dir / FAILURE_FILE)
        except (OSError, StateError) as error:
            _say(f"{lost}\nlaunch.sh: cannot start the run again: {error}; its saved states are kept for --resume auto")
            return False
        before = Reached.load(self._paths.reached)
        with contextlib.suppress(OSError):  # what a stop in this start loses may go unsaid then
            Reached(step_before=max(before.step, before.step_before)).save(self._paths.reached)
        where = f"from {Path(start.state).name}" if start.state else "from the beginning: no state was saved yet"
        _say(f"{lost}\nlaunch.sh: starts the run again (restart {num_restarts} of {self._most}) {where}")
        return True

    def _wait(self, pid: int) -> int:
        is_told = False
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if self._is_asked_to_end and not is_told:
                is_told = self._pass_on(pid)
            time.sleep(_TURN_S)

    def _pass_on(self, torchrun: int) -> bool:
        """Whether somebody has been told that the run is to end; else it is tried again.

        DIR/stop tells the supervisor; where that cannot be written, a signal does. While torchrun has no ranks yet it is ended itself.
        """
        with contextlib.suppress(OSError):
            self._paths.stop.touch()
        if not descendants(torchrun):
            os.kill(torchrun, signal.SIGTERM)
            return True
        if self._paths.stop.exists():
            return self._paths.health.exists()  # its supervisor is there: it looks
        supervisor = _supervisor_of(self._paths)
        send(supervisor, signal.SIGTERM)
        return supervisor > 0

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._was_signalled = True


def restart_refusal(lost: PeerLost, *, num_restarts: int, most: int, has_trained: bool) -> str | None:
    """Why the run is not started again; None: it is. Empty: there is nothing to say."""
    if not lost.role.startswith("trainer/") or most == 0:
        return ""
    error = lost.detail.partition(":")[0]
    if error in NOT_TRIED_AGAIN:
        return f"{lost.role} ended with {error}: the run is not started again, that would only hide it"
    if num_restarts >= most:
        return f"--max-trainer-restarts {most} is used up"
    if num_restarts and not has_trained:
        return f"{lost.role} died again before a round was trained: it is not started again (--max-trainer-restarts {most})"
    return None


def torchrun_flags(num_ranks: int, endpoint: str) -> list[str]:
    """One machine; a port of 0 lets torchrun choose a free one."""
    host = endpoint.rpartition(":")[0]
    # With the address given, torchrun does not resolve the machine's host name, which a container need not know.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", host]
    return ["--nnodes", "1", "--nproc-per-node", str(num_ranks), "--max-restarts", "0", *rendezvous]


def _start_torchrun(paths: RunPaths, words: list[str]) -> int:
    """Its pid: a fork of this process, which has imported nothing heavy."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log_file = paths.log("torchrun", 0).with_name("torchrun.log")
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # Python's streams only: the descriptors 1 and 2 stay the terminal, for the ranks.
    sys.stdout = sys.stderr = _LogStream(log_file.open("ab", buffering=0))
    shutil.rmtree(paths.torchrun, ignore_errors=True)  # of a launcher that was killed
    paths.torchrun.mkdir(mode=0o700)
    tempfile.tempdir = str(paths.torchrun)  # torchrun's alone: its ranks inherit variables
    os.environ["OMP_NUM_THREADS"] = "1"  # else torchrun warns; ranks choose their own
    sys.argv = ["torchrun", *words]
    runpy.run_module("accerl_mp.trainer.loopback", run_name="__main__")
    sys.exit(0)


def _supervisor_of(paths: RunPaths) -> int:
    """Its pid; 0: it has not begun, or has ended."""
    try:
        table = HealthTable.attach(paths.health)
    except (OSError, ValueError):
        return 0
    pid = int(table.word(table.row_of("supervisor/0"), "pid"))
    table.close()
    return pid if pid and is_alive(pid) else 0


class _LogStream(io.TextIOBase):
    """torchrun's words, as far as the disk has room: those about a failed rank must not become an error, and an exit code, of their own."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text.encode(errors="replace"))
        return len(text)

    def fileno(self) -> int:
        return self._file.fileno()


def _say(text: str) -> None:
    if text:
        print(f"launch.sh: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
