"""What tools show: results on standard output, progress on standard error, and what libraries print in a log file.

On a terminal progress is a bar; elsewhere it is a plain line now and then, without control characters. NO_COLOR and TERM=dumb count.
"""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from accerl_mp.config import ConfigError

_PLAIN_WIDTH = 140
_LINE_EVERY_S = 10.0
_LAST_LINES = 15
_LIBRARIES_AS_THEY_ARE = {"redirect_stdout": False, "redirect_stderr": False}
"""rich would bring to the terminal what Python code of this process prints meanwhile, which `quiet` sends to the log."""
_ERROR_LINE = re.compile(r"\b(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b: .+")
"""The last line of a traceback, behind whatever vLLM puts before it."""


def plain(text: str) -> str:
    """Without control characters but line breaks and tabs: what a game, a model or a path says must not steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def counted(number: int, what: str) -> str:
    """Example: `1 game`, `2 games`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


class ToolFailed(RuntimeError):
    """What ends a tool with exit code 1: a sentence for the last line."""


class Terminal:
    """The two streams. They are descriptors of their own: `quiet` takes 1 and 2 away from everybody else."""

    def __init__(self) -> None:
        self.out, self.err = _console(1), _console(2)

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Gives a function that counts one more."""
        shown = self._bar(what, total) if self.err.is_terminal else self._lines(what, total)
        with shown as advance:
            yield advance

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For work whose length is not known."""
        start = time.monotonic()
        if self.err.is_terminal:
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            with Progress(*columns, console=self.err, transient=True, **_LIBRARIES_AS_THEY_ARE) as spinner:
                spinner.add_task(what, total=None)
                yield
        else:
            self.say(f"{what} ...")
            yield
        self.say(f"{what}: {time.monotonic() - start:.0f} s")

    def say(self, text: str) -> None:
        self.err.print(plain(text), highlight=False, markup=False)

    def table(self, title: str, header: list[str], rows: list[list[str]], *, narrow: list[list[str]] | None = None) -> None:
        """Numbers to the right, the first column to the left.

        Where the terminal is too narrow: the rows of `narrow` instead; where it is for those too, a block of lines for each row.
        """
        self.out.print(plain(title), highlight=False, markup=False)
        for cells in (rows, narrow):
            if cells is not None and self._fits(table := _table(header, cells)):
                self.out.print(table, highlight=False, markup=False)
                return
        blocks = _blocks(header, rows if narrow is None else narrow, self.out.width)
        self.out.print(plain("\n".join(blocks)), highlight=False, markup=False)

    def _fits(self, table: Table) -> bool:
        return Measurement.get(self.out, self.out.options.update(width=1000), table).maximum <= self.out.width

    @contextlib.contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        text = TextColumn("{task.description}", markup=False)
        columns = text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.err, **_LIBRARIES_AS_THEY_ARE) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    @contextlib.contextmanager
    def _lines(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        start, shown_at, done = time.monotonic(), time.monotonic(), 0

        def advance() -> None:
            nonlocal shown_at, done
            done += 1
            now = time.monotonic()
            if done == total or now - shown_at >= _LINE_EVERY_S:
                shown_at = now
                self.say(f"{what}: {done} of {total} in {now - start:.0f} s")

        yield advance


@contextlib.contextmanager
def quiet(log_file: Path, terminal: Terminal) -> Iterator[None]:
    """What this process and its children print goes to the log. If the block fails, its causes are shown and ToolFailed ends the tool."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    kept = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    begin = log_file.stat().st_size
    try:
        yield
    except ConfigError:
        raise
    except (RuntimeError, OSError, ValueError, ImportError, AssertionError) as error:
        traceback.print_exc()
        with log_file.open(errors="replace") as file:
            file.seek(begin)
            written = file.read().splitlines()
        terminal.say(f"failed; from {log_file}:")
        for line in causes_in(written):
            terminal.say(f"    {line}")
        raise ToolFailed(f"{type(error).__name__}: {error}") from error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _table(header: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def _blocks(header: list[str], rows: list[list[str]], width: int) -> list[str]:
    """A line with the name of each row, then its cells with theirs, as many a line as there is room for."""
    widths, lines = [max(len(row[place]) for row in rows) for place in range(len(header))], []
    for row in rows:
        lines.append(row[0])
        line = ""
        for name, cell, longest in list(zip(header, row, widths, strict=True))[1:]:
            part = f"  {name} {cell:>{longest}}"
            if line and len(line + part) > width:
                lines.append(line)
                line = ""
            line += part
        lines.append(line)
    return lines


def causes_in(lines: list[str]) -> list[str]:
    """The lines of a log that name an error, each once, in order; the log's end where none does. vLLM tells a process's failure thrice."""
    named = [match[0] for line in lines if (match := _ERROR_LINE.search(line))]
    return list(dict.fromkeys(named))[:_LAST_LINES] or lines[-_LAST_LINES:]


def _console(descriptor: int) -> Console:
    is_terminal = os.isatty(descriptor)
    file = os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace")  # a terminal of another encoding has not every letter
    return Console(file=file, width=None if is_terminal else _PLAIN_WIDTH, soft_wrap=not is_terminal)
