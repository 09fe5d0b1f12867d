"""Whole runs (all but vLLM real: see fake_run.py) that are killed or lose a rank, and go on: no episode skipped or trained twice."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp import recovery
from accerl_mp.launcher.sweep import leftovers
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.recording import load_step, recorded_shape
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE, HealthTable
from accerl_mp.transport.saved_ring import unpack_rank
from tests.small_disk import SmallDisk

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parent.parent
NUM_STEPS, STEP_SAMPLES, GROUP_SIZE = 12, 2 * 6, 4
FLAGS = f"""
--placement cpu --fsdp-world-size 2 --num-rollout-workers 2 --rollout-batch-size {GROUP_SIZE} --keep-zero-std-groups
--tw-max-episode-steps 3 --tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8 --max-policy-lag 0
--train-packing padded --batch-size 6 --grad-accum-steps 1 --sync-every-optimizer-steps 2 --max-steps {NUM_STEPS} --lr-warmup-steps 1
--resume-every-rounds 1 --record-samples
"""


class Launched:
    """`start` is what launch.sh does: prepare, then the launcher."""

    def __init__(self, folder: Path, games: Path, run_dir: Path | None = None) -> None:
        self.paths, self._games, self._output = RunPaths(run_dir or folder / "run"), games, folder / "output.txt"
        self.popen: subprocess.Popen | None = None

    def start(self, *flags: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = [*FLAGS.split(), "--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(self._games)]
        words += ["--log-dir", str(self.paths.run_dir), *flags]
        prepare = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(self._output.with_name("answer")), "--", *words]
        run = [sys.executable, "-m", "tests.fake_run", "start", "--run-dir", str(self.paths.run_dir)]
        with self._output.open("ab") as output:
            subprocess.run(prepare, env=environment, stdout=output, stderr=output, timeout=120, check=True)
            self.popen = subprocess.Popen(run, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not condition():
            assert self.popen.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def wait(self) -> int:
        return self.popen.wait(200)

    def kill_everything(self) -> None:
        """Every process of the run at once, as a power cut does it: none sees another one's end."""
        root = psutil.Process(self.popen.pid)
        pids = {root.pid, *(process.pid for process in root.children(recursive=True))}
        pids |= {row.pid for row in HealthTable.attach(self.paths.health).snapshot() if row.pid}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, number)
        self.popen.wait(20)
        while any(_is_alive(pid) for pid in pids):
            time.sleep(0.01)

    def end(self) -> None:
        """Whatever a failed test has left."""
        if self.popen is not None and self.popen.poll() is None:
            self.paths.stop.touch()
            self.popen.wait(60)

    def pid_of(self, name: str) -> int:
        table = HealthTable.attach(self.paths.health)
        return int(table.word(table.row_of(name), "pid"))

    @property
    def step(self) -> int:
        """Optimizer steps so far; 0 while the run is being started again."""
        try:
            return Board.attach(self.paths.board).get("optimizer_step")
        except FileNotFoundError:
            return 0

    @property
    def states(self) -> list[Path]:
        return recovery.states_in(self.paths.resume)

    @property
    def text(self) -> str:
        logs = sorted((self.paths.run_dir / "logs").glob("*.log"))
        return self._output.read_text() + "".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.paths.run_dir / "metrics.jsonl").read_text().splitlines()]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path: Path, games_dir: Path) -> Iterator[Launched]:  # noqa: F811
    launched = Launched(tmp_path, games_dir)
    yield launched
    launched.end()


