"""The event loop of a rollout process: keeps its slots busy with the episodes of the groups that ingest deals."""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from accerl_mp.rollout.client import InferenceClient, InferenceError
from accerl_mp.rollout.collect import Deal, Group, build_group, play_group
from accerl_mp.rollout.env import EnvError, EnvPool, find_env
from accerl_mp.rollout.episode import Player
from accerl_mp.rollout.guard import StepGuard, end_process
from accerl_mp.rollout.loop_timer import LoopTimer
from accerl_mp.rollout.records import group_values, transcript_as_markdown, write_transcripts
from accerl_mp.rollout.tasks import cancel, first_to_end
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat
from accerl_mp.rollout.work import WorkClient
from accerl_mp.samples import SampleError
from accerl_mp.transport.channels import MAX_UNACKED, MetricsSender
from accerl_mp.transport.process import Process

_TURN_S = 0.05
"""Longest time between two looks for new deals and finished groups, where there is no news."""
_REPORT_S = 2.0
_LOAD_S = 1800.0
"""A trainer may read its model for this long before it waits for inference."""

_log = logging.getLogger(__name__)


class Worker:
    """One rollout process. `run()` plays until the run ends (Closed)."""

    def __init__(self, process: Process) -> None:
        config, paths = process.config, process.paths
        self._process, self._config = process, config
        self._timer = LoopTimer()
        self._inference = InferenceClient(
            paths,
            process.health,
            self._timer,
            num_replicas=config.inference.infer_size,
            timeout_s=config.inference.request_timeout_s,
        )
        self._news = asyncio.Event()
        """A deal or an ack has come, or an episode has ended."""
        self._work = WorkClient(
            paths, process.health, process.index, timeout_s=config.replay.replay_sample_timeout_seconds, on_news=self._news.set
        )
        self._metrics = MetricsSender(paths, process.name)
        self._tokenizer = Tokenizer.load(paths.tokenizer)
        self._guard = StepGuard(
            config.games.env_step_timeout_s, process.health.table.clock, partial(end_process, process), process.health.note_played
        )
        self._envs = EnvPool(config.run.rollout_batch_size, find_env(config.games.env))
        self._slots = asyncio.Semaphore(config.run.rollout_batch_size)
        self._chat = ChatFormat.probe(self._tokenizer)
        self._groups: dict[asyncio.Task[None], Deal] = {}
        self._num_open = 0
        """Episodes of those groups that are played or wait for a slot."""
        self._num_resubmitted = 0

    async def run(self) -> None:
        """Runs everything until one part ends; then cancels the others."""
        self._process.health.set_state("running")
        _log.info("chat format: %s", self._chat)
        try:
            await first_to_end(self._inference.run(), self._work.run(), self._keep_busy(), self._report())
        finally:
            await cancel(list(self._groups))
            self._close()

    async def _keep_busy(self) -> None:
        """Takes groups as long as there is room for more episodes. Waits for the first push of weights before it asks."""
        await self._first_weights()
        while True:
            self._process.health.check()
            self._process.health.tick()
            self._end_groups()
            self._work.want(self._has_room)
            while deal := self._work.take_deal():
                self._start(deal)
            await self._rest()

    @property
    def _has_room(self) -> bool:
        return self._num_open < self._config.run.rollout_batch_size and self._work.num_unacked < MAX_UNACKED

    async def _first_weights(self) -> None:
        """Until then a reply's deadline must not run: an engine may take long to start, and has a limit of its own for it.

        waits for      the first push, at most half as long again as the trainer itself may take, so that the trainer speaks first
        """
        limit_s = 1.5 * (self._config.inference.inference_start_timeout_s + self._config.sync.sync_timeout_s) + _LOAD_S
        waiting = self._process.health.waiting("trainer/0 to push the first weights", limit_s, "--inference-start-timeout-s")
        with waiting as wait:  # no part of a round's time: the first one begins with these weights
            while self._process.board.get("policy_version") < 0:
                wait.check()
                await asyncio.sleep(0.1)

    async def _rest(self) -> None:
        """One turn of the loop; where nothing is played it counts as waiting for work, or for acks."""
        if self._num_open:
            await self._until_news()
            return
        waits_for = "ack" if self._work.num_unacked >= MAX_UNACKED else "work"
        with self._timer.waiting(waits_for):
            await self._until_news()

    async def _until_news(self) -> None:
        """Waits for a deal, an ack or the end of an episode, at most _TURN_S."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), _TURN_S)
        self._news.clear()

    def _start(self, deal: Deal) -> None:
        self._num_open += len(deal.episode_ids)
        self._groups[asyncio.ensure_future(self._play(deal))] = deal

    def _end_groups(self) -> None:
        """Raises what a group raised: a game that breaks is handled there, so this ends the process."""
        for task in [task for task in self._groups if task.done()]:
            del self._groups[task]
            task.result()

    async def _play(self, deal: Deal) -> None:
        """One group, from its deal to its ack's queue."""
        num_open = len(deal.episode_ids)

        def free_slot() -> None:
            nonlocal num_open
            num_open -= 1
            self._num_open -= 1
            self._news.set()

        try:
            player = self._player(partial(self._guard, group_id=deal.group_id, game_id=deal.game_id))
            episodes = await play_group(player, deal, self._slots, on_end=free_slot)
            with self._timer.phase("build"):
                group = build_group(deal, episodes, self._config, worker=self._process.index)
        except (EnvError, SampleError, InferenceError) as error:
            await self._work.fail(deal, f"{type(error).__name__}: {error}" if isinstance(error, SampleError) else str(error))
            return
        finally:
            self._num_open -= num_open
            self._news.set()
        self._record(group)
        await self._work.send(group)

    def _player(self, guard: Any) -> Player:
        return Player(
            config=self._config,
            tokenizer=self._tokenizer,
            chat=self._chat,
            envs=self._envs,
            inference=self._inference,
            timer=self._timer,
            guard=guard,
        )

    def _record(self, group: Group) -> None:
        for record in group.records:
            self._metrics.episode(record)
        if group.deal.kind == "train" and (values := group_values(group, self._config.algorithm.rl_algorithm)):
            self._metrics.values(values)
        with self._timer.phase("write"):
            folder = self._process.paths.run_dir / "episodes"
            try:
                for transcript in write_transcripts(folder, group, self._tokenizer, self._config.metrics.transcripts_every):
                    self._metrics.text(f"Episodes/{group.deal.kind}", transcript_as_markdown(transcript))
            except OSError as error:
                _log.info("no transcript of group %d: %s", group.deal.group_id, error)  # a full disk costs files, not the run

    async def _report(self) -> None:
        """Where this process's time went, every few seconds."""
        while True:
            await asyncio.sleep(_REPORT_S)
            values = {f"Time/rollout/{phase}": triple for phase, triple in self._timer.take().items()}
            if num_new := self._inference.num_resubmitted - self._num_resubmitted:
                self._num_resubmitted += num_new
                values["Rollout/ResubmittedTurns"] = (num_new, 1, num_new)
            self._metrics.values(values)

    def _close(self) -> None:
        self._guard.close()
        self._envs.close()
        self._inference.close()
        self._work.close()
        self._metrics.close()
