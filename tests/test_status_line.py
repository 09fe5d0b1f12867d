"""The supervisor's status line: what it says, and that it is drawn on terminals only."""

import os
import pty
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accerl_mp import log
from accerl_mp.launcher.status_line import StatusLine, describe
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import Health, HealthTable

NAMES = ["supervisor/0", "trainer/0", "trainer/1", "inference/0"]


@pytest.fixture
def table() -> HealthTable:
    return HealthTable.detached(NAMES)


@pytest.fixture
def board() -> Board:
    return Board.detached()


def enter(table: HealthTable, board: Board, *names: str) -> list[Health]:
    found = [Health(name, table=table, board=board) for name in names]
    for health in found:
        health.set_state("running")
    return found


def test_it_names_who_is_not_ready(table: HealthTable, board: Board) -> None:
    enter(table, board, "supervisor/0", "trainer/0", "trainer/1")
    assert describe(table.snapshot(), board) == "starting #########--- 3 of 4, not yet: inference/0"


def test_it_says_how_far_the_run_is_and_whom_it_waits_for(table: HealthTable, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = enter(table, board, *NAMES)[1]
    board.set("optimizer_step", 7)
    board.set("policy_version", 6)
    board.set("eval_asked", 1)
    assert describe(table.snapshot(), board) == "step 7, weights 6, evaluation runs"
    with trainer.waiting("ring/0 to hold the samples of an optimizer step", 0):
        assert "waits" not in describe(table.snapshot(), board), "a short wait is no news"
        monkeypatch.setattr("accerl_mp.launcher.status_line._SHORT_S", -1.0)
        assert "trainer/0 waits 0 s for ring/0 to hold the samples of an optimizer step" in describe(table.snapshot(), board)


def test_a_respawned_process_does_not_bring_the_start_back(table: HealthTable, board: Board) -> None:
    enter(table, board, *NAMES)
    board.set("policy_version", 3)
    Health("inference/0", table=table, board=board).set_state("starting")
    assert describe(table.snapshot(), board) == "step 0, weights 3"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    monkeypatch.setenv(log.TERMINAL_FD, str(theirs))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read(descriptor: int) -> str:
    try:
        return os.read(descriptor, 4096).decode()
    except BlockingIOError:
        return ""


def test_a_terminal_gets_one_line_that_is_rewritten(
    table: HealthTable, board: Board, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    line = StatusLine(table, board)
    line.show()
    assert read(terminal[0]).startswith("\r\x1b[K[0:00] starting ------------ 0 of 4")
    line.show()
    assert read(terminal[0]) == "", "at most twice a second"
    log.write_terminal("hello")
    assert read(terminal[0]) == "\r\x1b[Khello\r\n"
    StatusLine(table, board, begun=time.time() - 125).show()
    assert re.match(r"\r\x1b\[K\[2:[01]\d\] starting", read(terminal[0])), "from the moment that every clock counts from"
    table.hold(os.getpid())
    monkeypatch.setattr(line, "_next", 0.0)
    line.show()
    assert read(terminal[0]) == "", "a debugger has the terminal"
    monkeypatch.setattr(log, "_debugger", Path(__file__))  # a file that is there, as debugger.pid is
    log.write_terminal("a warning")
    assert read(terminal[0]) == "\r\na warning\r\n", "its prompt stays on the screen"


def test_a_dumb_terminal_and_a_pipe_get_no_control_characters(
    table: HealthTable, board: Board, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    StatusLine(table, board).show()
    log.write_terminal("hello")
    assert read(terminal[0]) == "hello\r\n"
    reader, writer = os.pipe()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(log.TERMINAL_FD, str(writer))
    StatusLine(table, board).show()
    log.write_terminal("hello")
    assert os.read(reader, 100) == b"hello\n"
    os.close(reader)
    os.close(writer)
