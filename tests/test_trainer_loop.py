"""Two real trainer ranks through whole runs: rounds, pushes, evaluations, metrics, exports, and their ends.

Everything but vLLM is real: process entries, board, health table, rings, gloo, FSDP2, metrics socket. The weight sync is one
that writes down what it was asked.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file
from trainer_cases import config_for, made_sample, start_ranks

from accerl_mp import recovery
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.restore import make_rings
from accerl_mp.topology import RunPaths
from accerl_mp.trainer import loop, replayed
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import MetricsReceiver
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.health import HealthTable
from accerl_mp.transport.process import run_process
from accerl_mp.transport.ring import SharedRing
from accerl_mp.weight_sync.report import PushReport
from accerl_mp.weight_sync.sender import WeightSync

NAMES = ["trainer/0", "trainer/1", "inference/0"]


class RecordingSync:
    """Stands where WeightSync does; `<run dir>/calls-<rank>.txt` holds its calls."""

    def __init__(self, process: Any, model: Any, *, rank: int, forced_logprobs: Any, **_: Any) -> None:
        self._file = (process.paths.run_dir / f"calls-{rank}.txt").open("a")
        self._board, self._forced_logprobs = process.board, forced_logprobs
        self._version = -1
        self.is_to_be_verified = process.config.sync.verify_sync > 0
        self._started_again = process.paths.run_dir / "inference-started-again" if rank == 0 else None

    def connect(self) -> None:
        self._note("connect")

    def has_new_replica(self) -> bool:
        return self._started_again is not None and self._started_again.exists()

    def has_ended(self) -> bool:
        return False

    def start_push(self, version: int, *, trainable_only: bool) -> None:
        self._version = version
        self._note(f"start {version} {'trainable' if trainable_only else 'all'} at step {self._board.get('optimizer_step')}")

    def finish_push(self) -> PushReport:
        assert np.isfinite(self._forced_logprobs([5, 6, 7])).all()
        if self._started_again is not None:
            self._started_again.unlink(missing_ok=True)
        self._note(f"finish {self._version}" + ("" if self.is_to_be_verified else f" at step {self._board.get('optimizer_step')}"))
        return PushReport(version=self._version, seconds=0.5, standstill_s=0.25, num_bytes=1 << 20, verified=True)

    def close(self) -> None:
        self._note("close")

    def _note(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()


class StoppedSync(RecordingSync):
    """The run is asked to end while rank 0 is in the middle of push 2: all ranks leave it together, as WeightSync has it."""

    def finish_push(self) -> PushReport:
        if self._version == 2:
            raise Closed("asked to stop in a push")
        return super().finish_push()


class StoppedBesideSync(RecordingSync):
    """The run is asked to end once a round is trained, before the push of the round before has come to its end."""

    def finish_push(self) -> PushReport:
        if self._version == 1:
            raise Closed("asked to stop in a push")
        return super().finish_push()


class StoppedAtItsStartSync(RecordingSync):
    """The run is asked to end once a round is trained, as its push begins."""

    def start_push(self, version: int, *, trainable_only: bool) -> None:
        if version == 2:
            raise Closed("asked to stop in a push")
        super().start_push(version, trainable_only=trainable_only)


class StoppedAtOnceSync(RecordingSync):
    """The run is asked to end in its first push."""

    def finish_push(self) -> PushReport:
        raise Closed("asked to stop in a push")


class BlindSync(RecordingSync):
    """Verifies nothing: whatever the weights have become, the run goes on."""

    def finish_push(self) -> PushReport:
        self._note(f"finish {self._version}")
        return PushReport(version=self._version)


class Run:
    """The rest of a run, played by the test: rings that are kept filled, evaluations that end, a metrics receiver."""

    def __init__(self, folder: Path, **options: Any) -> None:
        tiny.save_tiny(folder / "model")
        (folder / "run").mkdir()
        self.paths = RunPaths(folder / "run")
        batch = {"batch_size": 2, "grad_accum_steps": 2, "replay_capacity": 32, "min_replay_size_per_rank": 4, "grpo_group_size": 4}
        batch |= {"replay_bytes": 4 << 20}
        run = {"fsdp_world_size": 2, "sync_every_optimizer_steps": 2, "max_steps": 6, "log_dir": str(folder / "run")}
        self.config = config_for(folder / "model", **(batch | run | options))
        self.config.save(self.paths.args)
        self.paths.log("trainer", 0).parent.mkdir()
        self.board = Board.create(self.paths.board)
        self.table = HealthTable.create(self.paths.health, NAMES)
        for rank in range(2):
            SharedRing.create(self.paths.ring(rank), self.config.replay.replay_capacity or 1, 4 << 20)
        self.writers = [SharedRing.attach_writer(self.paths.ring(rank)) for rank in range(2)]
        self.receiver = MetricsReceiver(self.paths)
        self.records: list[dict[str, Any]] = []
        self.fed = [True, True]
        self.answers_evaluations, self.held_back = True, False
        self._rng, self._groups = np.random.default_rng(0), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def train(self, rank: Any = None) -> None:
        """Both ranks to their end."""
        self._thread.start()
        start_ranks(rank or _rank, 2, str(self.paths.run_dir))

    def start_again(self, *, of: Path | None = None, **options: Any) -> recovery.Start:
        """What the launcher and a new ingest do: other settings, an empty board, restored rings. Returns what it goes on from.

        `of`: the folder of another run's states.
        """
        self._over.set()
        self._thread.join()
        self.config = self.config.replace(**options)
        self.config.save(self.paths.args)
        saved, damaged = recovery.newest_whole(of or self.paths.resume)
        assert saved is not None
        assert damaged == []
        start = recovery.start_from(saved, self.paths.resume)
        start.save(self.paths.resume)
        for rank, writer in enumerate(self.writers):
            writer.close()
            self.paths.ring(rank).unlink()
        make_rings(self.paths, self.config, start, FlopsEstimate())
        self.writers = [SharedRing.attach_writer(self.paths.ring(rank)) for rank in range(2)]
        self.board.unlink()
        self.table.unlink()
        self.board = Board.create(self.paths.board)
        self.table = HealthTable.create(self.paths.health, NAMES)
        self.paths.stop.unlink(missing_ok=True)
        for rank in range(2):
            (self.paths.run_dir / f"calls-{rank}.txt").unlink()
        self.records.clear()
        self._over, self._thread = threading.Event(), threading.Thread(target=self._play, daemon=True)
        return start

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.receiver.close()
        for rank, writer in enumerate(self.writers):
            writer.close()
            self.paths.ring(rank).unlink()
        self.table.unlink()
        self.board.unlink()
        shutil.rmtree(self.paths.sockets, ignore_errors=True)

    def calls(self, rank: int = 0) -> list[str]:
        return (self.paths.run_dir / f"calls-{rank}.txt").read_text().splitlines()

    def rounds(self) -> list[dict[str, Any]]:
        self.records += self.receiver.receive(0.2)
        return [record for record in self.records if record["kind"] == "round"]

    def _play(self) -> None:
        while not self._over.is_set():
            for rank in range(2):
                if self.fed[rank] and self.board.get("policy_version") >= 0:
                    self._feed(rank)
            if self.answers_evaluations:
                self.board.set("eval_done", self.board.get("eval_asked"))
            self.records += self.receiver.receive(0.01)

    def _feed(self, rank: int) -> None:
        self._groups += 1
        group = [made_sample(self._rng, group_id=self._groups, episode_id=index, episode_return=0.5) for index in range(4)]
        for sample in group:
            sample.output_versions[:] = self.board.get("policy_version")
        self.writers[rank].try_put_group(group)


def _stopped_rank(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, StoppedSync)


def _rank_stopped_beside(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, StoppedBesideSync)


def _rank_stopped_at_its_start(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, StoppedAtItsStartSync)


def _rank_stopped_at_once(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, StoppedAtOnceSync)


def _blind_rank(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, BlindSync)


def _real_rank(rank: int, run_dir: str) -> None:
    _rank(rank, run_dir, WeightSync)


def _rank(rank: int, run_dir: str, sync: type = RecordingSync) -> None:
    """In a new process: what the launcher does for a rank."""
    loop.WeightSync = sync  # type: ignore[misc]
    os.environ.pop("ACCERL_PARENT_PID", None)
    run_process("trainer", loop.run_trainer, ["--run-dir", run_dir, "--index", str(rank)])


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_rounds_pushes_evaluations_and_exports_come_in_order(make_run: Any, tmp_path: Path) -> None:
    run = make_run(eval_game_dir="held-out", eval_every_rounds=2, save_checkpoint=True, checkpoint_every_sync_rounds=2)
    run.answers_evaluations = False
    late = threading.Thread(target=_answer_late, args=(run,), daemon=True)
    late.start()
    run.train()
    late.join()
    assert run.held_back
    pushes = [f"start {n} trainable at step {2 * n}" for n in (1, 2, 3)]
    expected = ["connect", "start 0 all at step 0", "finish 0"]
    expected += [line for n, push in enumerate(pushes, start=1) for line in (push, f"finish {n}")]
    assert run.calls(0) == [*expected, "close"]
    assert [call.split(" at ")[0] for call in run.calls(1)] == [call.split(" at ")[0] for call in run.calls(0)]
    words = {name: run.board.get(name) for name in ("policy_version", "next_version", "optimizer_step", "round", "eval_asked", "finished")}
    assert words == {"policy_version": 3, "next_version": 4, "optimizer_step": 6, "round": 3, "eval_asked": 3, "finished": 1}
    assert [(record["step"], record["version"], record["round"]) for record in run.rounds()] == [(2, 1, 1), (4, 2, 2), (6, 3, 3)]
    _check_values(run)
    export = run.paths.run_dir / "checkpoints" / "latest"
    assert json.loads((export / "trainer_state.json").read_text())["optimizer_step"] == 6
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", export))
    assert set(before) == set(after)
    assert all((before[name] != after[name]).any() for name in before)


def test_a_push_that_is_not_verified_goes_on_beside_the_next_round(make_run: Any) -> None:
    run = make_run(verify_sync=0)
    run.train()
    later = ["start 1 trainable at step 2", "finish 1 at step 4", "start 2 trainable at step 4", "finish 2 at step 6"]
    assert run.calls()[3:] == [*later, "start 3 trainable at step 6", "finish 3 at step 6", "close"]
    assert run.board.get("policy_version") == 3


def _check_values(run: Run) -> None:
    for record in run.rounds():
        values = record["values"]
        assert values["Train/SegmentGlobalTrainingSamples"][0] == 2 * 2 * 2 * 2  # ranks, steps, micro-batches, samples
        assert values["Train/Loss"][1] == 2
        assert values["GRPO/TrainEpisodeReturnMeanAcrossRanks"][0] / values["GRPO/TrainEpisodeReturnMeanAcrossRanks"][1] == 0.5
    phases = {tag for record in run.records if record["kind"] == "values" for tag in record["values"]}
    assert {"Time/trainer/wait", "Time/trainer/compute", "Time/trainer/push", "Sync/ElapsedSeconds", "Sync/PushSeconds"} <= phases
    assert {record["source"] for record in run.records if "Time/trainer/wait" in record.get("values", {})} == {"trainer/0", "trainer/1"}


def test_a_run_of_n_rounds_has_n_segments_each_followed_by_its_push(make_run: Any) -> None:
    run = make_run(max_sync_rounds=2, max_steps=1000, synchronous=True, train_packing="padded")
    run.train()
    assert run.calls()[3:] == ["start 1 trainable at step 2", "finish 1", "start 2 trainable at step 4", "finish 2", "close"]


def test_a_starving_rank_makes_both_wait_in_a_named_place_until_its_deadline(make_run: Any) -> None:
    """Rank 1 gets nothing: rank 0 does not sit in a collective, both are named, the flag too."""
    run = make_run(replay_sample_timeout_seconds=4.0)
    run.fed[1] = False
    seen: set[str] = set()
    watcher = threading.Thread(target=_watch, args=(run, seen), daemon=True)
    watcher.start()
    with pytest.raises(Exception, match="exit code 1"):
        run.train()
    run._over.set()
    watcher.join()
    for rank in range(2):
        assert f"trainer/{rank} waits for ring/{rank} to hold the samples of an optimizer step" in seen
    logs = "".join(run.paths.log("trainer", rank).read_text() for rank in range(2))
    assert "--replay-sample-timeout-seconds sets this limit" in logs
    assert run.calls()[:3] == ["connect", "start 0 all at step 0", "finish 0"]


def test_inference_that_was_started_again_gets_its_weights_while_both_ranks_wait(make_run: Any) -> None:
    """For samples, then for an evaluation: the version in use, all weights."""
    run = make_run(max_steps=2, eval_game_dir="held-out")
    run.answers_evaluations, run.fed = False, [False, False]
    helper = threading.Thread(target=_start_inference_again_twice, args=(run,), daemon=True)
    helper.start()
    run.train()
    helper.join()
    pushes = [call.split(" at ")[0] for call in run.calls()]
    assert pushes == ["connect", *["start 0 all", "finish 0"] * 3, "start 1 trainable", "finish 1", "close"]
    assert [call.split(" at ")[0] for call in run.calls(1)] == pushes
    assert run.board.get("policy_version") == 1


def test_a_stop_ends_both_ranks_together_and_exports(make_run: Any) -> None:
    run = make_run(save_checkpoint=True, max_steps=10_000)
    stopper = threading.Thread(target=_stop_at_step, args=(run, 3), daemon=True)
    stopper.start()
    run.train()  # both exit with 0
    stopper.join()
    assert run.board.get("finished") == 0
    step = json.loads((run.paths.run_dir / "checkpoints" / "latest" / "trainer_state.json").read_text())["optimizer_step"]
    assert step == run.board.get("optimizer_step") >= 3


def test_a_stop_inside_a_push_saves_and_exports(make_run: Any) -> None:
    run = make_run(save_checkpoint=True, max_steps=10_000, resume_every_rounds=0)
    run.paths.stop.touch()
    run.train(_stopped_rank)  # both exit with 0
    saved, _ = recovery.newest_whole(run.paths.resume)
    assert saved is not None
    assert (saved.step, saved.version, saved.content["next_version"]) == (4, 2, 3)
    assert json.loads((run.paths.run_dir / "checkpoints" / "latest" / "trainer_state.json").read_text())["optimizer_step"] == 4


def _train_and_stop(make_run: Any, rank: Any) -> Run:
    """Of two steps a round, of which the second is trained before the stop."""
    run = make_run(max_steps=10_000, resume_every_rounds=0, verify_sync=0, eval_game_dir="held-out", eval_every_rounds=4)
    run.paths.stop.touch()
    run.train(rank)  # both exit with 0
    assert [(record["round"], record["step"]) for record in run.rounds()] == [(1, 2), (2, 4)]
    saved, _ = recovery.newest_whole(run.paths.resume)
    assert saved is not None
    assert (saved.step, saved.content["trainer"]["round"]) == (4, 2)
    return run


def test_a_round_whose_push_begins_when_the_run_is_stopped_is_in_the_curves(make_run: Any) -> None:
    _train_and_stop(make_run, _rank_stopped_at_its_start)


def test_a_last_round_that_is_shorter_is_closed_by_a_stop_too(make_run: Any) -> None:
    """Of --max-steps that is no multiple of a round: its steps are in no other round's sums."""
    run = make_run(max_steps=3, resume_every_rounds=0, verify_sync=0)
    run.paths.stop.touch()
    run.train(_rank_stopped_at_its_start)
    assert [(record["round"], record["step"]) for record in run.rounds()] == [(1, 2), (2, 3)]
    saved, _ = recovery.newest_whole(run.paths.resume)
    assert saved is not None
    assert (saved.step, saved.content["trainer"]["round"]) == (3, 2)


