"""A run that is asked to end before it has begun: nobody is waited for who has nothing to save, and the end is no failure."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from accerl_mp.config import Config
from accerl_mp.launcher import leaving, summary, torchrun
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.summary import success_lines, unsaved_lines
from accerl_mp.launcher.torchrun import Launcher
from accerl_mp.recovery import Start, announce
from accerl_mp.topology import RunPaths
from accerl_mp.trainer import saving
from accerl_mp.transport import process as processes
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import Closed, PeerLost
from accerl_mp.transport.health import FAILURE_FILE, Health, HealthTable
from accerl_mp.transport.process import Process
from tests.saved_states import save_state

ROOT = Path(__file__).parent.parent
NOWHERE = "/nowhere/at/all"
"""A link that leads there cannot be touched, root or not: as DIR/stop on a disk without an inode."""


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path / "run")
    paths.run_dir.mkdir()
    Config().save(paths.args)
    yield paths
    for path in (paths.health, paths.board):
        path.unlink(missing_ok=True)


@pytest.fixture
def launcher(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take pytest's own
    return Launcher(paths, [])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def with_ranks() -> Iterator[int]:
    """Pid of what stands for a torchrun that has started its ranks."""
    with subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]) as process:
        watched = psutil.Process(process.pid)
        while not (children := watched.children()):
            time.sleep(0.01)
        yield process.pid
        for child in children:
            child.kill()


def end_at_once(*_: object, code: int) -> int:
    """Stands for torchrun; its pid."""
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return pid


def test_a_rank_whose_table_never_comes_leaves_once_a_stop_was_asked_for(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_NO_TABLE_S", 0.1)
    paths.stop.touch()
    with pytest.raises(Closed, match="trainer/1 was asked to stop before it had begun"):
        processes._attach(paths, "trainer/1")


def test_rank_0_starts_no_supervisor_once_a_stop_was_asked_for(paths: RunPaths) -> None:
    paths.stop.touch()
    command = [sys.executable, "-m", "accerl_mp.launcher", "--run-dir", str(paths.run_dir)]
    done = subprocess.run(command, env=os.environ | {"RANK": "0"}, cwd=ROOT, check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not paths.log("supervisor", 0).exists()


@pytest.mark.parametrize(("state", "code", "ends"), [("starting", 0, "ended"), ("running", 1, "failed")])
def test_a_start_that_breaks_because_a_peer_has_left_for_a_stop_is_no_failure(paths: RunPaths, state: str, code: int, ends: str) -> None:
    """A collective breaks when one of two ranks leaves first. Who trains already has something to lose: that stays an error."""
    health = Health.detached("trainer/0")
    process = Process("trainer", 0, paths, Config(), health, health.board)

    def main(process: Process) -> None:
        process.health.set_state(state)
        process.health.request_stop()
        raise RuntimeError("gloo: connection closed by peer")

    health.enter()
    assert processes._run(process, main) == code
    assert health.table.read(0).state == ends


@pytest.mark.parametrize(("words", "is_asked"), [(("asked_to_end", "stop"), True), (("failed",), False), (("stop",), False)])
def test_a_rank_that_was_sent_a_signal_waits_for_the_supervisors_verdict(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_asked: bool
) -> None:
    """A supervisor on a starved machine takes its time; who gives up before it saves nothing."""
    monkeypatch.setattr(saving, "_STOP_SHOWS_S", 0.01)
    board = Board.detached()
    timer = threading.Timer(0.3, lambda: [board.set(word, 1) for word in words])
    timer.start()
    assert saving.was_asked_to_end(paths, board, is_leaving=True) == is_asked
    assert board.get(words[0]), "it came before the verdict"
    timer.join()


def test_torchrun_that_has_no_ranks_yet_is_not_waited_for(paths: RunPaths) -> None:
    """It imports torch, which takes half a minute on a busy machine; then it would start ranks, and a supervisor that starts the rest."""
    command = [sys.executable, "-m", "accerl_mp.launcher.torchrun", "--run-dir", str(paths.run_dir), "--nproc-per-node", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as started:
        watched = psutil.Process(started.pid)
        while not watched.children():
            assert started.poll() is None
            time.sleep(0.01)
        paths.stop.touch()
        seen: list[list[str]] = []
        while started.poll() is None:
            with contextlib.suppress(psutil.Error):
                seen += [child.cmdline() for child in watched.children(recursive=True)]
            time.sleep(0.01)
        assert started.returncode == 0
        assert not [words for words in seen if "accerl_mp.launcher" in words], "a rank"
        assert started.stderr.read() == ""
    assert not paths.log("supervisor", 0).exists()
    assert not paths.torchrun.exists()


def test_a_launcher_that_is_asked_to_end_first_starts_nothing(launcher: Launcher, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.stop.touch()
    monkeypatch.setattr(torchrun, "_start_torchrun", lambda *_: pytest.fail("it starts torchrun"))
    assert launcher.run() == 0


def never_pushed(_: RunPaths) -> None:
    return


def pushed(paths: RunPaths) -> None:
    announce(paths.resume, 0)


def trained(paths: RunPaths) -> None:
    Reached(step=1).save(paths.reached)


def ended_in_order(paths: RunPaths) -> None:
    pushed(paths)
    paths.ended.touch()


@pytest.mark.parametrize(("has_done", "is_well"), [(never_pushed, True), (ended_in_order, True), (pushed, False), (trained, False)])
def test_the_exit_code_of_a_torchrun_that_was_ended_says_whether_anything_is_lost(
    launcher: Launcher, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, has_done: Callable[[RunPaths], None], is_well: bool
) -> None:
    """A signal to all processes at once, as clusters send it, makes torchrun's own code an error."""

    def start(*_: object) -> int:
        has_done(paths)
        paths.stop.touch()
        return end_at_once(code=1)

    monkeypatch.setattr(torchrun, "_start_torchrun", start)
    assert (launcher.run() == 0) == is_well


