"""Two real trainer ranks through whole runs: rounds, pushes, evaluations, metrics, exports, and their ends.

Everything but vLLM is real: process entries, board, health table, rings, gloo, FSDP2, metrics socket. The weight sync is one
that writes down what it was asked.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file
from trainer_cases import config_for, made_sample, start_ranks

from accerl_mp.topology import RunPaths
from accerl_mp.trainer import loop, replayed
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import MetricsReceiver
from accerl_mp.transport.health import HealthTable
from accerl_mp.transport.process import run_process
from accerl_mp.transport.ring import SharedRing
from accerl_mp.weight_sync.sender import PushReport


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


class Run:
    """The rest of a run, played by the test: rings that are kept filled, evaluations that end, a metrics receiver."""

    def __init__(self, folder: Path, **options: Any) -> None:
        tiny.save_tiny(folder / "model")
        (folder / "run").mkdir()
        self.paths = RunPaths(folder / "run")
        batch = {"batch_size": 2, "grad_accum_steps": 2, "replay_capacity": 32, "min_replay_size_per_rank": 4, "grpo_group_size": 4}
        run = {"fsdp_world_size": 2, "sync_every_optimizer_steps": 2, "max_steps": 6, "log_dir": str(folder / "run")}
        self.config = config_for(folder / "model", **(batch | run | options))
        self.config.save(self.paths.args)
        self.paths.log("trainer", 0).parent.mkdir()
        self.board = Board.create(self.paths.board)
        self.table = HealthTable.create(self.paths.health, ["trainer/0", "trainer/1"])
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

    def train(self) -> None:
        """Both ranks to their end."""
        self._thread.start()
        start_ranks(_rank, 2, str(self.paths.run_dir))

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


def _rank(rank: int, run_dir: str) -> None:
    """In a new process: what the launcher does for a rank."""
    loop.WeightSync = RecordingSync  # type: ignore[misc,assignment]
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


def _answer_late(run: Run) -> None:
    """The first evaluation is of the weights that training starts from: the first round is trained, its push is held back."""
    while run.board.get("optimizer_step") < 2:
        time.sleep(0.02)
    time.sleep(0.5)
    run.held_back = run.calls()[-1] == "finish 0"
    run.answers_evaluations = True


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


def _stop_at_step(run: Run, step: int) -> None:
    while run.board.get("optimizer_step") < step:
        time.sleep(0.01)
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