def check_episodes(run: Launched) -> None:
    """What the final weights have learned from, step by step, and what is left in the rings: each episode once, none left out."""
    folder = run.paths.samples
    assert recorded_shape(folder) == (NUM_STEPS, 2)
    steps = [load_step(folder, step, rank) for step in range(NUM_STEPS) for rank in range(2)]
    trained = [sample.episode_id for step in steps for batch in step.micro_batches for sample in batch]
    assert len(trained) == len(set(trained)) == NUM_STEPS * STEP_SAMPLES, "an episode was trained twice"
    state, damaged = recovery.newest_whole(run.paths.resume)
    assert state is not None
    assert (state.step, damaged) == (NUM_STEPS, [])
    groups = [group for rank in range(2) for group in unpack_rank(state.rank_file(rank))[1]]
    left = [sample.episode_id for group in groups for sample in group.samples]
    assert not set(left) & set(trained)
    ledger = state.content["groups"]
    done = {*range(ledger["low_water"]), *ledger["done_above"]}
    episodes = {GROUP_SIZE * group + index for group in done for index in range(GROUP_SIZE)}
    assert episodes == set(trained) | set(left), "an episode was skipped"
    assert ledger["low_water"] * GROUP_SIZE > NUM_STEPS * STEP_SAMPLES - 10 * GROUP_SIZE, "none of the first ones is missing"


def test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode(run: Launched) -> None:
    run.start()
    run.wait_for(lambda: len(run.states) == 2)
    run.kill_everything()
    state, _ = recovery.newest_whole(run.paths.resume)
    assert state is not None
    assert 2 <= state.step < NUM_STEPS
    announced = recovery.announced_in(run.paths.resume)
    run.start("--resume", "auto")
    assert run.wait() == 0, run.text
    check_episodes(run)
    start = recovery.Start.load(run.paths.resume)
    assert Path(start.state).name == state.folder.name
    assert start.first_version == announced + 1 > state.version, "no version means two policies"
    assert f"goes on from {start.state}: optimizer step {state.step}" in run.paths.log("trainer", 0).read_text()
    assert [line["step"] for line in run.metrics if "Train/Loss" in line][-1] == NUM_STEPS