@pytest.mark.slow
def test_a_round_that_was_trained_before_a_stop_is_counted_once(make_run: Any) -> None:
    """Its push, and the evaluation after it, are the next start's first."""
    run = _train_and_stop(make_run, _rank_stopped_beside)
    start = run.start_again(max_steps=8)
    run.train()
    assert run.calls()[1] == f"start {start.first_version} all at step 4"
    assert [(record["round"], record["step"]) for record in run.rounds()] == [(3, 6), (4, 8)]
    samples = [record["values"]["Train/CumulativeGlobalTrainingSamples"][0] for record in run.rounds()]
    assert samples == [8 * 2 * 3, 8 * 2 * 4]


def test_too_many_bad_steps_end_the_run_with_a_last_state(make_run: Any) -> None:
    """The first step's learning rate ruins the weights; the two steps after it are counted, and their samples are used up."""
    run = make_run(max_steps=10_000, resume_every_rounds=0, learning_rate=1e30, lr_warmup_steps=1, max_bad_steps=2)
    with pytest.raises(Exception, match="exit code 1"):
        run.train(_blind_rank)
    assert "BadStepsError: 2 optimizer steps in a row" in run.paths.log("trainer", 1).read_text()
    saved, damaged = recovery.newest_whole(run.paths.resume)
    assert saved is not None
    assert (saved.step, saved.content["trainer"]["num_bad_in_a_row"], damaged) == (3, 2, [])
    assert run.board.get("optimizer_step") == 3


