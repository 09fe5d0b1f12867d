"""Health table, named waits, board, errors, log and timer."""

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accerl_mp import log
from accerl_mp.config import Config
from accerl_mp.timing import Timer
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import WORDS, Board
from accerl_mp.transport.errors import Closed, DeadlineExpired, PeerLost
from accerl_mp.transport.health import FAILURE_FILE, Health, HealthTable

ROOT = Path(__file__).parent.parent


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    """A run folder with a table and a board, as the supervisor makes them."""
    paths = RunPaths(tmp_path / "run dir")
    paths.run_dir.mkdir()
    Config.from_flat({"placement": "cpu"}).save(paths.args)
    table = HealthTable.create(paths.health, ["trainer/0", "ingest/0", "stats/0"])
    board = Board.create(paths.board)
    yield paths
    table.unlink()
    board.unlink()


def open_health(paths: RunPaths, name: str) -> Health:
    return Health(name, table=HealthTable.attach(paths.health), board=Board.attach(paths.board), run_dir=paths.run_dir)


def wait_for_ever(health: Health, what: str, timeout_s: float, flag: str = "") -> None:
    with health.waiting(what, timeout_s, flag) as wait:
        while True:
            wait.check()
            time.sleep(0.01)


@pytest.mark.parametrize(
    "error",
    [Closed("end"), PeerLost("inference/0", -9, "a.log", "killed"), DeadlineExpired("trainer/1", "ring/1", 12.5, "--x")],
)
def test_errors_survive_pickling_with_their_fields(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_the_first_failure_survives_its_file(tmp_path: Path) -> None:
    lost = PeerLost("rollout/3", -11, "/a b/rollout-3.log", "first line\nsecond: line")
    lost.save(tmp_path / FAILURE_FILE)
    assert vars(PeerLost.load(tmp_path / FAILURE_FILE)) == vars(lost)
    assert PeerLost.load(tmp_path / "missing").exit_code is None


def test_every_word_of_the_board_has_its_start_value_and_is_seen_by_others(paths: RunPaths) -> None:
    writer, reader = Board.attach(paths.board), Board.attach(paths.board)
    assert {name: reader.get(name) for name in WORDS} == {name: start for name, (_, start) in WORDS.items()}
    for number, name in enumerate(WORDS):
        writer.set(name, -number)
    assert [reader.get(name) for name in WORDS] == [-number for number in range(len(WORDS))]


def test_a_wait_that_expires_names_who_what_since_when_and_the_flag() -> None:
    health = Health.detached("trainer/1")
    with pytest.raises(DeadlineExpired) as caught:
        wait_for_ever(health, "ring/1 to hold 32 samples", 0.2, "--replay-sample-timeout-seconds")
    assert str(caught.value) == "trainer/1 waited 0 s for ring/1 to hold 32 samples; --replay-sample-timeout-seconds sets this limit"
    assert 0.2 <= caught.value.since_s < 1


def test_the_table_shows_a_wait_while_it_lasts_and_the_oldest_of_several(paths: RunPaths) -> None:
    health, watcher = open_health(paths, "ingest/0"), HealthTable.attach(paths.health)
    row = watcher.row_of("ingest/0")
    with health.waiting("a work request", 0):
        with health.waiting("room in ring/0", 5, "--replay-capacity"):
            assert watcher.read(row).waits_for == "a work request"
        time.sleep(0.05)
        assert watcher.read(row).waits_s >= 0.05
    assert (watcher.read(row).waits_for, watcher.read(row).waits_s) == ("", 0)
    with health.waiting("room in ring/0", 5, "--replay-capacity"):
        assert (watcher.read(row).waits_for, watcher.read(row).flag) == ("room in ring/0", "--replay-capacity")


def test_a_wait_warns_at_30_seconds_and_doubling(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    health, now = Health.detached(), [1000.0]
    monkeypatch.setattr(health.table, "clock", lambda: now[0])
    with health.waiting("inference/0 to be ready", 900, "--inference-start-timeout-s") as wait:
        for _ in range(130):
            now[0] += 1
            wait.check()
    assert [record.args[0] for record in caplog.records] == [30, 60, 120]
    assert "inference/0 to be ready (--inference-start-timeout-s)" in caplog.text


def test_a_wait_ends_closed_when_the_run_ends_and_peer_lost_when_it_failed(paths: RunPaths) -> None:
    health = open_health(paths, "trainer/0")
    health.board.set("stop", 1)
    with pytest.raises(Closed), health.waiting("samples", 0) as wait:
        wait.check()
    PeerLost("inference/0", 1, "inference-0.log", "no memory").save(paths.run_dir / FAILURE_FILE)
    health.board.set("failed", 1)
    with (
        pytest.raises(PeerLost, match=r"inference/0 \(exit code 1\), log file inference-0\.log: no memory"),
        health.waiting("samples", 0) as wait,
    ):
        wait.check()
    assert health.should_stop


def test_a_stop_request_closes_waits_of_coroutines_and_threads() -> None:
    health = Health.detached()
    ended: list[str] = []

    def wait_in_thread() -> None:
        try:
            with health.waiting("a", 0) as wait:
                while True:
                    wait.check()
                    time.sleep(0.01)
        except Closed:
            ended.append("thread")

    async def wait_in_loop() -> None:
        with health.waiting("b", 0) as wait:
            while True:
                wait.check()
                await asyncio.sleep(0.01)

    async def both() -> list[BaseException | None]:
        asyncio.get_running_loop().call_later(0.1, health.request_stop)
        return await asyncio.gather(wait_in_loop(), wait_in_loop(), return_exceptions=True)

    thread = threading.Thread(target=wait_in_thread)
    thread.start()
    assert [type(error) for error in asyncio.run(both())] == [Closed, Closed]
    thread.join(5)
    assert ended == ["thread"]
    assert health.table.snapshot()[0].waits_for == ""


def test_deadlines_stand_still_while_a_debugger_holds_the_terminal(paths: RunPaths) -> None:
    health = open_health(paths, "trainer/0")
    with health.waiting("samples", 0.3) as wait:
        HealthTable.attach(paths.health).hold(os.getpid())
        time.sleep(0.5)
        wait.check()
        HealthTable.attach(paths.health).let_go()
        assert wait.remaining_s > 0.2
        time.sleep(0.35)
        with pytest.raises(DeadlineExpired):
            wait.check()


def test_an_expired_wait_makes_the_awaited_process_write_its_stacks_and_usr1_does_not_end_it(paths: RunPaths) -> None:
    environment = os.environ | {"FAKE_MODE": "run", "PYTHONPATH": str(ROOT), "ACCERL_TERMINAL_FD": "2"}
    code = "from tests.fake_role import main, run_process; run_process('ingest', main)"
    peer = subprocess.Popen([sys.executable, "-c", code, "--run-dir", str(paths.run_dir)], env=environment, cwd=ROOT)
    health = open_health(paths, "trainer/0")
    row = health.table.row_of("ingest/0")
    while health.table.read(row).state != "running":
        assert peer.poll() is None
        time.sleep(0.02)
    with pytest.raises(DeadlineExpired):
        wait_for_ever(health, "a reply of ingest/0", 0.1)
    deadline = time.monotonic() + 5
    while "fake_role.py" not in paths.log("ingest", 0).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "heartbeat" in paths.log("ingest", 0).read_text() or "process.py" in paths.log("ingest", 0).read_text()
    assert peer.poll() is None
    peer.send_signal(signal.SIGTERM)
    assert peer.wait(5) == 0
    assert health.table.read(row).state == "ended"
    assert "ingest/0 INFO  ends: ingest/0 was asked to stop" in paths.log("ingest", 0).read_text()


def test_a_rank_leaves_without_the_interpreters_own_end(tmp_path: Path) -> None:
    mark = tmp_path / "interpreter-ended"
    code = f"""
import atexit, pathlib, sys
from accerl_mp.transport.process import exit_now
atexit.register(pathlib.Path({str(mark)!r}).touch)
print("said")
exit_now(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (3, "said\n")
    assert not mark.exists()


def test_a_reader_never_sees_half_a_wait(paths: RunPaths) -> None:
    health, watcher = open_health(paths, "stats/0"), HealthTable.attach(paths.health)
    row, stop, torn = watcher.row_of("stats/0"), threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            what = watcher.read(row).waits_for
            if what and set(what) not in ({"a"}, {"b"}):
                torn.append(what)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(3000):
        with health.waiting("ab"[number % 2] * 200, 0):
            pass
    stop.set()
    thread.join()
    assert torn == []


def test_a_level_can_be_set_for_one_role() -> None:
    assert log.level_of("rollout", "rollout=debug,warning") == logging.DEBUG
    assert log.level_of("stats", "rollout=debug,warning") == logging.WARNING
    assert log.level_of("stats", "rollout=debug") == logging.INFO
    with pytest.raises(ValueError, match="loud"):
        log.level_of("stats", "loud")


def test_a_log_line_has_time_process_and_level_and_the_terminal_gets_warnings_only(paths: RunPaths, tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from accerl_mp import log; from accerl_mp.topology import RunPaths\n"
        "log.setup(RunPaths(Path(sys.argv[1])), 'rollout', 3, 'info'); own = logging.getLogger('accerl_mp.x')\n"
        "own.info('quiet'); own.warning('heard'); logging.getLogger('vllm').warning('foreign'); log.terminal_line('round 1')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(paths.run_dir)], cwd=ROOT, capture_output=True, text=True, check=True)
    shown = [line.split(" ", 1)[-1] for line in done.stderr.splitlines()]
    assert shown == ["rollout/3 WARNING heard", "1"]
    written = [line[13:] for line in paths.log("rollout", 3).read_text().splitlines()]
    assert written == ["rollout/3 INFO  quiet", "rollout/3 WARNING heard", "rollout/3 WARNING foreign", "rollout/3 INFO  round 1"]


def test_a_timer_sums_phases_and_starts_again() -> None:
    timer = Timer()
    for seconds in (0.01, 0.03):
        with timer.phase("wait"):
            time.sleep(seconds)
    total, count, longest = timer.take()["wait"]
    assert count == 2
    assert 0.04 <= total < 0.5
    assert 0.03 <= longest < total
    assert timer.take() == {}
