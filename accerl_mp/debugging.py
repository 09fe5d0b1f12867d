"""`breakpoint()` in any process of a run: pdb on the terminal that started it.

A role has no controlling terminal, so `launch.sh` records the path of its own in `DIR/tty` and pdb opens that. One
debugger at a time (a lock file); while it is open all deadlines of the run stand still, through the two hooks that the
process's entry passes in. `ACCERL_PDB=rollout/3` stops that process at the start of its main.
"""

import contextlib
import fcntl
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

STOP_AT = "ACCERL_PDB"
"""Environment variable: name of the process that stops at its first line."""


def install(name: str, run_dir: Path, *, hold: Callable[[int], None], let_go: Callable[[], None]) -> None:
    """Make `breakpoint()` of this process use the run's terminal. Without a recorded one, Python's own hook stays."""
    tty = _terminal(run_dir)
    if tty is None:
        return

    def hook(*_args: Any, **_kwargs: Any) -> None:
        RemotePdb(name, run_dir, tty, hold=hold, let_go=let_go).set_trace(sys._getframe(1))

    sys.breakpointhook = hook


def wanted_at_start(name: str) -> bool:
    return os.environ.get(STOP_AT) == name


class RemotePdb(pdb.Pdb):
    """pdb on a terminal path; takes the lock when it stops, gives it back when the program goes on.

    waits for      another process's debugger to leave the terminal, without a limit
    unblocked by   its `continue` or `quit`, or its death (the lock is the kernel's)
    """

    def __init__(self, name: str, run_dir: Path, tty: str, *, hold: Callable[[int], None], let_go: Callable[[], None]) -> None:
        self._lock = (run_dir / "debugger.lock").open("a")
        self._terminal_in, self._terminal_out = _open_terminal(tty)
        super().__init__(stdin=self._terminal_in, stdout=self._terminal_out, nosigint=True)
        self.prompt = f"({name}) "
        self._hold, self._let_go = hold, let_go

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with self._held():
            super().interaction(*args, **kwargs)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._hold(os.getpid())
        try:
            yield
        finally:
            self._let_go()
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _terminal(run_dir: Path) -> str | None:
    record = run_dir / "tty"
    path = record.read_text().strip() if record.exists() else ""
    return path if path.startswith("/dev/") else None


def _open_terminal(path: str) -> tuple[TextIO, TextIO]:
    # O_NOCTTY: a session leader that opens a terminal would get it as its controlling one, with its signals.
    descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
    return open(descriptor, closefd=False), open(descriptor, "w", closefd=False)