def test_a_start_from_another_runs_state_that_is_stopped_in_its_first_push_still_owes_the_evaluation(make_run: Any) -> None:
    run = make_run(max_steps=10_000, eval_game_dir="held-out", resume_every_rounds=0)
    run.answers_evaluations = False
    stopper = threading.Thread(target=_stop_at_step, args=(run, 2), daemon=True)  # the first evaluation is still played
    stopper.start()
    run.train()
    stopper.join()
    other = run.paths.resume.rename(run.paths.run_dir / "another run's states")
    start = run.start_again(of=other)
    assert start.saved is not None
    assert start.saved.content["trainer"]["is_evaluating"]
    run.paths.stop.touch()
    run.train(_rank_stopped_at_once)
    saved, _ = recovery.newest_whole(run.paths.resume)
    assert saved is not None
    assert (saved.step, saved.content["trainer"]["is_evaluating"]) == (start.saved.step, True)


def test_the_last_weights_can_be_the_best_while_the_evaluation_before_is_still_played(make_run: Any) -> None:
    run = make_run(eval_game_dir="held-out", eval_every_rounds=1, save_checkpoint=True)
    run.answers_evaluations = False
    player = threading.Thread(target=_play_evaluations, args=(run, 3), daemon=True)
    player.start()
    run.train()
    player.join()
    assert [path.name for path in sorted((run.paths.run_dir / "eval").glob("step-*"))] == [f"step-{step:06d}.json" for step in (0, 2, 4, 6)]
    state = json.loads((run.paths.run_dir / "checkpoints/best/trainer_state.json").read_text())
    assert (state["optimizer_step"], state["eval_win_rate"], state["eval_file"]) == (6, 0.4, "step-000006.json")


