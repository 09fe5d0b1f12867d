"""The supervisor with small real processes: restarts, giving up, ends. Nothing may be left, whatever ends the run."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from accerl_mp.config import Config
from accerl_mp.launcher import children, summary
from accerl_mp.launcher.children import Child
from accerl_mp.launcher.claim import LAUNCH_PID
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.roles import Role
from accerl_mp.launcher.supervisor import BY_HAND
from accerl_mp.launcher.sweep import leftovers, sweep
from accerl_mp.recovery import folder_name
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.saving import was_asked_to_end
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import EXIT_GAME_HUNG, PeerLost
from accerl_mp.transport.health import FAILURE_FILE, HealthTable

ROOT = Path(__file__).parent.parent


class Run:
    """A run of fake ranks and roles under a real supervisor."""

    def __init__(self, run_dir: Path, modes: str, *, world_size: int = 1, step_before: int = 0, **flags: float) -> None:
        self.paths = RunPaths(run_dir)
        run_dir.mkdir(parents=True)
        Config.from_flat({"fsdp_world_size": world_size, "placement": "cpu"} | flags).save(self.paths.args)
        Reached(step_before=step_before).save(self.paths.reached)
        self.ranks = [self._start_rank(rank, modes) for rank in range(world_size)]

    def _start_rank(self, rank: int, modes: str) -> subprocess.Popen:
        environment = os.environ | {"RANK": str(rank), "FAKE_MODES": modes, "FAKE_RUN": str(self.paths.run_dir), "SPT_NOENV": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fake_rank", "--run-dir", str(self.paths.run_dir)]
        return subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def touch(self, name: str) -> None:
        (self.paths.run_dir / name).touch()

    def codes(self, timeout_s: float = 20) -> list[int]:
        return [rank.wait(timeout_s) for rank in self.ranks]

    def terminal(self) -> str:
        """What a person would have seen."""
        return self.ranks[0].stderr.read()

    def terminal_so_far(self) -> str:
        return "\n".join(self.paths.log("supervisor", 0).read_text().splitlines())

    def table(self) -> HealthTable:
        self.wait_until(self.paths.health.exists)
        return HealthTable.attach(self.paths.health)

    def wait_running(self, *names: str, num_restarts: int = 0) -> dict[str, int]:
        """Pids by name, once all of them run (again)."""
        table = self.table()

        def running() -> bool:
            rows = {row.name: row for row in table.snapshot()}
            return all(rows[name].state == "running" and rows[name].num_restarts >= num_restarts for name in names)

        self.wait_until(running)
        return {row.name: row.pid for row in table.snapshot()}

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Every living process that this run has started, ranks included: they inherit FAKE_RUN."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("FAKE_RUN") == str(self.paths.run_dir)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_left(self, timeout_s: float = 10) -> None:
        self.wait_until(lambda: not self.processes() and not leftovers(self.paths), timeout_s)

    def log(self) -> str:
        path = self.paths.log("supervisor", 0)
        return path.read_text() if path.exists() else "(no supervisor log)"

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for rank in self.ranks:
            rank.wait(10)
            rank.stderr.close()
        sweep(self.paths)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start_run(modes: str, **options: Any) -> Run:
        runs.append(Run(tmp_path / f"run {len(runs)}", modes, **options))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def test_a_finished_run_ends_its_roles_in_order_and_exits_zero(start: Callable[..., Run]) -> None:
    run = start("rollout:run,inference:grandchild,ingest:run,stats:run")
    run.wait_running("rollout/0", "inference/0", "ingest/0", "stats/0", "trainer/0")
    run.touch("finish")
    assert run.codes() == [0]
    run.assert_nothing_left()
    ends = [line.split()[1] for line in (run.paths.run_dir / "order.txt").read_text().splitlines() if line.startswith("end")]
    assert ends == ["rollout/0", "inference/0", "ingest/0", "stats/0"]


def test_a_role_that_dies_is_started_again_and_its_orphans_are_killed(start: Callable[..., Run]) -> None:
    run = start("rollout:run,inference:grandchild")
    pids = run.wait_running("rollout/0", "inference/0")
    grandchild = psutil.Process(int((run.paths.run_dir / "grandchild.pid").read_text()))
    os.kill(pids["inference/0"], signal.SIGKILL)
    again = run.wait_running("inference/0", num_restarts=1)
    assert again["inference/0"] != pids["inference/0"]
    assert again["rollout/0"] == pids["rollout/0"]
    run.wait_until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    run.touch("finish")
    assert run.codes() == [0]
    assert "lost inference/0 (exit code -9)" in run.terminal()
    run.assert_nothing_left()


def test_a_role_that_dies_at_once_three_times_ends_the_run_with_its_last_lines(start: Callable[..., Run]) -> None:
    run = start("rollout:run,inference:die", max_restarts=50)
    assert run.codes() == [1]
    terminal = run.terminal()
    assert "lost inference/0 (exit code 1)" in terminal
    assert "it died at once 3 times in a row: ValueError: no such weights" in terminal
    assert 'raise ValueError("no such weights")' in terminal, "the last lines of its log"
    lost = PeerLost.load(run.paths.run_dir / FAILURE_FILE)
    assert (lost.role, lost.exit_code) == ("inference/0", 1)
    assert "ends: lost inference/0" in run.paths.log("trainer", 0).read_text(), "the rank learns the first failure, not a timeout"
    run.assert_nothing_left()


def test_used_up_restarts_end_the_run(start: Callable[..., Run]) -> None:
    run = start("ingest:run", max_restarts=1)
    for num_restarts in range(2):
        os.kill(run.wait_running("ingest/0", num_restarts=num_restarts)["ingest/0"], signal.SIGKILL)
    assert run.codes() == [1]
    assert "--max-restarts 1 is used up: it was killed by SIGKILL" in run.terminal()
    run.assert_nothing_left()


def test_processes_that_end_because_of_a_hung_game_use_up_no_restarts(start: Callable[..., Run]) -> None:
    run = start("rollout:hung-games", max_restarts=1)
    run.wait_until(lambda: run.log().count("the game's fault") >= 4)
    run.touch("finish")
    assert run.codes() == [0]
    run.assert_nothing_left()


def test_a_game_whose_interpreter_crashes_uses_up_no_restarts_and_ingest_can_see_whose_group_it_was(start: Callable[..., Run]) -> None:
    run = start("rollout:crashes-in-a-game", max_restarts=1)
    run.wait_until(lambda: run.log().count("the game's fault") >= 4)
    table = HealthTable.attach(run.paths.health)
    run.wait_until(lambda: table.word(table.row_of("rollout/0"), "died_playing") == 8)
    assert table.word(table.row_of("rollout/0"), "was_killed") == 0
    table.close()
    assert "it was killed by SIGSEGV" in run.terminal_so_far()
    run.touch("finish")
    assert run.codes() == [0]
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("mode", "number", "died_playing"), [("plays", signal.SIGKILL, 8), ("plays", signal.SIGTERM, 8), ("run", signal.SIGKILL, 0)]
)
def test_a_kill_is_told_from_a_process_s_own_end_and_uses_up_a_restart(
    start: Callable[..., Run], mode: str, number: signal.Signals, died_playing: int
) -> None:
    run = start(f"rollout:{mode}")
    os.kill(run.wait_running("rollout/0")["rollout/0"], number)
    run.wait_running("rollout/0", num_restarts=1)
    table = HealthTable.attach(run.paths.health)
    row = table.row_of("rollout/0")
    assert (table.word(row, "died_playing"), table.word(row, "was_killed")) == (died_playing, 1)
    table.close()
    run.touch("finish")
    assert run.codes() == [0]


@pytest.mark.parametrize(
    ("exit_code", "verdict", "oom_kills", "expected"),
    [
        *((-signal.SIGKILL, "", 3, True), (-signal.SIGTERM, "", 3, True)),
        *((-signal.SIGKILL, "", 4, False), (-signal.SIGKILL, "it had no heartbeat", 3, False)),
        *((-signal.SIGSEGV, "", 3, False), (-signal.SIGABRT, "", 3, False), (EXIT_GAME_HUNG, "", 3, False)),
    ],
)
def test_whose_doing_the_end_of_a_process_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_code: int, verdict: str, oom_kills: int, expected: bool
) -> None:
    """Of somebody else, where the kernel has killed nobody meanwhile for want of memory."""
    child = Child(Role("rollout", 1, ["true"], lambda _: dict(os.environ), stop_timeout_s=1, start_timeout_s=1), 0)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(children, "num_oom_kills", lambda: 3)
    child.start(RunPaths(tmp_path), terminal_fd=1, parent_variable="PARENT", now=0.0)
    os.waitpid(child.pid, 0)
    child.verdict = verdict
    monkeypatch.setattr(children, "num_oom_kills", lambda: oom_kills)
    assert child.was_killed(exit_code, was_signalled=False) == expected
    assert not child.was_killed(0, was_signalled=False), "a game's interpreter may call exit"
    assert child.was_killed(0, was_signalled=True) == (oom_kills == 3 and not verdict)


def test_the_kernels_count_of_processes_that_it_killed_for_their_memory_is_read() -> None:
    lines = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert children.num_oom_kills() == int(lines.get("oom_kill", 0))


def test_a_stopped_process_is_ended_and_started_again(start: Callable[..., Run]) -> None:
    run = start("rollout:run,ingest:run", hang_timeout_s=3.0)
    pids = run.wait_running("rollout/0", "ingest/0")
    os.kill(pids["ingest/0"], signal.SIGSTOP)
    again = run.wait_running("ingest/0", num_restarts=1)
    assert (again["ingest/0"] != pids["ingest/0"], again["rollout/0"]) == (True, pids["rollout/0"])
    run.touch("finish")
    assert run.codes() == [0]
    assert "ingest/0 has had no heartbeat for 3 s, it is stopped (SIGSTOP) (--hang-timeout-s)" in run.terminal()
    run.assert_nothing_left()


def test_a_process_whose_loop_stands_still_leaves_its_stacks_and_is_started_again_within_its_limit(start: Callable[..., Run]) -> None:
    run = start("rollout:run,stats:stuck", hang_timeout_s=2.0, max_restarts=1)
    assert run.codes(40) == [1]
    terminal = run.terminal()
    assert "lost stats/0 (exit code -9)" in terminal
    assert "starts again in" in terminal
    assert "--max-restarts 1 is used up: it has not moved for 2 s (--hang-timeout-s)" in terminal
    assert "_stand_still" in run.paths.log("stats", 0).read_text()
    run.assert_nothing_left()


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_rank_that_stands_still_is_named_with_its_stacks_and_ends_the_run(start: Callable[..., Run], how: str) -> None:
    run = start("rollout:run", world_size=2, hang_timeout_s=3.0, step_timeout_s=3.0)
    pids = run.wait_running("rollout/0", "trainer/0", "trainer/1")
    if how == "stopped":
        os.kill(pids["trainer/1"], signal.SIGSTOP)
    else:
        run.touch("stick-1")
    assert run.codes(40) == [1, -9]
    lost = PeerLost.load(run.paths.run_dir / FAILURE_FILE)
    assert lost.role == "trainer/1"
    assert ("no heartbeat" if how == "stopped" else "--step-timeout-s") in lost.detail
    if how == "stuck":
        assert "fake_rank.py" in run.paths.log("trainer", 1).read_text(), "its stacks"
    run.assert_nothing_left()


def test_a_request_for_all_stacks_does_not_end_the_supervisor(start: Callable[..., Run]) -> None:
    run = start("rollout:run")
    run.wait_running("rollout/0")
    table = HealthTable.attach(run.paths.health)
    assert "supervisor/0" in table.names
    table.dump_stacks(table.names)
    table.close()
    run.wait_until(lambda: "Current thread" in run.paths.log("supervisor", 0).read_text())
    run.touch("finish")
    assert run.codes() == [0]


def test_a_role_that_never_gets_ready_leaves_its_stacks_and_is_ended(start: Callable[..., Run]) -> None:
    run = start("inference:never-ready", max_restarts=0)
    assert run.codes() == [1]
    assert "inference/0 is not ready after 3 s" in run.terminal()
    assert "Current thread" in run.paths.log("inference", 0).read_text()
    run.assert_nothing_left()


def test_the_time_that_a_debugger_has_the_terminal_is_none_of_a_start(start: Callable[..., Run]) -> None:
    """Else a role in whose start somebody has stopped would be ended as soon as they let it go on."""
    run = start("inference:told-when-ready", max_restarts=0)
    table = run.table()
    run.wait_until(lambda: table.read(table.row_of("inference/0")).state == "starting")
    table.hold(os.getpid())
    time.sleep(4)  # its limit is 3 s
    table.let_go()
    time.sleep(1)
    run.touch("ready")
    run.wait_running("inference/0")
    table.close()
    run.touch("finish")
    assert run.codes() == [0]
    assert "not ready" not in run.terminal()


def test_a_role_that_hangs_before_it_has_a_row_is_ended_and_started_again(start: Callable[..., Run]) -> None:
    """As in an import from a disk that does not answer. Nothing else would end it, and what its forerunner played would wait for it."""
    run = start("rollout:never-enters,ingest:run", max_restarts=1)
    assert run.codes(40) == [1]
    terminal = run.terminal()
    assert terminal.count("rollout/0 is not ready after 3 s: ends it") == 2
    assert "--max-restarts 1 is used up: it was not ready after 3 s" in terminal
    run.assert_nothing_left()


@pytest.mark.parametrize("victim", ["rank 0", "supervisor", "everything but the grandchild's owner"])
def test_after_kill_9_nothing_is_left(start: Callable[..., Run], victim: str) -> None:
    run = start("rollout:run,inference:grandchild,ingest:deaf")
    pids = run.wait_running("rollout/0", "inference/0", "ingest/0", "trainer/0")
    if victim == "supervisor":
        # Then the kernel ends the roles; their orphans have no reaper, so vLLM's processes watch their parent themselves.
        os.kill(int((run.paths.run_dir / "grandchild.pid").read_text()), signal.SIGKILL)
        os.kill(pids["supervisor/0"], signal.SIGKILL)
        assert run.codes() == [1]
        lost = PeerLost.load(run.paths.run_dir / FAILURE_FILE)
        assert (lost.role, lost.exit_code) == ("supervisor/0", -9)
    else:
        for name in ["trainer/0"] if victim == "rank 0" else ["trainer/0", "rollout/0", "ingest/0"]:
            os.kill(pids[name], signal.SIGKILL)
        run.codes()
    run.assert_nothing_left()


def test_a_stop_file_ends_the_run_with_exit_code_zero_even_if_a_role_is_deaf(start: Callable[..., Run]) -> None:
    run = start("rollout:deaf,stats:run", step_before=3)
    run.wait_running("rollout/0", "stats/0", "trainer/0")
    run.touch("stop")
    assert run.codes() == [0]
    assert "rollout/0 did not stop within 2 s: killed" in run.terminal()
    assert Reached.load(run.paths.reached) == Reached(asked_to_end=1, step_before=3)
    run.assert_nothing_left()


def test_a_stop_while_ranks_and_roles_still_start_does_not_wait_for_them(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports, vLLM: whatever holds their main threads, there is nothing to save yet."""
    monkeypatch.setenv("FAKE_IMPORTS", "yes")
    run = start("stats:run,rollout:hangs-in-its-start", world_size=2)
    table = run.table()
    run.wait_until(lambda: all(row.state in ("starting", "running") for row in table.snapshot()))
    table.close()
    run.touch("stop")
    assert run.codes(15) == [0, 0], run.log()
    assert run.paths.ended.exists()
    assert "stopped; all processes ended within" in run.terminal()
    for role, index in (("trainer", 0), ("trainer", 1), ("rollout", 0)):
        assert "was asked to stop while it started: leaves" in run.paths.log(role, index).read_text()
    run.assert_nothing_left()


