"""`breakpoint()` and ACCERL_PDB in a process without a controlling terminal."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accerl_mp.config import Config
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import HealthTable

ROOT = Path(__file__).parent.parent


class Terminal:
    """The person's side of a pseudo terminal."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        self.path = os.ttyname(self._theirs)
        os.set_blocking(self._ours, False)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode() + b"\n")

    def expect(self, text: str, timeout_s: float = 15) -> str:
        """What was shown up to `text`, which is then taken away."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._ours, 4096).decode()
            except BlockingIOError:
                time.sleep(0.02)
        before, _, self.text = self.text.partition(text)
        return before

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def paths(tmp_path: Path, terminal: Terminal) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path)
    Config.from_flat({"placement": "cpu"}).save(paths.args)
    (tmp_path / "tty").write_text(terminal.path + "\n")
    table = HealthTable.create(paths.health, ["ingest/0", "stats/0"])
    board = Board.create(paths.board)
    yield paths
    table.unlink()
    board.unlink()


def start(paths: RunPaths, role: str, mode: str, **variables: str) -> subprocess.Popen:
    environment = os.environ | {"FAKE_MODE": mode, "PYTHONPATH": str(ROOT)} | variables
    code = f"from tests.fake_role import main, run_process; run_process({role!r}, main)"
    command = [sys.executable, "-c", code, "--run-dir", str(paths.run_dir)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)


def test_breakpoint_takes_the_terminal_and_stops_deadlines_until_the_program_goes_on(paths: RunPaths, terminal: Terminal) -> None:
    process = start(paths, "ingest", "breakpoint")
    terminal.expect("(ingest/0) ")
    table = HealthTable.attach(paths.health)
    assert table.holder == process.pid
    assert (paths.run_dir / "debugger.pid").read_text() == str(process.pid)
    before = table.clock()
    terminal.type("p process.name, mode")
    assert "('ingest/0', 'breakpoint')" in terminal.expect("(ingest/0) ")
    process.send_signal(signal.SIGINT)  # as launch.sh does on Ctrl+C: clears the line, ends nothing
    terminal.expect("(ingest/0) ")
    assert table.clock() == pytest.approx(before, abs=0.01)
    terminal.type("c")
    wait_for_state(table, "running")
    assert table.holder == 0
    assert table.clock() > before
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_accerl_pdb_stops_that_process_at_the_first_line_of_its_main(paths: RunPaths, terminal: Terminal) -> None:
    process = start(paths, "ingest", "run", ACCERL_PDB="ingest/0")
    assert 'mode = os.environ["FAKE_MODE"]' in terminal.expect("(ingest/0) ")
    terminal.type("c")
    wait_for_state(HealthTable.attach(paths.health), "running")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_a_second_debugger_waits_for_the_first(paths: RunPaths, terminal: Terminal) -> None:
    first = start(paths, "ingest", "breakpoint")
    terminal.expect("(ingest/0) ")
    second = start(paths, "stats", "breakpoint")
    time.sleep(1.0)
    terminal.type("p 1 + 1")
    assert "stats/0" not in terminal.expect("(ingest/0) ")
    terminal.type("c")
    terminal.expect("(stats/0) ")
    terminal.type("c")
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def wait_for_state(table: HealthTable, state: str) -> None:
    deadline = time.monotonic() + 10
    while table.read(table.row_of("ingest/0")).state != state:
        assert time.monotonic() < deadline
        time.sleep(0.02)