def test_where_the_stop_cannot_be_written_the_supervisor_gets_a_signal(
    launcher: Launcher, paths: RunPaths, sleeper: subprocess.Popen, with_ranks: int
) -> None:
    paths.stop.symlink_to(NOWHERE)
    assert not launcher._pass_on(with_ranks), "it has not begun: once more"
    table = HealthTable.create(paths.health, ["supervisor/0", "trainer/0"])
    assert not launcher._pass_on(with_ranks)
    table.set_word(0, "pid", sleeper.pid)
    assert launcher._pass_on(with_ranks)
    assert sleeper.wait(20) == -signal.SIGTERM
    assert not launcher._pass_on(with_ranks), "it has ended"
    table.close()


def test_a_signal_to_the_launcher_alone_is_written_down_for_the_supervisor(
    launcher: Launcher, paths: RunPaths, sleeper: subprocess.Popen, with_ranks: int
) -> None:
    HealthTable.create(paths.health, ["supervisor/0", "trainer/0"]).close()
    assert launcher._pass_on(with_ranks)
    assert paths.stop.exists()
    assert sleeper.poll() is None


def test_a_run_that_has_begun_nothing_is_not_said_to_be_saved_and_offers_no_look_at_nothing(paths: RunPaths) -> None:
    (paths.run_dir / "command.txt").write_text("bash launch.sh --seed 3\n")
    paths.stop.touch()
    text = "\n".join(success_lines(paths, {}))
    assert "stopped on request before its first optimizer step: there was nothing to save" in text
    assert "accerl_mp.tools.report" not in text
    assert "tensorboard" not in text
    assert f"bash launch.sh --seed 3 --log-dir {paths.run_dir} --resume auto" in text
    Reached(step=1, saved_step=1).save(paths.reached)
    assert "accerl_mp.tools.report" in "\n".join(success_lines(paths, {}))


@pytest.mark.parametrize(
    ("older", "trained_again", "lost"),
    [
        *((0, 0, "Steps 1 to 3"), (0, 2, "Steps 1 to 3"), (0, 3, "")),
        *((1, 0, "Steps 2 to 3"), (1, 1, "Steps 2 to 3"), (1, 2, "Steps 3 to 3"), (1, 3, "")),
    ],
)
def test_a_stop_while_the_run_starts_again_says_which_steps_are_lost(
    launcher: Launcher,
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    older: int,
    trained_again: int,
    lost: str,
) -> None:
    """status.json is the dead start's, and its numbers must not be taken for those of the run. older: the step of its state; 0: none."""
    starts = iter([1, 2])
    (paths.run_dir / "command.txt").write_text("bash launch.sh --seed 3\n")

    def start(*_: object) -> int:
        if next(starts) == 1:
            announce(paths.resume, 2)
            if older:
                save_state(paths.resume, older, Config())
            Reached(step=3, saved_step=older).save(paths.reached)
            PeerLost("trainer/1", -9, "trainer-1.log", "it died").save(paths.run_dir / FAILURE_FILE)
            return end_at_once(code=1)
        board = Board.detached()
        board.set("optimizer_step", trained_again)
        if older or trained_again == 3:
            board.set("saved_step", trained_again)
            if trained_again > older:
                save_state(paths.resume, trained_again, Config())
        Reached.of(board, step_before=Reached.load(paths.reached).step_before).save(paths.reached)
        for file in (paths.stop, paths.ended):
            file.touch()
        return end_at_once(code=0)

    monkeypatch.setattr(torchrun, "_start_torchrun", start)
    code = launcher.run()
    assert (code != 0) == bool(lost)
    monkeypatch.setattr(summary, "read_status", lambda _: {"step": 2, "version": 1})
    monkeypatch.setattr("sys.argv", ["summary", "--run-dir", str(paths.run_dir), "--exit-code", str(code)])
    summary.main()
    shown = capsys.readouterr().out
    assert ("are lost" in shown) == bool(lost)
    why = "a trainer rank died" if older else "a trainer rank died before a state was saved"
    goes_on = f"; --resume auto goes on from step {max(older, trained_again)}\n" if older else "\n"
    assert not lost or f"{lost} are lost: {why}, and the run was stopped before it had trained them again{goes_on}" in shown
    assert f"{trained_again or older} optimizer steps" in shown
    assert "stopped on request" in shown