def test_a_rank_that_comes_after_the_stop_is_waited_for_and_leaves_at_once(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it waits for a table that has been taken away, while the supervisor says that all processes have ended."""
    monkeypatch.setenv("FAKE_LATE_S", "3")
    run = start("stats:run", world_size=2)
    run.wait_running("stats/0", "trainer/0")
    run.touch("stop")
    assert run.codes(15) == [0, 0], run.log()
    assert "trainer/1 was asked to stop" in run.paths.log("trainer", 1).read_text()
    terminal = run.terminal()
    assert terminal.index("waits for trainer/1 to leave") < terminal.index("stopped; all processes ended within")
    assert run.paths.ended.exists()
    run.assert_nothing_left()


def test_an_end_that_does_not_wait_for_the_ranks_does_not_say_that_all_have_ended(start: Callable[..., Run]) -> None:
    run = start("rollout:run", world_size=2, max_restarts=0)
    pids = run.wait_running("rollout/0", "trainer/0", "trainer/1")
    os.kill(pids["trainer/1"], signal.SIGSTOP)
    os.kill(pids["rollout/0"], signal.SIGKILL)
    run.wait_until(lambda: "failed; all processes but" in run.log())
    assert "trainer/1 ended within" in run.log()
    os.kill(pids["trainer/1"], signal.SIGCONT)
    assert run.codes() == [1, 1]
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("end", "trained", "said"),
    [
        ("stop", "4 2 2", "Steps 3 to 4 were not saved"),
        ("finish", "4 0 2", "No state was saved"),
        pytest.param("stop", "4 0 2", "No state was saved", marks=pytest.mark.slow),
        pytest.param("stop", "4 4 2", "", marks=pytest.mark.slow),
        pytest.param("finish", "4 4 2", "", marks=pytest.mark.slow),
    ],
)
def test_an_end_whose_last_state_could_not_be_saved_is_no_success_and_says_so(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, trained: str, said: str
) -> None:
    """A disk that is full to the last byte, most of all: status.json has not been written either."""
    monkeypatch.setenv("FAKE_TRAINED", trained)
    run = start("stats:run")
    run.wait_running("stats/0", "trainer/0")
    if saved := int(trained.split()[1]):
        (run.paths.resume / folder_name(saved, 1)).mkdir(parents=True)
    run.touch(end)
    code = run.codes()[0]
    assert (code == 0, run.paths.ended.exists()) == (not said, not said), run.log()
    monkeypatch.setattr("sys.argv", ["summary", "--run-dir", str(run.paths.run_dir), "--exit-code", str(code)])
    summary.main()
    shown = capsys.readouterr().out
    assert ": 4 optimizer steps, 2 weight pushes" in shown
    assert said in shown.splitlines()[-1]
    assert ("logs/trainer-0.log" in shown.splitlines()[-1]) == bool(said)
    run.assert_nothing_left()


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_signal_to_a_rank_itself_is_a_stop_of_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_starting: bool
) -> None:
    """Not an end of training: what the run has learned is saved, and the summary says that it was stopped."""
    if is_starting:
        monkeypatch.setenv("FAKE_IMPORTS", "yes")
    run = start("rollout:run", world_size=2)
    table = run.table()
    wanted = {"starting"} if is_starting else {"running"}
    run.wait_until(lambda: {row.state for row in table.snapshot() if row.name.startswith("trainer/")} == wanted)
    board = Board.attach(run.paths.board)
    run.ranks[1].send_signal(signal.SIGTERM)
    assert run.codes() == [0, 0]
    assert was_asked_to_end(run.paths, board, is_leaving=True), "ranks would save nothing"
    assert "ends the run: trainer/1 got a signal to end" in run.terminal()
    monkeypatch.setattr("sys.argv", ["summary", "--run-dir", str(run.paths.run_dir), "--exit-code", "0"])
    summary.main()
    shown = capsys.readouterr().out
    assert "stopped on request" in shown
    assert "finished" not in shown
    run.assert_nothing_left()


def test_a_rank_that_dies_before_it_has_begun_is_no_stop_although_torchrun_sends_the_others_a_signal(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LATE_S", "600")
    run = start("stats:run", world_size=2)
    run.wait_running("stats/0", "trainer/0")
    run.ranks[1].kill()
    run.ranks[1].wait()
    run.ranks[0].send_signal(signal.SIGTERM)
    assert run.codes()[0] == 1
    assert PeerLost.load(run.paths.run_dir / FAILURE_FILE).role == "trainer/1"
    assert not run.paths.stop.exists()
    run.assert_nothing_left()


def test_a_failing_rank_is_the_first_failure_for_the_other_rank(start: Callable[..., Run]) -> None:
    run = start("rollout:run", world_size=2)
    run.wait_running("rollout/0", "trainer/0", "trainer/1")
    run.touch("break-1")
    assert run.codes() == [1, 1]
    assert "lost trainer/1" in run.terminal()
    assert "RuntimeError: loss is nan" in (run.paths.run_dir / FAILURE_FILE).read_text()
    assert "ends: lost trainer/1" in run.paths.log("trainer", 0).read_text()
    run.assert_nothing_left()


def test_a_killed_rank_is_named_although_the_other_one_fails_because_of_it(start: Callable[..., Run]) -> None:
    run = start("rollout:run", world_size=2)
    pids = run.wait_running("rollout/0", "trainer/0", "trainer/1")
    os.kill(pids["trainer/1"], signal.SIGKILL)
    run.touch("break-0")  # as a collective does
    assert run.codes() == [1, -9]
    assert PeerLost.load(run.paths.run_dir / FAILURE_FILE).role == "trainer/1"
    assert "trainer/0 ERROR" not in run.terminal()
    run.assert_nothing_left()


def test_the_death_of_launch_sh_ends_the_run(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv(LAUNCH_PID, str(launcher.pid))
    run = start("rollout:run")
    run.wait_running("rollout/0", "trainer/0")
    launcher.kill()
    launcher.wait()
    assert run.codes() == [0]
    assert "launch.sh is gone" in run.terminal()
    assert run.paths.stop.exists(), "ranks would take it for a failure and save nothing"
    run.assert_nothing_left()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_signal_to_the_supervisor_alone_is_a_stop_too(start: Callable[..., Run], has_room: bool) -> None:
    """Also where DIR/stop cannot be written: a disk without an inode."""
    run = start("rollout:run")
    pids = run.wait_running("supervisor/0", "rollout/0", "trainer/0")
    board = Board.attach(run.paths.board)
    if not has_room:
        run.paths.stop.symlink_to("/nowhere/at/all")
    os.kill(pids["supervisor/0"], signal.SIGTERM)
    assert run.codes() == [0]
    assert "the supervisor got SIGTERM" in run.terminal()
    assert run.paths.stop.exists() == has_room
    assert was_asked_to_end(run.paths, board), "ranks would take it for a failure and save nothing"
    run.assert_nothing_left()


def test_what_a_living_torchrun_has_is_left_to_it_by_its_ranks(tmp_path: Path) -> None:
    """Its temporary folder: a later temporary file in it would be an error, and an exit code, of its own."""
    paths = RunPaths(tmp_path)
    paths.torchrun.mkdir()
    sweep(paths)  # as the supervisor does when it begins, and when it ends
    assert paths.torchrun.exists()
    summary.wait_until_over(paths)  # as the launcher and launch.sh do after torchrun has ended
    assert not paths.torchrun.exists()


def test_what_a_killed_run_left_is_swept_by_the_next_start(start: Callable[..., Run]) -> None:
    run = start("rollout:run")
    run.wait_running("rollout/0", "trainer/0")
    for process in run.processes():
        process.kill()
    run.codes()
    assert leftovers(run.paths), "kill -9 of everything leaves the table and the board"
    run.ranks = [run._start_rank(0, "rollout:run")]
    run.wait_until(lambda: "removed what an earlier run of this folder left" in run.log())
    run.wait_running("rollout/0", "trainer/0")
    run.touch("finish")
    assert run.codes() == [0]
    run.assert_nothing_left()


def test_shared_memory_of_a_killed_process_is_unlinked_by_its_tracker_or_else_by_the_next_start(start: Callable[..., Run]) -> None:
    run = start("inference:shares")
    pids = run.wait_running("inference/0", "trainer/0")
    first = Path("/dev/shm") / (run.paths.run_dir / "shared").read_text()
    assert first.exists()
    os.kill(pids["inference/0"], signal.SIGKILL)
    run.wait_until(lambda: not first.exists())
    run.wait_running("inference/0", num_restarts=1)
    second = Path("/dev/shm") / (run.paths.run_dir / "shared").read_text()
    run.wait_until(lambda: second in leftovers(run.paths))
    for process in sorted(run.processes(), key=lambda process: "resource_tracker" not in " ".join(process.cmdline())):
        process.kill()
    run.codes()
    assert second.exists()
    run.ranks = [run._start_rank(0, "inference:run")]
    run.wait_until(lambda: "removed what an earlier run of this folder left" in run.log())
    assert not second.exists()
    run.wait_running("inference/0", "trainer/0")
    run.touch("finish")
    assert run.codes() == [0]
    run.assert_nothing_left()


@pytest.mark.parametrize("how", ["everything is killed", "all of inference is killed, then a stop"])
def test_shared_memory_of_an_inference_that_dies_whole_while_it_starts_does_not_stay(start: Callable[..., Run], how: str) -> None:
    """vLLM makes its 168 MB long before it is ready; killed together with it, its resource tracker cannot unlink them."""
    run = start("inference:shares-while-it-starts")
    name = run.paths.run_dir / "shared"
    run.wait_until(lambda: name.exists() and name.read_text() != "")
    shared = Path("/dev/shm") / name.read_text()
    run.wait_until(lambda: shared in leftovers(run.paths))  # noted
    is_whole = how == "everything is killed"
    victims = run.processes() if is_whole else _below_inference(run)
    for process in sorted(victims, key=lambda process: "resource_tracker" not in " ".join(process.cmdline())):
        process.kill()
    if is_whole:
        run.codes()
        assert shared.exists()
        sweep(run.paths)  # as the next start does
    else:
        run.touch("stop")
        assert run.codes() == [0]
    assert not shared.exists()
    run.assert_nothing_left()


def _below_inference(run: Run) -> list[psutil.Process]:
    table = run.table()
    front = psutil.Process(table.read(table.row_of("inference/0")).pid)
    return [front, *front.children(recursive=True)]


def test_two_runs_side_by_side_do_not_touch_each_other(start: Callable[..., Run]) -> None:
    first, second = start("rollout:run"), start("rollout:run")
    first.wait_running("rollout/0")
    pid = second.wait_running("rollout/0")["rollout/0"]
    first.touch("finish")
    assert first.codes() == [0]
    assert psutil.pid_exists(pid)
    assert leftovers(second.paths)
    second.touch("finish")
    assert second.codes() == [0]
    second.assert_nothing_left()


def test_a_process_that_a_person_starts_is_left_to_them_and_leaves_with_the_run(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BY_HAND, "rollout/0")
    run = start("rollout:run,stats:run")
    run.wait_running("stats/0", "trainer/0")
    assert run.table().read(run.table().row_of("rollout/0")).pid == 0
    environment = os.environ | {"FAKE_MODE": "run", "FAKE_RUN": str(run.paths.run_dir), "PYTHONPATH": str(ROOT)}
    code = "from tests.fake_role import main, run_process; run_process('rollout', main)"
    mine = subprocess.Popen([sys.executable, "-c", code, "--run-dir", str(run.paths.run_dir)], env=environment, cwd=ROOT)
    assert run.wait_running("rollout/0")["rollout/0"] == mine.pid
    run.touch("finish")
    assert run.codes() == [0]
    assert mine.wait(20) == 0
    assert "rollout/0 is yours to start: python -m accerl_mp.rollout --run-dir " in run.terminal()
    run.assert_nothing_left()
