"""Trainer ranks' side of a push: gather on every rank's main thread, send and swap on threads of rank 0 while all else goes on.

All ranks make the same calls in the same order. Only rank 0 talks to inference; after each stage it tells the others how it
went, so that all raise or none. A push that breaks because an inference process died begins again on all ranks, under the same
version: with a new group, and with all weights for all processes.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from accerl_mp.models.names import manifest
from accerl_mp.models.units import Whole, iter_units
from accerl_mp.transport.errors import Closed, DeadlineExpired
from accerl_mp.transport.process import Process
from accerl_mp.weight_sync.aside import Aside
from accerl_mp.weight_sync.buckets import BucketSender, make_buffers
from accerl_mp.weight_sync.group import GroupAddress, WeightGroup, backend_of, join_group, open_store
from accerl_mp.weight_sync.layout import Manifest, Runs, Slot, checksum, find_runs, iter_messages, plan_layout, slots_of
from accerl_mp.weight_sync.patience import Patience
from accerl_mp.weight_sync.protocol import READY, RECEIVED, GroupBroken, SyncError, WrongWeights
from accerl_mp.weight_sync.replicas import Replicas
from accerl_mp.weight_sync.report import PushReport, describe
from accerl_mp.weight_sync.truth import PROBE_BOUNDS, compare_logprobs, compare_sums, probe_ids
from accerl_mp.weight_sync.verdict import AGAIN, CLOSED, DONE, DONE_ANEW, FAILED, WRONG, hear

_CLOSE_S = 5.0
_FLAG, _START_FLAG = "--sync-timeout-s", "--inference-start-timeout-s"
_LIBRARY_SHARE = 1.5
"""The group's own timeout over ours: our deadline speaks first, and names who waited for whom."""
_FOLLOW_S = 5.0
"""Rank 0's error is the one that knows: the others, which say the same, come this much later at most."""

_log = logging.getLogger(__name__)


