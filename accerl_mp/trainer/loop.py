"""A trainer rank: rounds of optimizer steps, each followed by a weight push.

All ranks run the same program in the same order; what only one of them sees (its ring, the board, a stop) is agreed on
before it decides anything. Rank 0 also talks to the rest of the run: board, weight pushes, metrics, exports.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accerl_mp.models.build import compute_dtype
from accerl_mp.recovery import Start, announce, noted_strikes
from accerl_mp.timing import Timer
from accerl_mp.trainer.best import BestExport
from accerl_mp.trainer.checkpoint import export, export_folder, trainer_state
from accerl_mp.trainer.metrics import RoundMetrics, push_values
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.random_state import random_state, set_random_state
from accerl_mp.trainer.ranks import Ranks, limit_memory, prepare_torch, wait_for_engine
from accerl_mp.trainer.recording import RecordedStep, Recorder
from accerl_mp.trainer.replay import Replay, StepSamples, attach_ring
from accerl_mp.trainer.saving import Content, Saver, was_asked_to_end
from accerl_mp.trainer.sharded import Reference, build_sharded
from accerl_mp.trainer.state import Progress, copied, load_tensors, tensors_of
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.trainer.warmup import peak_memory, warm_up
from accerl_mp.trainer.witness import Witness
from accerl_mp.transport.channels import MetricsSender
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.process import Process
from accerl_mp.transport.saved_ring import rank_fields
from accerl_mp.weight_sync.sender import WeightSync

_REPLAY_FLAG = "--replay-sample-timeout-seconds"

_log = logging.getLogger(__name__)


def run_trainer(process: Process) -> None:
    """One rank, from joining the others to its last export. Returns at the normal end; Closed if the run is asked to stop."""
    config = process.config
    prepare_torch(config)
    size, on_gpu = config.run.fsdp_world_size or 1, config.run.placement != "cpu"
    wait_for_engine(config, process.health)
    ranks = Ranks.join(rank=process.index, size=size, on_gpu=on_gpu, health=process.health)
    process.reached = ranks.num_collectives
    limit_memory(config)
    with ExitStack() as stack:
        stack.callback(ranks.leave)
        trainer = Trainer(process, ranks, stack)
        stack.push(trainer.save_at_exit)
        trainer.run()


class Trainer:
    """State of a rank. Methods are collective unless they say otherwise."""

    def __init__(self, process: Process, ranks: Ranks, stack: ExitStack) -> None:
        self._process, self._ranks, self._config = process, ranks, process.config
        self._dtype = compute_dtype(self._config, ranks.device)
        self._model, unsharded = build_sharded(self._config, ranks, self._dtype)
        reference = Reference.if_wanted(self._config, ranks, self._dtype)
        witness = Witness(process.paths.run_dir / "episodes", every=self._config.metrics.transcripts_every)
        self._stepper = Stepper(self._model, self._config, ranks, unsharded=unsharded, reference=reference, witness=witness)
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
            on_use=self._announce,
        )
        stack.callback(self._sync.close)
        self._start = Start.load(process.paths.resume)
        self._saver = Saver(process.paths.resume, self._config, ranks, process.health)
        is_resumed = self._start.state is not None
        self._best = BestExport.if_wanted(self._config, process.paths, rank=ranks.rank, is_resumed=is_resumed)
        self._step = self._round = self._num_evals = 0
        self._version = self._start.first_version - 1
        self._next: StepSamples | None = None
        self._has_pushed = self._is_pushing = False
        self._is_between_steps = self._is_evaluation_due = True
        self._round_began = (0, 0)
        self._last_export = -1
        self._resume()
        self._first_round = self._round

    def run(self) -> None:
        """Push, evaluate, train, and at the end push, evaluate, export."""
        warm_up(self._model, self._config, self._ranks)
        self._sync.connect()
        self._start_push()
        self._finish_push()
        self._process.health.set_state("running")
        self._metrics.start_clock()  # vLLM's start is no part of the first round
        self._timer.take()
        if self._is_evaluation_due:
            self._ask_evaluation()
        while not self._is_over():
            self._run_round()
        self._saver.finish()
        self._save(is_last=True)  # before the rings are emptied: a later start with more --max-steps goes on from here
        self._finish_push()
        self._wait_for_evaluation()  # of weights before these: the last ones are evaluated on their own
        self._ask_evaluation()
        self._wait_for_evaluation()
        self._judge_best()
        self._export(is_final=True)
        self._saver.try_again()
        if self._ranks.rank == 0:
            self._process.board.set("finished", 1)
        _log.info("training is over: %d optimizer steps in %d rounds%s", self._step, self._round, peak_memory(self._ranks.device))

    def save_at_exit(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: object) -> None:
        """However `run` ended: a last state if the run was asked to end or has failed, and all ranks still can; on a stop the export.

        A rank that is told to leave because a peer died (SIGTERM, the supervisor knows no stop) saves nothing: it would be alone.
        """
        is_asked = was_asked_to_end(self._process.paths, self._process.board, is_leaving=kind is Closed)
        if kind is None or (kind is Closed and not is_asked) or not self._saver.all_are_at(self._step if self._is_between_steps else -1):
            return
        if is_asked:
            self._close_trained_round()
        if self._saver.saved_step != self._step:
            self._saver.start(self._content(), is_last=True)
            self._saver.finish()
        if kind is Closed:
            self._export(is_final=True)
        self._saver.try_again()

    def _close_trained_round(self) -> None:
        """One that lacks its push alone: the curves have it before the run ends, its push is the next start's first. Collective."""
        if self._metrics.has_steps and (self._step % self._config.run.sync_every_optimizer_steps == 0 or self._is_over()):
            is_due = self._is_pushing and self._is_evaluation_next()
            self._round = self._process.board.get("round") + 1  # it may have been counted: its push had begun
            self._is_evaluation_due |= is_due or self._is_evaluation_next()
            self._close_round()

    def _resume(self) -> None:
        """Be as the rank that saved the state was, where this start goes on from one."""
        if (saved := self._start.saved) is None:
            return
        progress = Progress(**saved.content["trainer"])
        load_tensors(self._model, self._stepper.optimizer, saved.folder, self._saver.group)
        fields = [rank_fields(saved.rank_file(rank)) for rank in range(saved.num_ranks)]
        self._step, self._round = progress.step, progress.round
        self._saver.goes_on_from(progress.step, is_own=saved.folder.parent == self._process.paths.resume)
        self._stepper.num_bad_in_a_row = progress.num_bad_in_a_row
        self._is_evaluation_due = progress.is_evaluating
        is_last = self._ranks.rank == self._ranks.size - 1
        own = fields[self._ranks.rank :] if is_last else fields[self._ranks.rank : self._ranks.rank + 1]
        self._metrics.restore([f["round"] for f in own], all_tokens=progress.all_tokens, all_samples=progress.all_samples)
        if saved.num_ranks == self._ranks.size:
            set_random_state(own[0]["random"], self._ranks.device)
            self._next = self._replay.restore(own[0]["replay"], has_started=self._step > 0)
        if self._ranks.rank == 0:
            self._process.board.set("optimizer_step", self._step)
            self._process.board.set("round", self._round)
        _log.info("goes on from %s: optimizer step %d, round %d", saved.folder, self._step, self._round)

    def _save(self, *, is_last: bool = False) -> None:
        """Copy the state and write it in the background; not twice at the same step, not while the last one is being written."""
        if self._ranks.maxima([self._saver.is_busy])[0]:
            _log.warning("no state is saved at step %d: the one before is still being written", self._step)
        elif self._saver.saved_step != self._step:
            with self._timer.phase("save"):
                self._saver.start(self._content(), is_last=is_last)

    def _content(self) -> Content:
        """Not collective: of this rank, between two steps."""
        is_asked = self._num_evals > self._process.board.get("eval_done")
        is_evaluating = is_asked or self._is_evaluation_due or (self._is_pushing and self._is_evaluation_next())
        progress = Progress(
            step=self._step,
            round=self._round,
            version=self._version,
            num_bad_in_a_row=self._stepper.num_bad_in_a_row,
            all_tokens=self._metrics.all_tokens,
            all_samples=self._metrics.all_samples,
            is_evaluating=is_evaluating,
        )
        fields = {
            "random": random_state(self._ranks.device),
            "replay": self._replay.state(self._next),
            "round": self._metrics.state(),
        }
        tensors = copied(tensors_of(self._model, self._stepper.optimizer), self._saver.mesh)
        return Content(progress, tensors, self._replay.cut(), fields, strikes=noted_strikes(self._process.paths.strikes))

    def _judge_best(self) -> None:
        """Collective."""
        if self._best is not None:
            self._best.judge(int(self._ranks.maxima([self._process.board.get("eval_done")])[0]))

    def _is_over(self) -> bool:
        rounds = self._config.run.max_sync_rounds
        return self._step >= self._config.optimizer.max_steps or (rounds is not None and self._round >= rounds)

    def _run_round(self) -> None:
        every = self._config.run.sync_every_optimizer_steps
        for _ in range(min(every - self._step % every, self._config.optimizer.max_steps - self._step)):
            self._run_step()
        if self._round == 0:
            self._wait_for_evaluation()  # the one before training: of the weights that training starts from
        self._finish_push()  # of the round before
        self._round += 1
        self._start_push()
        if self._config.run.synchronous:
            self._finish_push()
        self._close_round()
        if self._is_due(self._config.metrics.checkpoint_every_sync_rounds):
            self._export()
        if self._is_due(self._config.metrics.resume_every_rounds) and not self._is_over():
            self._save()

    def _run_step(self) -> None:
        """One optimizer step: fetch, agree, train.

        A push that is on its way goes on meanwhile, unless its weights are to be verified or evaluated: then they stay as they are.
        """
        self._process.health.tick()
        self._has_samples()  # beside the push's sending
        if self._sync.is_to_be_verified or self._is_evaluation_next():
            self._finish_push()
        with self._timer.phase("wait"):
            totals = self._wait_for_samples()
        taken, self._next = self._next, None
        assert taken is not None
        self._is_between_steps = False
        self._replay.commit(taken, self._trained_version)
        if self._recorder:
            self._recorder.add(self._step, RecordedStep(taken.micro_batches, self._on_policy_version()))
        result = self._stepper.run(taken.micro_batches, totals, step=self._step, version=self._on_policy_version())
        self._timer.add("compute", result.compute_seconds)
        self._timer.add("update", result.update_seconds)
        self._metrics.add_step(result, taken.samples, choose_seconds=taken.choose_seconds)
        self._step += 1
        self._is_between_steps = True
        if self._ranks.rank == 0:
            self._process.board.set("optimizer_step", self._step)
        self._stepper.check_bad_steps()  # only now: the last state is saved at a step's end

    def _wait_for_samples(self) -> LocalTotals:
        """The step's totals over all ranks, once each rank has its samples. The one place where a rank starves."""
        replay = self._config.replay
        numbers = self._wait_until(
            self._has_samples,
            what=f"ring/{self._ranks.rank} to hold the samples of an optimizer step",
            timeout_s=replay.replay_sample_timeout_seconds,
            flag=_REPLAY_FLAG,
            sleep=self._replay.sleep,
            share=lambda: (LocalTotals.of(self._next.samples) if self._next else LocalTotals()).numbers(),
        )
        return LocalTotals(*numbers)

    def _wait_until(self, is_ready: Callable[[], bool], **options: Any) -> list[float]:
        """`Ranks.wait_until` for what vLLM must generate for: where it was started again meanwhile, it gets weights first.

        waits for      `is_ready` on all ranks, from the start again after such a push
        """
        while (numbers := self._ranks.wait_until(is_ready, gives_way=self._wants_all, **options)) is None:
            if self._is_pushing:
                self._finish_push()
            else:
                self._push_again()
        return numbers

    def _wants_all(self) -> bool:
        """Rank 0, not collective: all ranks have something to do for vLLM."""
        return self._sync.has_ended() if self._is_pushing else self._sync.has_new_replica()

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
        self._version += 1
        if self._ranks.rank == 0:
            announce(self._process.paths.resume, self._version)
            self._process.board.set("next_version", self._version + 1)
        self._round_began = self._step, int(self._ranks.sums([self._replay.num_used])[0])
        with self._timer.phase("push"):
            self._sync.start_push(self._version, trainable_only=self._has_pushed)
        self._has_pushed = self._is_pushing = True

    def _announce(self, version: int) -> None:
        """Rank 0, not collective, on any thread: all of vLLM uses these weights. Where their round began goes first."""
        for word, value in zip(("round_step", "round_used"), self._round_began, strict=True):
            self._process.board.set(word, value)
        self._process.board.set("policy_version", version)

    def _finish_push(self) -> None:
        """Wait until vLLM uses the weights that are on their way, if any, and tell the run so."""
        if not self._is_pushing:
            return
        with self._timer.phase("push"):
            report = self._sync.finish_push()
        is_evaluation_next, self._is_pushing = self._is_evaluation_next(), False
        if self._ranks.rank == 0:
            self._announce(self._version)
            self._sender.values(push_values(report))
        if is_evaluation_next:
            self._ask_evaluation()

    def _is_evaluation_next(self) -> bool:
        """Of the push that ends a round: `--eval-every-rounds`."""
        return self._round > self._first_round and self._is_due(self._config.metrics.eval_every_rounds) and not self._is_over()

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
        self._is_evaluation_due = False
        if not self._config.metrics.eval_game_dir:
            return
        self._judge_best()
        self._num_evals += 1
        if self._best is not None and self._best.takes(self._num_evals):
            self._export_to(self._best.candidate)
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
        counts = self._replay.take_counts()
        self._metrics.add_replay(counts)
        self._sender.numbers({"Replay/PolicyLagOldest": counts.lags_oldest})
        values = self._metrics.close_round()
        self._sender.values({f"Time/trainer/{phase}": times for phase, times in self._timer.take().items()})
        self._judge_best()
        if self._start.num_restarts:
            values["Run/TrainerRestarts"] = (self._start.num_restarts, 1, self._start.num_restarts)
        if self._ranks.rank == 0:
            self._process.board.set("round", self._round)
            self._sender.round({"step": self._step, "version": self._version, "round": self._round, "values": values})

    def _export(self, *, is_final: bool = False) -> None:
        """HuggingFace format, with --save-checkpoint; not twice at the same step."""
        if not self._config.metrics.save_checkpoint or self._last_export == self._step:
            return
        self._last_export = self._step
        self._export_to(export_folder(self._config, self._step, is_final=is_final))

    def _export_to(self, folder: Path) -> None:
        state = trainer_state(self._config, optimizer_step=self._step, round_number=self._round, policy_version=self._version)
        with self._timer.phase("export"):
            export(self._model, folder, self._config, dtype=self._dtype, rank=self._ranks.rank, state=state)