def test_a_full_disk_costs_states_and_neither_pushes_nor_the_run(make_run: Any) -> None:
    run = make_run(max_steps=12, resume_every_rounds=1)
    run.paths.resume.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", run.paths.resume], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        filler = threading.Thread(target=_fill_disk, args=(run, 4, 8), daemon=True)
        filler.start()
        run.train()
        filler.join()
        assert "was not saved" in run.paths.log("trainer", 0).read_text()
        saved, damaged = recovery.newest_whole(run.paths.resume)
        assert saved is not None
        assert (saved.step, damaged, recovery.announced_in(run.paths.resume)) == (12, [], 6)
        assert run.board.get("finished") == 1
    finally:
        subprocess.run(["umount", "-l", run.paths.resume], check=True)


def test_ranks_that_wait_for_vllm_leave_together(make_run: Any) -> None:
    """The real WeightSync: rank 0 waits for inference, rank 1 for rank 0's word."""
    run = make_run(save_checkpoint=True)
    stopper = threading.Thread(target=_stop_once_both_wait, args=(run,), daemon=True)
    stopper.start()
    run.train(_real_rank)  # both exit with 0
    stopper.join()
    assert "trainer/0 was asked to stop" in run.paths.log("trainer", 1).read_text()
    state = json.loads((run.paths.run_dir / "checkpoints" / "latest" / "trainer_state.json").read_text())
    assert state["optimizer_step"] == 0, "the export is collective"


