"""Logging: one file per process, and on the terminal what a person should see.

The terminal shows warnings of every process, the launcher's own lines and `terminal_line()`. A role's standard
output and error go to its log file, so the terminal is a file descriptor of its own, handed down in ACCERL_TERMINAL_FD.
"""

import logging
import os
from pathlib import Path

from accerl_mp.topology import RunPaths

TERMINAL_FD = "ACCERL_TERMINAL_FD"
"""Environment variable: number of the file descriptor that is the terminal; unset: standard error."""

DEBUGGER_PID = "debugger.pid"
"""In the run folder: who has the terminal for pdb, as long as it has it."""

_debugger = Path(os.devnull) / DEBUGGER_PID  # never there, until `setup` knows the run folder

_CLEAR_LINE = "\r\x1b[K"

_TALKATIVE = ("launcher", "supervisor")
_OURS = ("accerl_mp", "__main__")

_log = logging.getLogger(__name__)


def setup(paths: RunPaths, role: str, index: int, level: str = "info") -> None:
    """Send this process's records to `DIR/logs/role-index.log` and to the terminal. `level`: `[role=]LEVEL,...`."""
    global _debugger
    _debugger = paths.run_dir / DEBUGGER_PID
    path = paths.log(role, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    root.handlers = [_to_file(path, f"{role}/{index}"), _to_terminal(role, index)]
    root.setLevel(level_of(role, level))


def level_of(role: str, text: str) -> int:
    """The level of `role` in a `--log-level` value; ValueError for a level that does not exist.

    Example: `level_of("rollout", "rollout=debug,warning") == DEBUG`.
    """
    parts = [part.strip().rpartition("=") for part in text.split(",")]
    levels = {name: level_number(level) for name, _, level in parts}
    return levels.get(role, levels.get("", logging.INFO))


def level_number(name: str) -> int:
    """ValueError for a name that logging does not know."""
    number = logging.getLevelNamesMapping().get(name.upper())
    if number is None:
        raise ValueError(f"unknown log level {name!r}")
    return number


def terminal_line(text: str) -> None:
    """One line on the terminal and in this process's log. Never fails: the terminal may be gone."""
    _log.info("%s", text, extra={"shown": True})
    write_terminal(text)


def keep_terminal() -> None:
    """Before standard error is pointed elsewhere: keep what it is now as the terminal, for this process and its children."""
    os.environ.setdefault(TERMINAL_FD, str(os.dup(2)))


def terminal_fd() -> int:
    """The descriptor to hand down to child processes."""
    return int(os.environ.get(TERMINAL_FD, "2"))


def write_terminal(text: str) -> None:
    """A whole line; on a terminal it takes the place of the line that `rewrite_line` left there, but not of a debugger's prompt."""
    lead = "" if not terminal_can_rewrite() else "\n" if _debugger.exists() else _CLEAR_LINE
    # One write a line: lines of several processes do not mix.
    _write(lead + text + "\n")


def terminal_can_rewrite() -> bool:
    """False for files and pipes, and for terminals that know no control characters."""
    return os.environ.get("TERM", "dumb") != "dumb" and os.isatty(terminal_fd())


def rewrite_line(text: str) -> None:
    """Show `text` in place of what it showed last, cut to the terminal's width. Only where `terminal_can_rewrite`."""
    try:
        width = os.get_terminal_size(terminal_fd()).columns or 80
    except OSError:
        return
    _write(_CLEAR_LINE + text[: width - 1])


def _write(text: str) -> None:
    try:
        os.write(terminal_fd(), text.encode(errors="surrogateescape"))  # names of files need not be UTF-8
    except OSError:
        return


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_terminal(self.format(record))


def _to_file(path: Path, name: str) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8", errors="surrogateescape")
    handler.setFormatter(_formatter(name))
    return handler


def _to_terminal(role: str, index: int) -> logging.Handler:
    handler = _Terminal(logging.INFO if role in _TALKATIVE else logging.WARNING)
    handler.setFormatter(_Brief(f"{role}/{index}"))
    # Other libraries' warnings are in the log file; on the terminal they would drown ours.
    handler.addFilter(lambda record: record.name.startswith(_OURS) and not hasattr(record, "shown"))
    return handler


def _formatter(name: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s.%(msecs)03d {name} %(levelname)-5s %(message)s", "%H:%M:%S")


class _Brief(logging.Formatter):
    """Like the log's lines, without tracebacks: those are in the log file."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {name} %(levelname)-5s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        return self.formatMessage(record)