@pytest.mark.slow
def test_a_run_whose_newest_state_and_notes_are_damaged_goes_on_from_the_older_one(run: Launched) -> None:
    run.start()
    run.wait_for(lambda: len(run.states) == 2)
    run.kill_everything()
    newest, older = run.states
    version = recovery.SavedState.open(older).version
    for note in (newest / "state.json", run.paths.resume / "start.json", run.paths.run_dir / "status.json"):
        note.write_text("{}")
    for note in (run.paths.resume / "current", run.paths.resume / "announced", run.paths.strikes, run.paths.run_dir / "shared.txt"):
        note.write_bytes(bytes(range(256)))
    run.start("--resume", "auto")
    said = run.text
    assert all(f"{path}" in said for path in (newest, run.paths.resume / "current", run.paths.resume / "announced"))
    assert said.count("it is left out") >= 3
    assert run.wait() == 0, run.text
    assert "Traceback" not in run.text
    start = recovery.Start.load(run.paths.resume)
    assert start.state == str(older)
    assert start.first_version > version
    check_episodes(run)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_whose_trainer_rank_is_killed_starts_again_by_itself(run: Launched, rank: int) -> None:
    run.start()
    run.wait_for(lambda: len(run.states) >= 1)
    os.kill(run.pid_of(f"trainer/{rank}"), signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert "starts the run again (restart 1 of 1) from step-" in run.text
    check_episodes(run)
    assert [line["Run/TrainerRestarts"] for line in run.metrics if "Run/TrainerRestarts" in line][-1] == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    small = SmallDisk(tmp_path / "disk", size="96m")
    if not small.is_mounted:
        pytest.skip("no right to mount a tmpfs")
    yield small
    small.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_whose_trainer_rank_is_killed_while_the_disk_is_full_starts_again(
    rank: int,
    tmp_path: Path,
    games_dir: Path,  # noqa: F811
    disk: SmallDisk,
) -> None:
    """Who died and what the next start goes on from are noted without a byte of room. Only the recorded samples lie elsewhere."""
    run = Launched(tmp_path, games_dir, run_dir=disk.folder / "run")
    run.paths.samples.parent.mkdir()
    (tmp_path / "samples").mkdir()
    run.paths.samples.symlink_to(tmp_path / "samples")
    try:
        run.start()
        run.wait_for(lambda: len(run.states) >= 1)
        with disk.full():
            os.kill(run.pid_of(f"trainer/{rank}"), signal.SIGKILL)
            run.wait_for(lambda: "starts the run again (restart 1 of 1) from step-" in run.text)
            saved = recovery.Start.load(run.paths.resume).saved
            assert saved is not None
            run.wait_for(lambda: run.step > saved.step)
        assert run.wait() == 0, run.text
        assert f"lost trainer/{rank}" in run.text
        check_episodes(run)
        books = json.loads((run.paths.run_dir / "books.json").read_text())
        assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0)
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "every"), [("stop", "0"), ("stop", "1"), ("finish", "0")])
def test_a_run_that_ends_on_a_full_disk_is_no_success_and_says_what_it_could_not_save(
    end: str,
    every: str,
    tmp_path: Path,
    games_dir: Path,  # noqa: F811
    disk: SmallDisk,
) -> None:
    run = Launched(tmp_path, games_dir, run_dir=disk.folder / "run")
    try:
        run.start("--resume-every-rounds", every)
        run.wait_for(lambda: run.step >= 3 and len(run.states) >= int(every))
        with disk.full():
            num_steps = run.step
            run.wait_for(lambda: run.step > num_steps)
            num_steps = run.step
            if end == "stop":
                run.paths.stop.touch()
            assert run.wait() == 1, run.text
            command = [sys.executable, "-m", "accerl_mp.launcher.summary", "--run-dir", str(run.paths.run_dir), "--exit-code", "1"]
            lines = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True).stdout.splitlines()
        shown = int(re.search(r"The run has \w+(?: on request)?: (\d+) optimizer steps", "\n".join(lines))[1])
        assert num_steps <= shown <= NUM_STEPS
        saved = recovery.newest_step(run.paths.resume)
        assert (saved > 0) == (every == "1")
        expected = f"Steps {saved + 1} to {shown} were not saved: " if saved else f"No state was saved: the state at step {shown} was not"
        assert lines[-1].startswith(expected), lines
        assert "No space left on device" in run.paths.log("trainer", 0).read_text()
        assert not run.paths.ended.exists()
        assert leftovers(run.paths) == []
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_reaches_the_others_collective_is_named(run: Launched, rank: int) -> None:
    """Both stand still by then, and the one that is innocent may have done so for longer."""
    run.start("--max-trainer-restarts", "0", "--step-timeout-s", "30")  # torch takes its time to be imported, and nobody moves meanwhile
    run.wait_for(lambda: run.step >= 1)
    (run.paths.run_dir / f"stick-{rank}").touch()
    assert run.wait() == 1, run.text
    lost = PeerLost.load(run.paths.run_dir / FAILURE_FILE)
    assert lost.role == f"trainer/{rank}", run.text
    assert "--step-timeout-s" in lost.detail
    assert f"lost trainer/{rank}" in run.text, "on the terminal"
    for index in range(2):
        assert "in run" in run.paths.log("trainer", index).read_text(), "the stacks of both"
    assert "tests/fake_run.py" in run.paths.log("trainer", rank).read_text()
    assert leftovers(run.paths) == []


@pytest.mark.slow
def test_a_trainer_that_dies_at_once_again_and_again_is_given_up(run: Launched) -> None:
    run.start("--max-trainer-restarts", "3")
    for _ in range(2):
        run.wait_for(lambda: run.paths.health.exists() and _is_alive(run.pid_of("trainer/1")))
        pid = run.pid_of("trainer/1")
        os.kill(pid, signal.SIGKILL)
        run.wait_for(lambda pid=pid: run.popen.poll() is not None or not run.paths.health.exists())
    assert run.wait() == 1, run.text
    assert "died again before a round was trained: it is not started again" in run.text