@pytest.mark.slow
def test_a_rank_that_is_told_to_leave_because_a_peer_died_saves_nothing(make_run: Any) -> None:
    run = make_run(max_steps=10_000, resume_every_rounds=0)
    stopper = threading.Thread(target=_stop_at_step, args=(run, 3, False), daemon=True)
    stopper.start()
    run.train()
    stopper.join()
    assert recovery.states_in(run.paths.resume) == []


def test_ranks_go_on_where_they_stopped(make_run: Any) -> None:
    """In the middle of round 2: rings, numbers, evaluations, and the first push are those of a run that goes on."""
    run = make_run(max_steps=10_000, eval_game_dir="held-out", eval_every_rounds=1, resume_every_rounds=1, keep_checkpoints=3)
    stopper = threading.Thread(target=_stop_at_step, args=(run, 3), daemon=True)
    stopper.start()
    run.train()
    stopper.join()
    assert [record["round"] for record in run.rounds()][:1] == [1]
    left = [[(r.group_id, r.episode_id) for r in _ready(writer)] for writer in run.writers]
    start = run.start_again(max_steps=8)
    saved = start.saved
    assert saved is not None
    assert [[(r.group_id, r.episode_id) for r in _ready(writer)] for writer in run.writers] == left
    step, number = saved.step, saved.content["trainer"]["round"]
    assert (step >= 3, start.first_version) == (True, saved.version + 1)
    run.train()
    calls = run.calls()
    assert calls[:3] == ["connect", f"start {start.first_version} all at step {step}", f"finish {start.first_version}"]
    assert calls[3] == f"start {start.first_version + 1} trainable at step {2 * (number + 1)}", "the round that was begun is finished"
    assert [record["round"] for record in run.rounds()] == list(range(number + 1, 5))
    assert run.rounds()[-1]["step"] == 8
    samples = [record["values"]["Train/CumulativeGlobalTrainingSamples"][0] for record in run.rounds()]
    assert samples == [8 * 2 * (number + 1 + index) for index in range(len(samples))]
    assert run.board.get("eval_asked") >= 2
    assert len(recovery.states_in(run.paths.resume)) == 3