class WeightSync:
    """connect, then start_push and finish_push in turn, then close.

    waits for      named waits, all bounded: `--inference-start-timeout-s` in connect, `--sync-timeout-s` in each stage of a push
    a dead peer    begins the push again once the peer has been started again, for `--inference-start-timeout-s` and
                   `--sync-timeout-s` from the first sign of it; PeerLost once the supervisor gives the peer up
    other errors   wrong weights, a peer that lives but does not answer, a group that breaks time and again: SyncError or
                   DeadlineExpired on rank 0, SyncError on the others
    """

    def __init__(
        self,
        process: Process,
        model: torch.nn.Module,
        *,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        forced_logprobs: Callable[[list[int]], np.ndarray],
        on_use: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`on_use`: called on rank 0, on a thread, as soon as all of vLLM uses a version that is not going to be verified."""
        self._process, self._model = process, model
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._forced_logprobs, self._on_use = forced_logprobs, on_use
        self._sync, self._inference = process.config.sync, process.config.inference
        self._device = next(model.parameters()).device
        self._back_s = self._inference.inference_start_timeout_s + self._sync.sync_timeout_s
        """Of inference: from the first sign of trouble until it must take a push."""
        self._replicas = Replicas(process.paths, process.health, self._inference.infer_size or 1) if rank == 0 else None
        self._patience = Patience(self._replicas, process.health, limit_s=self._back_s) if self._replicas is not None else None
        self._group: WeightGroup | None = None
        self._sessions: list[str] = []
        self._manifest: Manifest = []
        self._slots: list[Slot] = []
        self._buffers: list[torch.Tensor] = []
        self._buckets: BucketSender | None = None
        self._swapping: Aside | None = None
        self._num_pushes = 0  # since the group was formed
        self._version, self._started, self._num_bytes = -1, 0.0, 0
        self._next_slots: Iterator[Slot] = iter(())  # of the push that is being gathered
        self._sums: dict[str, str] = {}
        self._report = PushReport(version=-1)

    def connect(self) -> None:
        """Wait for every inference process to be ready and form the weight group. Rank 0 works, the others wait for it."""
        while not self._together("form the weight group", self._connect, is_start=True):
            pass

    def has_new_replica(self) -> bool:
        """An inference process is another one than the group was formed with, and all are up: it holds requests until a push.

        Rank 0 alone, not collective, waits for nothing; False on other ranks. While a process is still starting the others' samples
        can be trained on, so that counts for nothing here.
        """
        return self._replicas is not None and bool(self._replicas.lost()) and self._replicas.are_running()

    def start_push(self, version: int, *, trainable_only: bool) -> None:
        """Gather all weights and hand them to the threads that send and swap; vLLM generates on. Returns when the gathering is done.

        The first push after `connect` sends everything, and so does one that finds inference started anew.
        """
        self._started, self._version = time.monotonic(), version
        self._gather(trainable_only)

    @property
    def is_to_be_verified(self) -> bool:
        """The push that is under way: vLLM is compared with the model in `finish_push`, so the model must not change before that."""
        return self._verifies()

    def has_ended(self) -> bool:
        """Whether `finish_push` of the push that is under way has nothing to wait for. Rank 0 alone; False on other ranks."""
        return self._swapping is not None and not self._swapping.is_alive

    def finish_push(self) -> PushReport:
        """Wait until the weights are in use everywhere, and verify them if it is time to.

        A push that broke is gathered again, from the model as it is now: of optimizer steps since `start_push` some tokens of this
        version are sampled with newer weights then (their logprobs come with them, as always).
        """
        while not self._finish():
            self._gather(trainable_only=False)
        if self._patience is not None:
            self._patience.reset()
        self._report = dataclasses.replace(self._report, version=self._version, verified=self._verifies())
        if self._rank == 0:
            _log.info(describe(self._report))
        self._num_pushes += 1
        self._swapping = None
        return self._report

    def close(self) -> None:
        """Leave the group and the control channel.

        waits for      a push that is under way to notice that the run ends, some milliseconds, at most 5 s. Then its sockets are
                       left to it: a socket that is closed while another thread uses it brings the process down
        """
        self._leave()
        if self._swapping is not None:
            self._swapping.join(_CLOSE_S)
            if self._swapping.is_alive:
                _log.warning("push %d has not noticed within %.0f s that the run ends: it ends with the process", self._version, _CLOSE_S)
                return
        if self._replicas is not None:
            self._replicas.close()

    def _gather(self, trainable_only: bool) -> None:
        while not self._together(f"begin push {self._version}", lambda: self._begin(trainable_only), is_start=True):
            pass
        begun = time.monotonic()
        for unit in iter_units(self._model, trainable_only=trainable_only and self._num_pushes > 0, dtype=self._dtype):
            if self._buckets is not None:
                self._put(unit)
        if self._buckets is not None:
            self._buckets.finish()
            self._begin_s, self._gather_s = begun - self._started, time.monotonic() - begun
            self._swapping = Aside(self._swap, "weights-swap")

    def _finish(self) -> bool:
        """False, on all ranks: the push broke in one of its last stages."""
        return (
            self._together(f"finish push {self._version}", self._await_swap)
            and (not self._verifies() or self._probe())
            and (self._num_pushes > 0 or self._together("open requests", self._open))
        )

    def _connect(self) -> int:
        timeout_s = min(self._inference.inference_start_timeout_s, max(self._patience.remaining_s, 1.0))
        self._join(self._replicas.call("status", timeout_s=timeout_s, flag=_START_FLAG, again=True))
        return DONE

    def _leave(self) -> None:
        """abort() may block with a peer that is stuck, so it gets a thread. Waits for nothing."""
        if self._group is not None:
            threading.Thread(target=self._group.abort, name="weights-abort", daemon=True).start()
            self._group = None

    def _join(self, statuses: list[dict[str, Any]]) -> None:
        """A new group: rank 0 here, then the workers of each replica in order."""
        if self._group is not None:
            self._leave()
            self._replicas.tell("abort")  # workers that live on are still in it
        self._replicas.pids = [status["pid"] for status in statuses]
        counts = [status["num_workers"] for status in statuses]
        first_ranks = [1 + sum(counts[:index]) for index in range(len(counts))]
        timeout_s, world_size = self._sync.sync_timeout_s, 1 + sum(counts)
        store, port = open_store(world_size, timeout_s)
        backend = backend_of(self._device, self._process.config.run.placement)
        address = GroupAddress(backend=backend, port=port, world_size=world_size, timeout_s=_LIBRARY_SHARE * timeout_s)
        calls = [{"address": dataclasses.asdict(address), "first_rank": first_rank} for first_rank in first_ranks]
        self._replicas.call("connect", calls, timeout_s=timeout_s, flag=_FLAG)
        joining = Aside(lambda: join_group(address, 0, self._device, store), "weights-join")
        self._replicas.call_until(
            lambda answer: answer["state"] == READY, "poll", what="inference to join the weight group", timeout_s=timeout_s, flag=_FLAG
        )
        with self._process.health.waiting("the weight group to form", timeout_s, _FLAG, peer="inference") as wait:
            while joining.is_alive:
                wait.check()
                self._replicas.check()
                time.sleep(0.005)
        try:
            self._group = joining.result()
        except RuntimeError as error:  # torch.distributed's
            raise GroupBroken(f"the weight group could not be formed: {error}") from error
        self._lay_out()
        self._sessions = [status["session"] for status in statuses]
        self._num_pushes = 0
        _log.info("weight group of %d: %s over %s", world_size, ", ".join(self._replicas.names), backend)

    def _lay_out(self) -> None:
        """Both ends agree on where each tensor lies, and make room."""
        self._manifest = manifest(self._model, trainable_only=False, dtype=self._dtype)
        self._slots, num_bytes = plan_layout(self._manifest)
        bucket_bytes = self._sync.sync_bucket_mb << 20
        fields = {"manifest": self._manifest, "bucket_bytes": bucket_bytes}
        self._replicas.call("layout", fields, timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
        if not self._buffers:
            self._buffers = make_buffers(min(bucket_bytes, num_bytes), self._device)

    def _begin(self, trainable_only: bool) -> int:
        verdict = DONE
        timeout_s = self._sync.sync_timeout_s
        if not self._sessions or self._replicas.lost():
            timeout_s = max(self._patience.remaining_s, 1.0)
            statuses = self._replicas.call("status", timeout_s=timeout_s, flag=_START_FLAG, again=True)
            if [status["session"] for status in statuses] != self._sessions:
                _log.warning("push %d: a new weight group, and all weights again", self._version)
                self._join(statuses)
                verdict = DONE_ANEW
        runs = self._runs(trainable_only and self._num_pushes > 0)
        slots = slots_of(self._slots, runs)
        self._num_bytes = sum(slot.size_bytes for slot in slots)
        fields = {"version": self._version, "runs": runs, "with_sums": self._verifies()}
        self._replicas.call("begin", fields, timeout_s=timeout_s, flag=_FLAG)
        self._next_slots, self._sums = iter(slots), {}
        messages = iter_messages(self._slots, runs, self._sync.sync_bucket_mb << 20)
        self._buckets = BucketSender(self._group, messages, self._buffers, health=self._process.health, timeout_s=timeout_s)
        return verdict

    def _runs(self, trainable_only: bool) -> Runs:
        if not trainable_only:
            return [(0, len(self._manifest))]
        index_of = {name: index for index, (name, _, _) in enumerate(self._manifest)}
        chosen = manifest(self._model, trainable_only=True, dtype=self._dtype)
        return find_runs(index_of[name] for name, _, _ in chosen)

    def _put(self, unit: list[Whole]) -> None:
        for whole in unit:
            slot = next(self._next_slots)
            if (whole.name, whole.shape, whole.dtype) != (slot.name, slot.shape, slot.dtype):
                raise SyncError(f"push {self._version}: gathered {whole.name} {whole.shape} {whole.dtype}, the manifest says {slot}")
            if self._verifies():
                self._sums[whole.name] = checksum(whole.tensor())
            self._buckets.put(whole.pieces, whole.dtype)
        self._buckets.flush()

    def _await_swap(self) -> int:
        """Wait for `_swap`, which runs aside. Its own waits have the deadlines."""
        with self._process.health.waiting(f"push {self._version} to end", 0, peer="inference") as wait:
            while self._swapping.is_alive:
                wait.check()
                time.sleep(0.002)
        self._swapping.result()
        return DONE

    def _swap(self) -> None:
        """Wait for the bytes to be there, compare them, swap. On a thread: meanwhile nobody else calls the replicas."""
        timeout_s = self._sync.sync_timeout_s
        try:
            with self._process.health.waiting("inference to receive a push", timeout_s, _FLAG, peer="inference") as wait:
                while not self._buckets.is_done:
                    if self._buckets.error is not None:
                        raise self._buckets.error
                    wait.check()
                    self._replicas.check()
                    time.sleep(0.002)
            self._replicas.call_until(
                lambda answer: answer["state"] == RECEIVED, "poll", what="inference to receive a push", timeout_s=timeout_s, flag=_FLAG
            )
            if self._verifies():
                compare_sums(self._version, self._sums, self._replicas.call("checksums", timeout_s=timeout_s, flag=_FLAG))
            answers = self._replicas.call("swap", {"version": self._version}, timeout_s=timeout_s, flag=_FLAG)
        except (SyncError, DeadlineExpired):
            self._buckets.give_up()
            self._buffers = []  # the thread may still read from them
            self._replicas.tell("abort")
            raise
        slowest = {name: max(answer[name] for answer in answers) for name in ("standstill_s", "pause_s", "load_s", "resume_s", "swap_s")}
        self._report = PushReport(
            version=self._version,
            seconds=time.monotonic() - self._started,
            num_bytes=self._num_bytes,
            begin_s=self._begin_s,
            gather_s=self._gather_s,
            send_s=self._buckets.busy_s,
            path=answers[0]["path"],
            **slowest,
        )
        if not self._verifies():
            self._on_use(self._version)

    def _probe(self) -> bool:
        """Forced logprobs of the same tokens on both sides: what vLLM computes with is what trains."""
        ids = probe_ids(self._version, self._model.config.vocab_size, self._inference.vllm_max_model_len)
        expected = np.asarray(self._forced_logprobs(ids), np.float64)

        def compare() -> int:
            answers = self._replicas.call("probe", {"ids": ids}, timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
            compare_logprobs(self._version, expected, answers, PROBE_BOUNDS[self._dtype])
            return DONE

        return self._together(f"verify push {self._version}", compare)

    def _open(self) -> int:
        self._replicas.call("open", timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
        return DONE

    def _verifies(self) -> bool:
        every = self._sync.verify_sync
        return every > 0 and self._num_pushes % every == 0

    def _together(self, what: str, work: Callable[[], int], *, is_start: bool = False) -> bool:
        """Rank 0 does `work` and tells the others how it went: all return (False: the push broke and begins again) or all raise.

        waits for      on other ranks: rank 0, longer than rank 0 may take itself; `is_start`: inference may have to start first
        at the end     all raise Closed here, so that what they do next they still do together
        """
        verdict, error = self._attempt(work) if self._rank == 0 else (FAILED, None)
        reason = (str(error) or type(error).__name__) if error is not None else ""
        if self._world_size > 1:
            limit_s = 5 * self._sync.sync_timeout_s + (self._back_s if is_start else 0.0)
            flag = _START_FLAG if is_start else _FLAG
            try:
                verdict, reason = hear(self._process.health, verdict, reason, f"trainer/0 to {what}", limit_s, flag)
            except (RuntimeError, DeadlineExpired, Closed):  # a rank is gone, most of all
                if error is None:  # else: wrong weights stay wrong weights, whoever died meanwhile
                    raise
        if error is not None:
            raise error
        if verdict == CLOSED:
            raise Closed("trainer/0 was asked to stop in a push")
        if verdict in (FAILED, WRONG):
            self._let_rank_0_speak()
            raise (WrongWeights if verdict == WRONG else SyncError)(f"trainer/0 could not {what}: {reason}")
        if verdict == DONE_ANEW:
            self._num_pushes = 0
        return verdict != AGAIN

    def _attempt(self, work: Callable[[], int]) -> tuple[int, Exception | None]:
        """(verdict, what rank 0 itself is to raise)."""
        try:
            try:
                return work(), None
            except (SyncError, DeadlineExpired) as failure:
                return self._judge(failure)
        except Closed as end:
            return CLOSED, end

    def _judge(self, failure: Exception) -> tuple[int, Exception | None]:
        """(AGAIN, None) if a new group may mend it; then the next `_begin` forms one. May wait some seconds (`Patience.allows`)."""
        if not self._patience.allows(failure):
            return WRONG if isinstance(failure, WrongWeights) else FAILED, failure
        _log.warning("push %d broke and begins again: %s", self._version, failure)
        self._replicas.reconnect()
        self._sessions = []
        return AGAIN, None

    def _let_rank_0_speak(self) -> None:
        """waits for: rank 0 to have left the reason of its end in the health table, at most 5 s."""
        table, deadline = self._process.health.table, time.monotonic() + _FOLLOW_S
        with self._process.health.waiting("trainer/0 to say why the run ends", 2 * _FOLLOW_S):
            while table.read(table.row_of("trainer/0")).state not in ("failed", "ended") and time.monotonic() < deadline:
                time.sleep(0.02)
