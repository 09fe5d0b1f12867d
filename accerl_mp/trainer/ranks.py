"""The trainer's ranks: their process group, sums over all of them, and the one way in which they wait together."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from accerl_mp.config import Config
from accerl_mp.transport.errors import Closed, DeadlineExpired, PeerLost
from accerl_mp.transport.health import Health, Wait

FIRST_SLEEP_S = 0.0005
PACE_S = 0.2
"""A rank that isn't ready says so to the others this often, so nobody is inside a collective for longer than that."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Of FSDP's collectives. Waiting for samples happens outside them; an export by rank 0 is the longest thing inside."""

_log = logging.getLogger(__name__)


def prepare_torch(config: Config) -> None:
    """Threads, seed and `--deterministic` of a rank, before anything is computed."""
    if config.run.placement == "cpu":
        torch.set_num_threads(1)  # a rank a core; vLLM has the others
    # The thread that builds packs would else keep the interpreter for 5 ms while the one that launches kernels waits for it.
    sys.setswitchinterval(0.0005)
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.run.deterministic)


def wait_for_engine(config: Config, health: Health) -> None:
    """Colocated: vLLM takes its share of the card first. Before this process has a CUDA context; without effect elsewhere.

    waits for      inference/0 to be running, at most `--inference-start-timeout-s`
    a dead peer    the supervisor starts it again meanwhile; PeerLost once it gives up
    """
    if config.run.placement != "colocated":
        return
    row, limit_s = health.table.row_of("inference/0"), config.inference.inference_start_timeout_s
    with health.waiting("inference/0 to take its memory", limit_s, "--inference-start-timeout-s", peer="inference") as wait:
        while health.table.read(row).state != "running":
            wait.check()
            time.sleep(0.05)


def limit_memory(config: Config) -> None:
    """Colocated: the trainer runs out of memory by itself before it takes what vLLM will need. Without effect elsewhere."""
    if config.run.placement == "colocated":
        torch.cuda.set_per_process_memory_fraction(1.0 - (config.inference.gpu_memory_utilization or 0.0))


class Ranks:
    """This process as one of the trainer's ranks. Numbers travel over gloo on the CPU, so a GPU never waits for them."""

    def __init__(self, rank: int, size: int, device: torch.device, health: Health) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._health = health
        self._num_collectives = 0

    @classmethod
    def join(cls, *, rank: int, size: int, on_gpu: bool, health: Health) -> "Ranks":
        """Form the process group out of torchrun's environment; one rank needs none (a debugger starts it by hand).

        waits for      all ranks, at most COLLECTIVE_TIMEOUT; a rank that dies takes the whole run down (torchrun)
        """
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        single = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
        with health.waiting(f"all {size} trainer ranks to join", timeout_s=0):
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if on_gpu else None, **single)
        if dist.get_world_size() != size:
            raise ValueError(f"torchrun started {dist.get_world_size()} trainer ranks, --fsdp-world-size is {size}")
        return cls(dist.get_rank(), size, device, health)

    def num_collectives(self) -> int:
        """How many collectives this rank has begun on the group of all ranks, over gloo and NCCL. Any thread may ask; waits for nothing.

        Ranks make the same calls in the same order: the one whose number is smaller has not come to the call in which the others wait.
        """
        group = dist.group.WORLD
        if group is not None:
            # A backend that is about to leave, or one that does not count: the number it had. The heartbeat asks, and must go on.
            with suppress(RuntimeError, AttributeError):
                backends = [group._get_backend(kind) for kind in group._device_types]
                self._num_collectives = sum(backend._get_sequence_number_for_group() for backend in backends)
        return self._num_collectives

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def sums(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks, float64. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima over all ranks. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait_until(
        self,
        is_ready: Callable[[], bool],
        *,
        what: str,
        timeout_s: float,
        flag: str,
        sleep: Callable[[float], None] = time.sleep,
        share: Callable[[], Sequence[float]] = tuple,
        gives_way: Callable[[], bool] = bool,
    ) -> list[float] | None:
        """Wait until `is_ready()` holds on every rank; returns the sums over ranks of what `share()` (always as many numbers) gives then.

        waits for      each rank's own condition, polled outside of any collective; a rank that isn't ready says so every PACE_S.
                       In between it is in `sleep`, which may return early where the condition may have changed
        unblocked by   the last rank that becomes ready; or `gives_way()` on any rank: all return None, for something collective
                       that is to be done first
        at the end     all ranks raise Closed at this same place, whichever was asked to stop; at a deadline likewise DeadlineExpired
        a dead peer    PeerLost (a process of the run has failed), or gloo's error if a rank died
        """
        with self._health.waiting(what, timeout_s=timeout_s, flag=flag) as wait:
            while True:
                is_stopping, ready, expired = self._poll(is_ready, wait, sleep)
                flags = [is_stopping, ready, gives_way(), expired is not None]
                num_stopping, num_ready, num_leaving, num_expired, *totals = self.sums([*flags, *share()])
                if num_expired:  # together, so that what follows can be done together: the last state
                    raise expired or DeadlineExpired(self._health.name, "another rank, whose own wait expired", wait.waited_s, flag)
                if num_stopping:
                    self._health.check()  # PeerLost, where that is the reason
                    raise Closed("another trainer rank was asked to stop")
                if num_ready == self.size:
                    return totals
                if num_leaving:
                    return None

    def _poll(self, is_ready: Callable[[], bool], wait: Wait, sleep: Callable[[float], None]) -> tuple[bool, bool, DeadlineExpired | None]:
        """(asked to stop, ready, deadline), after PACE_S at the latest."""
        until = time.monotonic() + PACE_S
        sleep_s = FIRST_SLEEP_S
        while True:
            if is_ready():
                return self._health.should_stop, True, None
            try:
                wait.check()
            except (Closed, PeerLost):
                return True, False, None  # raised once all ranks know, or the others would hang
            except DeadlineExpired as expired:
                return False, False, expired
            if time.monotonic() >= until:
                return False, False, None
            sleep(min(sleep_s, max(0.0, until - time.monotonic())))
            sleep_s *= 1.5

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            # Named, not bounded here: if a rank never comes, the supervisor sees which one waits for nobody (--step-timeout-s).
            with self._health.waiting("all trainer ranks to meet", timeout_s=0):
                dist.all_reduce(tensor, op)
        return tensor.tolist()