@pytest.mark.slow
def test_a_run_that_gives_up_on_a_role_saves_its_state_and_goes_on_later(run: Launched) -> None:
    run.start("--max-restarts", "0", "--resume-every-rounds", "0")
    run.wait_for(lambda: run.step >= 3)
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    assert run.wait() == 1, run.text
    assert "lost rollout/0 (exit code -9)" in run.text
    assert "--max-restarts 0 is used up" in run.text
    assert len(run.states) == 1
    assert 3 <= recovery.SavedState.open(run.states[0]).step < NUM_STEPS
    assert leftovers(run.paths) == []
    run.start("--resume", "auto")
    assert run.wait() == 0, run.text
    check_episodes(run)


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_everything_and_goes_on_with_one_rank(run: Launched) -> None:
    run.start("--resume-every-rounds", "0", "--save-checkpoint")
    run.wait_for(lambda: (run.paths.run_dir / "metrics.jsonl").exists() and any("Train/Loss" in line for line in run.metrics))
    asked = time.monotonic()
    run.paths.stop.touch()
    assert run.wait() == 0, run.text
    assert time.monotonic() - asked < 30
    assert len(run.states) == 1
    state = recovery.SavedState.open(run.states[0])
    exported = json.loads((run.paths.run_dir / "checkpoints/latest/trainer_state.json").read_text())
    assert exported["optimizer_step"] == state.step < NUM_STEPS
    run.start("--resume", "auto", "--fsdp-world-size", "1")
    assert run.wait() == 0, run.text
    assert [line["step"] for line in run.metrics if "Train/Loss" in line][-1] == NUM_STEPS


@pytest.mark.slow
def test_a_run_whose_stop_cannot_be_written_is_told_by_a_signal_and_saves_what_it_has(run: Launched) -> None:
    """A link to nowhere stands for a disk without an inode; launch.sh then signals its launcher, and that the supervisor."""
    run.start("--resume-every-rounds", "0")
    run.wait_for(lambda: run.step >= 3)
    run.paths.stop.symlink_to("/nowhere/at/all")
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.text
    assert "the supervisor got SIGTERM" in run.text
    assert recovery.SavedState.open(run.states[0]).step >= 3
    assert leftovers(run.paths) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torchrun starts", "the supervisor has begun", "ranks import"])
@pytest.mark.parametrize("how", ["DIR/stop", "SIGTERM to all"])
def test_a_run_that_is_asked_to_end_before_it_has_begun_ends_with_zero_and_leaves_nothing(run: Launched, moment: str, how: str) -> None:
    run.start()

    def has_come() -> bool:
        if moment == "torchrun starts":
            return bool(psutil.Process(run.popen.pid).children())
        if not run.paths.health.exists():
            return False
        states = [row.state for row in HealthTable.attach(run.paths.health).snapshot() if row.name.startswith("trainer/")]
        return moment == "the supervisor has begun" or states == ["starting", "starting"]

    run.wait_for(has_come)
    pids = [run.popen.pid, *(process.pid for process in psutil.Process(run.popen.pid).children(recursive=True))]
    run.paths.stop.touch()
    for pid in pids if how == "SIGTERM to all" else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert run.wait() == 0, run.text
    assert "exits hard" not in run.text
    assert run.states == []
    assert leftovers(run.paths) == []
    assert not [pid for pid in pids if _is_alive(pid)]


@pytest.mark.slow
def test_a_run_that_has_lost_a_game_between_two_starts_goes_on_without_it(run: Launched) -> None:
    run.start("--max-steps", "10000")
    run.wait_for(lambda: len(run.states) == 2)
    run.kill_everything()
    listed = json.loads(run.paths.games.read_text())["train"]
    gone = Path(listed[1])
    kept = [(path, path.read_bytes()) for path in (gone, gone.with_suffix(".json"))]
    try:
        for path, _ in kept:
            path.unlink()
        run.start("--max-steps", "10000", "--resume", "auto")
        assert f"1 of this run's {len(listed)} games is gone ({gone.name})" in run.text
        run.wait_for(lambda: f"game {gone} failed 3 times in a row and is set aside" in run.text)
        step = run.step
        run.wait_for(lambda: run.step > step)
        run.paths.stop.touch()
        assert run.wait() == 0, run.text
    finally:
        for path, content in kept:
            path.write_bytes(content)
    assert json.loads(run.paths.games.read_text())["train"] == listed
    books = json.loads((run.paths.run_dir / "books.json").read_text())
    assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0)