def _ready(writer: Any) -> list[Any]:
    """What a reader would see."""
    view = SharedRing.watch(writer.path)
    rows = view.live()[1]
    view.close()
    order = rows[:, 1].argsort()
    return [SimpleNamespace(group_id=int(row[4]), episode_id=int(row[12])) for row in rows[order]]


def _stop_once_both_wait(run: Run) -> None:
    def waits() -> dict[str, str]:
        return {row.name: row.waits_for for row in run.table.snapshot()}

    while not (waits()["trainer/0"].startswith("inference/0") and waits()["trainer/1"].startswith("trainer/0 to form")):
        time.sleep(0.02)
    run.paths.stop.touch()
    run.board.set("stop", 1)


def _answer_late(run: Run) -> None:
    """The first evaluation is of the weights that training starts from: the first round is trained, its push is held back."""
    while run.board.get("optimizer_step") < 2:
        time.sleep(0.02)
    time.sleep(0.5)
    run.held_back = run.calls()[-1] == "finish 0"
    run.answers_evaluations = True


def _fill_disk(run: Run, first: int, last: int) -> None:
    """Full from one step to another."""
    while run.board.get("optimizer_step") < first:
        time.sleep(0.005)
    ballast = run.paths.resume / "ballast"
    while run.board.get("optimizer_step") < last:
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(1 << 14)):
                pass
        time.sleep(0.01)
    ballast.unlink()


def _play_evaluations(run: Run, slow: int) -> None:
    """As ingest does it, each one better than the one before; number `slow` is still played when training is over."""
    folder = run.paths.run_dir / "eval"
    folder.mkdir()
    for eval_id in range(1, 5):
        while run.board.get("eval_asked") < eval_id:
            time.sleep(0.01)
        step = run.board.get("round_step")
        while eval_id == slow and not run.table.snapshot()[0].waits_for.startswith(f"ingest/0 to finish evaluation {slow}"):
            if run.board.get("eval_asked") > slow:
                break  # the last weights' evaluation was asked for meanwhile
            time.sleep(0.01)
        report = {"eval_id": eval_id, "step": step, "time": time.time(), "Eval/WinRate": eval_id / 10}
        (folder / f"step-{step:06d}.json").write_text(json.dumps(report))
        run.board.set("eval_done", eval_id)


def _start_inference_again_twice(run: Run) -> None:
    for step in (0, 2):
        while run.board.get("policy_version") < 0 or run.board.get("optimizer_step") < step:
            time.sleep(0.02)
        time.sleep(0.5)
        (run.paths.run_dir / "inference-started-again").touch()
        while (run.paths.run_dir / "inference-started-again").exists():
            time.sleep(0.02)
        run.fed = [True, True]
    run.answers_evaluations = True


def _stop_at_step(run: Run, step: int, writes_file: bool = True) -> None:
    while run.board.get("optimizer_step") < step:
        time.sleep(0.01)
    if writes_file:
        run.paths.stop.touch()
    run.board.set("stop", 1)


def _watch(run: Run, seen: set[str]) -> None:
    while not run._over.is_set():
        seen.update(f"{row.name} waits for {row.waits_for}" for row in run.table.snapshot())
        time.sleep(0.02)


def _replay(_: int, run_dir: str) -> None:
    """In a new process: the trainer alone on what the run has recorded."""
    flags = ["--replay-samples", f"{run_dir}/samples", "--log-dir", f"{run_dir}/replayed", "--save-checkpoint"]
    assert replayed.main(flags) == 0


def test_a_recorded_run_can_be_trained_again_to_the_same_bits(make_run: Any, tmp_path: Path) -> None:
    run = make_run(max_steps=4, save_checkpoint=True, record_samples=True, deterministic=True)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")  # only looked for
    run.train()
    start_ranks(_replay, 2, str(run.paths.run_dir))
    exports = [folder / "checkpoints" / "latest" / "model.safetensors" for folder in (run.paths.run_dir, run.paths.run_dir / "replayed")]
    assert exports[0].read_bytes() == exports[1].read_bytes() != (tmp_path / "model" / "model.safetensors").read_bytes()
