"""Starting, ending and reaping processes, as the supervisor does it. Standard library only.

The supervisor is a child subreaper: when one of its processes dies, that one's own children (vLLM's EngineCore and workers)
become children of the supervisor. It ends these too; nothing outlives a run.
"""

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from accerl_mp.launcher.roles import Role
from accerl_mp.topology import RunPaths
from accerl_mp.transport.shared_files import parent_of_each

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OOM_KILLS = re.compile(rb"^oom_kill ([0-9]+)$", re.MULTILINE)
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit codes that no process gives itself; any other end in the middle of an env step is the game's interpreter's."""


class Child:
    """One process of a role, over all its restarts."""

    def __init__(self, role: Role, index: int) -> None:
        self.role, self.index = role, index
        self.name = f"{role.name}/{index}"
        self.pid = 0
        """0: not running."""
        self.started = 0.0
        """By the health table's clock, which stands still for a debugger."""
        self.was_running = False
        """Has reached state `running` in this life."""
        self.num_deaths_at_once = 0
        """In a row."""
        self.start_at: float | None = None
        """When to start it (again); None: it runs, or shall not."""
        self.verdict = ""
        """Why the supervisor has killed it in this life."""
        self._oom_kills_before = 0
        self._popen: subprocess.Popen | None = None

    def start(self, paths: RunPaths, *, terminal_fd: int, parent_variable: str, now: float) -> None:
        """In a session of its own: no signal of the terminal or of torchrun reaches it. `now`: by the table's clock."""
        command = [*self.role.command, "--run-dir", str(paths.run_dir), "--index", str(self.index)]
        environment = self.role.environment(self.index) | {parent_variable: str(os.getpid())}
        with paths.log(self.role.name, self.index).open("a") as log_file:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                pass_fds=[terminal_fd],
            )
        self.pid, self.started, self.was_running, self.start_at = self._popen.pid, now, False, None
        self.verdict, self._oom_kills_before = "", num_oom_kills()

    def was_killed(self, exit_code: int, *, was_signalled: bool) -> bool:
        """By somebody else: not by itself, nor by the supervisor, nor by the kernel as memory ran out. `was_signalled`: asked to leave."""
        is_from_outside = exit_code in _FROM_OUTSIDE or (exit_code == 0 and was_signalled)
        return is_from_outside and not self.verdict and num_oom_kills() == self._oom_kills_before

    def ended(self, exit_code: int) -> None:
        """It has been reaped. What it leaves behind is an orphan (`kill_orphans`)."""
        if self._popen is not None:
            self._popen.returncode = exit_code  # we reaped it: Popen must not look for it again
        self.pid = 0

    def ask(self) -> None:
        send(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        # Not its group: the resource tracker in it still has to unlink what the others leave.
        send(self.pid, signal.SIGKILL)


def become_subreaper(parent_pid: int) -> None:
    """Adopt orphaned descendants; get SIGTERM when the parent's thread ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        send(os.getpid(), signal.SIGTERM)


def wake_on_signals(handler: Callable[[int, FrameType | None], None]) -> int:
    """A file descriptor that becomes readable at SIGCHLD, SIGTERM and SIGINT: no signal is missed between two looks."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return reader


def reap() -> dict[int, int]:
    """Collect every process that has ended, ours and adopted: `{pid: exit code}`, negative for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def kill_orphans(known: set[int], *, trackers_too: bool) -> int:
    """Kill children of this process that it did not start: orphans of processes that died. Returns how many there were.

    Does not wait; call it until it returns 0: an orphan's own children come next. multiprocessing's resource trackers end
    by themselves once everybody who used them is gone, and unlink their shared memory (vLLM: 160 MiB): spare them first.
    """
    orphans = [pid for pid in _children_of(os.getpid()) if pid not in known]
    for pid in orphans:
        if trackers_too or not _is_tracker(pid):
            send(pid, signal.SIGKILL)
    return len(orphans)


def num_oom_kills() -> int:
    """Of processes of this machine, by the kernel as memory ran out, also in a container; 0 where it does not count them."""
    try:
        found = _OOM_KILLS.search(Path("/proc/vmstat").read_bytes())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone; pid 0 (nobody) is skipped."""
    if pid > 0:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def _children_of(parent: int) -> list[int]:
    return [pid for pid, ppid in parent_of_each().items() if ppid == parent]


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
