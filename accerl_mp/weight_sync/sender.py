"""Trainer ranks' side of a push: gather on every rank's main thread, send from rank 0 while vLLM generates, swap, verify.

All ranks make the same calls in the same order. Only rank 0 talks to inference; after each stage it tells the others how it
went, so that all raise or none. A push that breaks because an inference process died begins again on all ranks, under the same
version: with a new group, and with all weights for all processes.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from accerl_mp.models.names import iter_weights, manifest
from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.process import Process
from accerl_mp.weight_sync.group import GroupAddress, WeightGroup, join_group, open_store
from accerl_mp.weight_sync.layout import Slot, checksum, plan_layout
from accerl_mp.weight_sync.outbox import Outbox
from accerl_mp.weight_sync.patience import Patience
from accerl_mp.weight_sync.protocol import READY, RECEIVED, GroupBroken, SyncError, WrongWeights
from accerl_mp.weight_sync.replicas import Replicas

PROBE_TOKENS = 64
PROBE_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean |logprob difference| between trainer and vLLM over the probe: kernels alone stay far below, wrong weights give nats."""

_FLAG, _START_FLAG = "--sync-timeout-s", "--inference-start-timeout-s"
_LIBRARY_SHARE = 1.5
"""The group's own timeout over ours: our deadline speaks first, and names who waited for whom."""
_FAILED, _DONE, _DONE_ANEW, _AGAIN = 0, 1, 2, 3
"""What rank 0 tells the others. _DONE_ANEW: there is a new group, which needs all weights. _AGAIN: the push broke and begins again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Of one finished push, as rank 0 saw it (other ranks know version and verified)."""

    version: int
    seconds: float = 0.0
    """From start_push to the swap everywhere."""
    standstill_s: float = 0.0
    """Pause to resume, of the slowest inference process."""
    num_bytes: int = 0
    verified: bool = False


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
    ) -> None:
        self._process, self._model = process, model
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._forced_logprobs = forced_logprobs
        self._sync, self._inference = process.config.sync, process.config.inference
        self._device = next(model.parameters()).device
        self._back_s = self._inference.inference_start_timeout_s + self._sync.sync_timeout_s
        """Of inference: from the first sign of trouble until it must take a push."""
        self._replicas = Replicas(process.paths, process.health, self._inference.infer_size or 1) if rank == 0 else None
        self._patience = Patience(self._replicas, process.health, limit_s=self._back_s) if self._replicas is not None else None
        self._group: WeightGroup | None = None
        self._sessions: list[str] = []
        self._outbox: Outbox | None = None
        self._num_pushes = 0  # since the group was formed
        self._version, self._started, self._num_bytes = -1, 0.0, 0
        self._slots: Iterator[Slot] = iter(())  # of the push that is being gathered
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
        """Gather all weights and hand them to the sending thread; vLLM generates on. Returns when the gathering is done.

        The first push after `connect` sends everything, and so does one that finds inference started anew. What trains must be
        whole modules of vLLM: q, k and v are one there, and half of a fused weight leaves the rest undefined (the probe sees it).
        """
        self._started, self._version = time.monotonic(), version
        self._gather(trainable_only)

    def finish_push(self) -> PushReport:
        """Wait until the weights are in use everywhere, and verify them if it is time to.

        The model must be as it was in `start_push`: a push that broke is gathered again from it.
        """
        while not self._finish():
            self._gather(trainable_only=False)
        if self._patience is not None:
            self._patience.reset()
        self._report = dataclasses.replace(self._report, version=self._version, verified=self._verifies())
        self._num_pushes += 1
        return self._report

    def close(self) -> None:
        """Leave the group and the control channel. Waits for nothing."""
        self._leave()
        if self._replicas is not None:
            self._replicas.close()

    def _gather(self, trainable_only: bool) -> None:
        while not self._together(f"begin push {self._version}", lambda: self._begin(trainable_only), is_start=True):
            pass
        for name, tensor in iter_weights(self._model, trainable_only=trainable_only and self._num_pushes > 0, dtype=self._dtype):
            if self._outbox is not None:
                self._put(name, tensor)
        if self._outbox is not None:
            self._outbox.finish()

    def _finish(self) -> bool:
        """False, on all ranks: the push broke in one of its last stages."""
        return (
            self._together(f"finish push {self._version}", self._swap)
            and (not self._verifies() or self._probe())
            and self._together(f"open requests after push {self._version}", self._open)
        )

    def _connect(self) -> int:
        timeout_s = min(self._inference.inference_start_timeout_s, max(self._patience.remaining_s, 1.0))
        self._join(self._replicas.call("status", timeout_s=timeout_s, flag=_START_FLAG, again=True))
        return _DONE

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
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        address = GroupAddress(backend=backend, port=port, world_size=world_size, timeout_s=_LIBRARY_SHARE * timeout_s)
        calls = [{"address": dataclasses.asdict(address), "first_rank": first_rank} for first_rank in first_ranks]
        self._replicas.call("connect", calls, timeout_s=timeout_s, flag=_FLAG)
        joining = _Joining(address, self._device, store)
        self._replicas.call_until(
            lambda answer: answer["state"] == READY, "poll", what="inference to join the weight group", timeout_s=timeout_s, flag=_FLAG
        )
        with self._process.health.waiting("the weight group to form", timeout_s, _FLAG, peer="inference") as wait:
            while (group := joining.result()) is None:
                wait.check()
                self._replicas.check()
                time.sleep(0.005)
        self._group = group
        self._sessions = [status["session"] for status in statuses]
        self._num_pushes = 0
        _log.info("weight group of %d: %s over %s", world_size, ", ".join(self._replicas.names), backend)

    def _begin(self, trainable_only: bool) -> int:
        verdict = _DONE
        is_up = self._sessions and not self._replicas.lost()
        timeout_s, flag = (self._sync.sync_timeout_s, _FLAG) if is_up else (max(self._patience.remaining_s, 1.0), _START_FLAG)
        statuses = self._replicas.call("status", timeout_s=timeout_s, flag=flag, again=True)
        if [status["session"] for status in statuses] != self._sessions:
            _log.warning("push %d: a new weight group, and all weights again", self._version)
            self._join(statuses)
            verdict = _DONE_ANEW
        entries = manifest(self._model, trainable_only=trainable_only and self._num_pushes > 0, dtype=self._dtype)
        slots, self._num_bytes = plan_layout(entries)
        bucket_bytes = self._sync.sync_bucket_mb << 20
        fields = {"version": self._version, "manifest": entries, "bucket_bytes": bucket_bytes}
        self._replicas.call("begin", fields, timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
        self._slots = iter(slots)
        self._sums = {}
        self._outbox = Outbox(
            self._group,
            self._num_bytes,
            bucket_bytes=bucket_bytes,
            device=self._device,
            health=self._process.health,
            timeout_s=self._sync.sync_timeout_s,
        )
        return verdict

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        slot = next(self._slots)
        if (name, tuple(tensor.shape), tensor.dtype) != (slot.name, slot.shape, slot.dtype):
            raise SyncError(f"push {self._version}: gathered {name} {tuple(tensor.shape)} {tensor.dtype}, the manifest says {slot}")
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        if self._verifies():
            self._sums[name] = checksum(data)
        self._outbox.put(data)

    def _swap(self) -> int:
        """Wait for the bytes to be there, compare them, swap."""
        timeout_s = self._sync.sync_timeout_s
        try:
            with self._process.health.waiting("inference to receive a push", timeout_s, _FLAG, peer="inference") as wait:
                while not self._outbox.is_done:
                    if self._outbox.error is not None:
                        raise self._outbox.error
                    wait.check()
                    self._replicas.check()
                    time.sleep(0.002)
            self._replicas.call_until(
                lambda answer: answer["state"] == RECEIVED, "poll", what="inference to receive a push", timeout_s=timeout_s, flag=_FLAG
            )
            if self._verifies():
                self._compare_sums(self._replicas.call("checksums", timeout_s=timeout_s, flag=_FLAG))
            answers = self._replicas.call("swap", {"version": self._version}, timeout_s=timeout_s, flag=_FLAG)
        except (SyncError, DeadlineExpired):
            self._outbox.give_up()
            self._replicas.tell("abort")
            raise
        self._report = PushReport(
            version=self._version,
            seconds=time.monotonic() - self._started,
            standstill_s=max(answer["standstill_s"] for answer in answers),
            num_bytes=self._num_bytes,
        )
        self._outbox = None
        return _DONE

    def _compare_sums(self, answers: list[dict[str, Any]]) -> None:
        for replica, answer in zip(self._replicas.names, answers, strict=True):
            for worker, arrived in enumerate(answer["checksums"]):
                wrong = [name for name, expected in self._sums.items() if arrived.get(name) != expected]
                if wrong or len(arrived) != len(self._sums):
                    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                    what = f"tensor {wrong[0]}{more} arrived damaged" if wrong else "there are tensors that were not sent"
                    where = f"push {self._version} at {replica}, worker {worker}"
                    raise WrongWeights(f"{where}: {what} (checksums differ); nothing was loaded")

    def _probe(self) -> bool:
        """Forced logprobs of the same tokens on both sides: what vLLM computes with is what trains."""
        ids = self._probe_ids()
        expected = np.asarray(self._forced_logprobs(ids), np.float64)
        return self._together(f"verify push {self._version}", lambda: self._compare_logprobs(ids, expected))

    def _probe_ids(self) -> list[int]:
        """Tokens from the whole vocabulary, the same on every rank."""
        length = min(PROBE_TOKENS, (self._inference.vllm_max_model_len or PROBE_TOKENS + 1) - 1)
        vocabulary = self._model.config.vocab_size
        return np.random.default_rng(self._version).integers(0, vocabulary, length).tolist()

    def _compare_logprobs(self, ids: list[int], expected: np.ndarray) -> int:
        bound = PROBE_BOUNDS[self._dtype]
        answers = self._replicas.call("probe", {"ids": ids}, timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
        for replica, answer in zip(self._replicas.names, answers, strict=True):
            distance = np.abs(np.array(answer["logprobs"]) - expected)
            if not distance.mean() <= bound:  # NaN fails too
                raise WrongWeights(
                    f"push {self._version}: the probe of {replica} is off: logprobs of {len(ids)} tokens differ by {distance.mean():.2g}"
                    f" nats on average (at most {bound:g}), {distance.max():.2g} at worst: vLLM does not compute with the trainer's weights"
                )
            _log.info("push %d verified: %s differs by %.1g nats on average", self._version, replica, distance.mean())
        return _DONE

    def _open(self) -> int:
        if self._num_pushes == 0:
            self._replicas.call("open", timeout_s=self._sync.sync_timeout_s, flag=_FLAG)
        return _DONE

    def _verifies(self) -> bool:
        every = self._sync.verify_sync
        return every > 0 and self._num_pushes % every == 0

    def _together(self, what: str, work: Callable[[], int], *, is_start: bool = False) -> bool:
        """Rank 0 does `work` and tells the others how it went: all return (False: the push broke and begins again) or all raise.

        waits for      on other ranks: rank 0, longer than rank 0 may take itself; `is_start`: inference may have to start first
        """
        verdict, error = _FAILED, None
        if self._rank == 0:
            try:
                verdict = work()
            except (SyncError, DeadlineExpired) as failure:
                verdict, error = self._judge(failure)
        if self._world_size > 1:
            limit_s = 5 * self._sync.sync_timeout_s + (self._back_s if is_start else 0.0)
            verdict = self._tell(verdict, what, limit_s, _START_FLAG if is_start else _FLAG)
        if error is not None:
            raise error
        if verdict == _FAILED:
            raise SyncError(f"trainer/0 could not {what}; its log says why")
        if verdict == _DONE_ANEW:
            self._num_pushes = 0
        return verdict != _AGAIN

    def _judge(self, failure: Exception) -> tuple[int, Exception | None]:
        """(_AGAIN, None) if a new group may mend it; then the next `_begin` forms one. May wait some seconds (`Patience.allows`)."""
        if not self._patience.allows(failure):
            return _FAILED, failure
        _log.warning("push %d broke and begins again: %s", self._version, failure)
        self._replicas.reconnect()
        self._sessions = []
        return _AGAIN, None

    def _tell(self, verdict: int, what: str, limit_s: float, flag: str) -> int:
        """Rank 0's verdict, on every rank."""
        word = torch.tensor([verdict], device=self._device)
        work = dist.broadcast(word, src=0, async_op=True)
        with self._process.health.waiting(f"trainer/0 to {what}", limit_s, flag) as wait:
            while not work.is_completed():
                wait.check()
                time.sleep(0.001)
        work.wait()
        return int(word.item())


class _Joining:
    """Forming the group, on a thread: it blocks until every worker has come."""

    def __init__(self, address: GroupAddress, device: torch.device, store: dist.Store) -> None:
        self._group: WeightGroup | None = None
        self._error: Exception | None = None

        def join() -> None:
            try:
                self._group = join_group(address, 0, device, store)
            except RuntimeError as error:
                self._error = error

        threading.Thread(target=join, name="weights-join", daemon=True).start()

    def result(self) -> WeightGroup | None:
        """None: not yet. Raises GroupBroken if it cannot be formed."""
        if self._error is not None:
            raise GroupBroken(f"the weight group could not be formed: {self._error}")
        return self._group