@pytest.mark.parametrize(("begun_at", "reached", "has_books", "is_said"), [(0, 3, False, True), (2, 3, False, True), (0, 3, True, False)])
def test_books_that_ingest_could_not_write_are_missed(paths: RunPaths, begun_at: int, reached: int, has_books: bool, is_said: bool) -> None:
    if begun_at:
        Start(str(save_state(paths.resume, begun_at, Config())), begun_at + 1).save(paths.resume)
    Reached(step=reached, saved_step=reached).save(paths.reached)
    if has_books:
        paths.books.write_text("{}")
    said = [line for line in success_lines(paths, {}) if line.startswith("  books ")]
    assert said == ["  books               missing: ingest/0 ended before it could write books.json"] * is_said
    Reached(step=begun_at, saved_step=begun_at).save(paths.reached)
    assert not [line for line in success_lines(paths, {}) if line.startswith("  books ")], "nothing was dealt: there is nothing to miss"


@pytest.mark.parametrize("who_knows", ["launcher", "supervisor"])
def test_a_stop_that_cannot_be_written_is_not_said_to_be_a_finish(
    launcher: Launcher, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], who_knows: str
) -> None:
    (paths.run_dir / "command.txt").write_text("bash launch.sh --seed 3\n")
    paths.stop.symlink_to(NOWHERE)

    def start(*_: object) -> int:
        Reached(step=4, saved_step=4, asked_to_end=int(who_knows == "supervisor")).save(paths.reached)
        if who_knows == "launcher":
            launcher._on_signal(signal.SIGINT, None)
        return end_at_once(code=0)

    monkeypatch.setattr(torchrun, "_start_torchrun", start)
    assert launcher.run() == 0
    monkeypatch.setattr("sys.argv", ["summary", "--run-dir", str(paths.run_dir), "--exit-code", "0"])
    summary.main()
    shown = capsys.readouterr().out
    assert "stopped on request: 4 optimizer steps" in shown
    assert "  to go on " in shown


def test_a_state_that_was_saved_after_the_supervisors_last_word_counts(paths: RunPaths) -> None:
    """It does not wait for ranks where the run has failed, and not for ever where they take long."""
    for saved, lost in ((8, []), (7, []), (6, ["Steps 7 to 7 were not saved"])):
        shutil.rmtree(paths.resume, ignore_errors=True)
        save_state(paths.resume, saved, Config())
        lines = unsaved_lines(paths, Reached(step=7, saved_step=5))
        assert [line.partition(":")[0] for line in lines if line] == lost


def test_a_start_from_another_runs_state_that_is_stopped_at_once_loses_nothing_and_begins_there_again(
    paths: RunPaths, tmp_path: Path
) -> None:
    """Its ranks may have loaded that state, which their own folder does not have."""
    state = save_state(tmp_path / "other/resume", 4, Config())
    Start(str(state), 5).save(paths.resume)
    (paths.run_dir / "command.txt").write_text(f"bash launch.sh --seed 3 --resume {tmp_path / 'other'} --log-dir {paths.run_dir}\n")
    paths.stop.touch()
    board = Board.detached()
    board.set("optimizer_step", 4)
    board.set("saved_step", 4)
    for reached in (Reached(), Reached.of(board)):
        assert reached.is_saved
        reached.save(paths.reached)
        [command] = [line for line in success_lines(paths, {}) if "launch.sh" in line]
        assert command.endswith(f"--seed 3 --log-dir {paths.run_dir} --resume {state}")
    own = save_state(paths.resume, 6, Config())
    with contextlib.suppress(FileNotFoundError):
        paths.reached.unlink()
    [command] = [line for line in success_lines(paths, {}) if "launch.sh" in line]
    assert command.endswith(f"--log-dir {paths.run_dir} --resume auto"), own


@pytest.mark.parametrize(("signalled_s", "is_awaited"), [(1.0, True), (11.0, False)])
def test_a_rank_that_has_not_come_is_waited_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled_s: float, is_awaited: bool
) -> None:
    """Whoever started the ranks may have other children, which look like one on its way."""
    monkeypatch.setattr(leaving, "_some_are_on_their_way", lambda *_: True)
    paths = RunPaths(tmp_path)
    table = HealthTable.create(paths.health, ["trainer/0", "trainer/1"])
    board = Board.create(paths.board)
    try:
        Health("trainer/0", table=table, board=board).enter()
        table.set_word(0, "signalled", int(table.clock() - signalled_s))
        end = leaving.end_by_ranks(table, paths, was_signalled=leaving.who_was_signalled(table), rank_0=os.getpid())
        assert (end is None) == is_awaited
        assert is_awaited or (end.reason, end.lost.role) == ("failed", "trainer/1")
    finally:
        for shared in (table, board):
            shared.close()
            shared.unlink()
