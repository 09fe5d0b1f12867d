"""A trainer rank: rounds of optimizer steps, each followed by a weight push.

All ranks run the same program in the same order; what only one of them sees (its ring, the board, a stop) is agreed on
before it decides anything. Rank 0 also talks to the rest of the run: board, weight pushes, metrics, exports.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accerl_mp.models.build import compute_dtype
from accerl_mp.timing import Timer
from accerl_mp.trainer.checkpoint import export, export_folder, trainer_state
from accerl_mp.trainer.metrics import RoundMetrics
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.ranks import Ranks, limit_memory, prepare_torch, wait_for_engine
from accerl_mp.trainer.recording import RecordedStep, Recorder
from accerl_mp.trainer.replay import Replay, StepSamples
from accerl_mp.trainer.sharded import Reference, build_sharded
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.trainer.warmup import warm_up
from accerl_mp.transport.channels import MetricsSender
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.process import Process
from accerl_mp.transport.ring import RingReader, SharedRing
from accerl_mp.weight_sync.sender import PushReport, WeightSync

_REPLAY_FLAG = "--replay-sample-timeout-seconds"
_RING_TIMEOUT_S = 300.0

_log = logging.getLogger(__name__)


def run_trainer(process: Process) -> None:
    """One rank, from joining the others to its last export. Returns at the normal end; Closed if the run is asked to stop."""
    config = process.config
    prepare_torch(config)
    size, on_gpu = config.run.fsdp_world_size or 1, config.run.placement != "cpu"
    wait_for_engine(config, process.health)
    ranks = Ranks.join(rank=process.index, size=size, on_gpu=on_gpu, health=process.health)
    limit_memory(config)
    with ExitStack() as stack:
        stack.callback(ranks.leave)
        trainer = Trainer(process, ranks, stack)
        try:
            trainer.run()
        except Closed:
            trainer.save_on_stop()
            raise


class Trainer:
    """State of a rank. Methods are collective unless they say otherwise."""

    def __init__(self, process: Process, ranks: Ranks, stack: ExitStack) -> None:
        self._process, self._ranks, self._config = process, ranks, process.config
        self._dtype = compute_dtype(self._config, ranks.device)
        self._model, unsharded = build_sharded(self._config, ranks, self._dtype)
        reference = Reference.if_wanted(self._config, ranks, self._dtype)
        self._stepper = Stepper(self._model, self._config, ranks, unsharded=unsharded, reference=reference)
        ring = stack.enter_context(attach_ring(process, ranks.rank))
        self._replay = Replay(ring, self._config, rank=ranks.rank)
        is_recorded = self._config.run.record_samples
        self._recorder = Recorder(process.paths.samples, self._config, rank=ranks.rank) if is_recorded else None
        self._sender = MetricsSender(process.paths, process.name)
        stack.callback(self._sender.close)
        self._metrics, self._timer = RoundMetrics(self._config, ranks), Timer()
        self._sync = WeightSync(
            process,
            self._model,
            rank=ranks.rank,
            world_size=ranks.size,
            dtype=self._dtype,
            forced_logprobs=lambda ids: forced_logprobs(self._model, ids, ranks.device),
        )
        stack.callback(self._sync.close)
        self._step = self._round = self._version = 0
        self._num_evals = 0
        self._next: StepSamples | None = None
        self._is_pushing = False
        self._last_export = -1

    def run(self) -> None:
        """Push, evaluate, train, and at the end push, evaluate, export."""
        warm_up(self._model, self._config, self._ranks)
        self._sync.connect()
        self._start_push()
        self._finish_push()
        self._process.health.set_state("running")
        self._metrics.start()  # vLLM's start is no part of the first round
        self._timer.take()
        self._ask_evaluation()
        while not self._is_over():
            self._run_round()
        self._finish_push()
        self._ask_evaluation()
        self._wait_for_evaluation()
        self._export(is_final=True)
        if self._ranks.rank == 0:
            self._process.board.set("finished", 1)
        _log.info("training is over: %d optimizer steps in %d rounds", self._step, self._round)

    def save_on_stop(self) -> None:
        """The run was asked to end: export what there is, if all ranks know of it (alone, the gathering would hang)."""
        if self._ranks.agreed_to_stop and self._process.paths.stop.exists():
            self._export(is_final=True)

    def _is_over(self) -> bool:
        rounds = self._config.run.max_sync_rounds
        return self._step >= self._config.optimizer.max_steps or (rounds is not None and self._round >= rounds)

    def _run_round(self) -> None:
        steps = min(self._config.run.sync_every_optimizer_steps, self._config.optimizer.max_steps - self._step)
        for _ in range(steps):
            self._run_step()
        if self._round == 0:
            self._wait_for_evaluation()  # the one before training: of the weights that training starts from
        self._round += 1
        self._start_push()
        if self._config.run.synchronous:
            self._finish_push()
        self._close_round()
        if self._is_due(self._config.metrics.checkpoint_every_sync_rounds):
            self._export()

    def _run_step(self) -> None:
        """One optimizer step: fetch, finish the push that is on its way, agree, train."""
        self._process.health.tick()
        self._has_samples()  # beside the push's sending
        self._finish_push()
        with self._timer.phase("wait"):
            totals = self._wait_for_samples()
        taken, self._next = self._next, None
        assert taken is not None
        self._replay.commit(taken, self._trained_version)
        if self._recorder:
            self._recorder.add(self._step, RecordedStep(taken.micro_batches, self._on_policy_version()))
        result = self._stepper.run(taken.micro_batches, totals, step=self._step, version=self._on_policy_version())
        self._timer.add("compute", result.compute_seconds)
        self._timer.add("update", result.update_seconds)
        self._metrics.add_step(result, taken.samples, choose_seconds=taken.choose_seconds)
        self._step += 1
        if self._ranks.rank == 0:
            self._process.board.set("optimizer_step", self._step)

    def _wait_for_samples(self) -> LocalTotals:
        """The step's totals over all ranks, once each rank has its samples. The one place where a rank starves."""
        replay = self._config.replay
        numbers = self._wait_until(
            self._has_samples,
            what=f"ring/{self._ranks.rank} to hold the samples of an optimizer step",
            timeout_s=replay.replay_sample_timeout_seconds,
            flag=_REPLAY_FLAG,
            longest_sleep_s=replay.replay_wait_sleep_seconds,
            share=lambda: (LocalTotals.of(self._next.samples) if self._next else LocalTotals()).numbers(),
        )
        return LocalTotals(*numbers)

    def _wait_until(self, is_ready: Callable[[], bool], **options: Any) -> list[float]:
        """`Ranks.wait_until` for what vLLM must generate for: where it was started again meanwhile, it gets weights first.

        waits for      `is_ready` on all ranks, from the start again after such a push
        """
        while (numbers := self._ranks.wait_until(is_ready, gives_way=self._sync.has_new_replica, **options)) is None:
            self._push_again()
        return numbers

    def _has_samples(self) -> bool:
        """Not collective."""
        if self._next is None:
            with self._timer.phase("pack"):
                self._next = self._replay.try_take(self._trained_version)
        return self._next is not None

    @property
    def _trained_version(self) -> int:
        """Of the weights that train: the last that was pushed or is on its way. Steps since then have no version yet."""
        return self._version

    def _on_policy_version(self) -> int:
        """The version whose tokens were sampled by exactly the weights of this step; -1: none."""
        return self._version if self._step % self._config.run.sync_every_optimizer_steps == 0 else -1

    def _start_push(self) -> None:
        """Gather the weights; they travel on a side thread from here on."""
        is_first = self._round == 0
        self._version = 0 if is_first else self._version + 1
        if self._ranks.rank == 0:
            self._process.board.set("next_version", self._version + 1)
        with self._timer.phase("push"):
            self._sync.start_push(self._version, trainable_only=not is_first)
        self._is_pushing = True

    def _finish_push(self) -> None:
        """Wait until vLLM uses the weights that are on their way, if any, and tell the run so."""
        if not self._is_pushing:
            return
        with self._timer.phase("push"):
            report = self._sync.finish_push()
        self._is_pushing = False
        if self._ranks.rank == 0:
            self._process.board.set("policy_version", self._version)
            self._sender.values(push_values(report))
        if self._round and self._is_due(self._config.metrics.eval_every_rounds) and not self._is_over():
            self._ask_evaluation()

    def _push_again(self) -> None:
        """All weights of now under the version that is in use: a new engine holds every request until it has some.

        In the middle of a round they are newer than those that the version began with. The number counts rounds, and the ratio
        uses the logprobs that came with the tokens, so only that version's tokens get a little fresher.
        """
        with self._timer.phase("push"):
            self._sync.start_push(self._version, trainable_only=False)
            report = self._sync.finish_push()
        if self._ranks.rank == 0:
            self._sender.values(push_values(report))

    def _is_due(self, every_rounds: int) -> bool:
        return every_rounds > 0 and self._round % every_rounds == 0

    def _ask_evaluation(self) -> None:
        """Held-out games with the weights that vLLM has now. Training goes on meanwhile."""
        if not self._config.metrics.eval_game_dir:
            return
        self._num_evals += 1
        if self._ranks.rank == 0:
            self._process.board.set("eval_asked", self._num_evals)

    def _wait_for_evaluation(self) -> None:
        """Until every evaluation that was asked for is done. After the last step nothing stays in the ring meanwhile."""
        asked, board = self._num_evals, self._process.board

        def is_done() -> bool:
            if self._is_over():
                self._replay.let_go()
            return board.get("eval_done") >= asked

        with self._timer.phase("evaluation"):
            self._wait_until(
                is_done,
                what=f"ingest/0 to finish evaluation {asked}",
                timeout_s=self._config.replay.replay_sample_timeout_seconds,
                flag=_REPLAY_FLAG,
            )

    def _close_round(self) -> None:
        """Bring the ranks' sums together and send them."""
        self._metrics.add_replay(self._replay.take_counts())
        values = self._metrics.close_round()
        self._sender.values({f"Time/trainer/{phase}": times for phase, times in self._timer.take().items()})
        if self._ranks.rank == 0:
            self._process.board.set("round", self._round)
            self._sender.round({"step": self._step, "version": self._version, "round": self._round, "values": values})

    def _export(self, *, is_final: bool = False) -> None:
        """HuggingFace format, with --save-checkpoint; not twice at the same step."""
        if not self._config.metrics.save_checkpoint or self._last_export == self._step:
            return
        self._last_export = self._step
        folder = export_folder(self._config, self._step, is_final=is_final)
        state = trainer_state(self._config, optimizer_step=self._step, round_number=self._round, policy_version=self._version)
        with self._timer.phase("export"):
            export(self._model, folder, self._config, dtype=self._dtype, rank=self._ranks.rank, state=state)


def attach_ring(process: Process, rank: int) -> RingReader:
    """waits for      ingest to make the ring, at most 5 minutes"""
    path = process.paths.ring(rank)
    with process.health.waiting(f"ingest/0 to make ring/{rank}", timeout_s=_RING_TIMEOUT_S) as wait:
        while not path.exists():
            wait.check()
            time.sleep(0.05)
    return SharedRing.attach_reader(path)


def push_values(report: PushReport) -> dict[str, float]:
    values = {
        "Sync/ElapsedSeconds": report.standstill_s,
        "Sync/PushSeconds": report.seconds,
        "Sync/PushMiB": report.num_bytes / 2**20,
    }
    return values | ({"Sync/VerifiedPushes": 1.0} if report.verified else {})
