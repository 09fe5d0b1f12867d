"""`breakpoint()` in any process of a run: pdb on the terminal that started it.

A role has no controlling terminal, so launch.sh records the path of its own in `DIR/tty` and pdb opens that. One
debugger at a time (a lock file). While one is open all deadlines of the run stand still, through the two hooks that the
process's entry passes in, and launch.sh sends Ctrl+C to it (`DIR/debugger.pid`). `ACCERL_PDB=rollout/3` stops that
process at the first line of its main (several: separated by commas).
"""

import contextlib
import fcntl
import os
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

_CLEAR_LINE = "\r\x1b[K"

STOP_AT = "ACCERL_PDB"
"""Environment variable: names of the processes that stop at their first line, separated by commas."""


def install(name: str, run_dir: Path, *, hold: Callable[[int], None], let_go: Callable[[], None]) -> None:
    """Make `breakpoint()` use this process's own terminal if a person started it, else the run's; without either Python's hook stays."""
    if tty := os.ttyname(0) if os.isatty(0) else _terminal(run_dir):
        sys.breakpointhook = BreakpointHook(lambda: TerminalPdb(name, run_dir, tty, hold=hold, let_go=let_go))


def call(name: str, function: Callable[..., None], *args: Any) -> None:
    """Call it; where ACCERL_PDB names this process, under the debugger from its first line on."""
    if name not in os.environ.get(STOP_AT, "").split(","):
        function(*args)
    elif isinstance(sys.breakpointhook, BreakpointHook):
        sys.breakpointhook.debugger.runcall(function, *args)
    else:  # no terminal is known
        pdb.runcall(function, *args)


class BreakpointHook:
    """What `breakpoint()` calls. The terminal is opened at its first use."""

    def __init__(self, open_debugger: "Callable[[], TerminalPdb]") -> None:
        self._open_debugger = open_debugger

    @cached_property
    def debugger(self) -> "TerminalPdb":
        return self._open_debugger()

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self.debugger.set_trace(sys._getframe(1))


class TerminalPdb(pdb.Pdb):
    """pdb on a terminal's path; has the lock from each stop until the program goes on.

    waits for      another process's debugger to leave the terminal, without a limit
    unblocked by   its `continue`, or its death (the lock is the kernel's)
    """

    def __init__(self, name: str, run_dir: Path, tty: str, *, hold: Callable[[int], None], let_go: Callable[[], None]) -> None:
        reader, writer = _open_terminal(tty)
        super().__init__(stdin=reader, stdout=writer, nosigint=True)
        self.prompt = f"({name}) "
        self._lock = (run_dir / "debugger.lock").open("a")
        self._record = run_dir / "debugger.pid"
        self._hold, self._let_go = hold, let_go

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with self._held():
            super().interaction(*args, **kwargs)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._hold(os.getpid())
        self._record.write_text(str(os.getpid()))
        try:
            with _interruptible():
                self.stdout.write(_CLEAR_LINE)  # the supervisor's status line may stand there
                yield
        finally:
            self._record.unlink(missing_ok=True)
            self._let_go()
            fcntl.flock(self._lock, fcntl.LOCK_UN)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl+C at the prompt interrupts what was typed; elsewhere it ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _terminal(run_dir: Path) -> str | None:
    record = run_dir / "tty"
    path = record.read_text().strip() if record.exists() else ""
    return path if path.startswith("/dev/") else None


def _open_terminal(path: str) -> tuple[TextIO, TextIO]:
    # O_NOCTTY: a session leader that opens a terminal would get it as its controlling one, with its signals.
    descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
    return open(descriptor, closefd=False), open(descriptor, "w", closefd=False)
