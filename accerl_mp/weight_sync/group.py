"""The process group that weights travel over: one of its own, never the trainer's default group.

Rank 0 is trainer rank 0, the vLLM workers of all replicas follow. Three calls block: forming the group, `send` and `receive`.
Each is made from a side thread, so that no loop ever hangs with a peer. What ends them: a peer that dies (at once, its connection
closes), the group's timeout, and with NCCL `abort()`.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """What a peer needs to join. Travels over the control channel as a dict."""

    backend: str
    """"gloo" or "nccl"."""
    port: int
    world_size: int
    timeout_s: float
    """Longest that any single operation may take."""


class WeightGroup(Protocol):
    """Moves flat uint8 tensors from rank 0 to everyone else, in order."""

    def send(self, buffer: torch.Tensor) -> None:
        """Rank 0: returns when `buffer` may be written again. Raises RuntimeError when a peer is gone, or after the timeout."""

    def receive(self, buffer: torch.Tensor) -> None:
        """Other ranks: fills `buffer`. Raises as `send` does."""

    def abort(self) -> None:
        """Let no further operation begin, and end one that is under way in another thread with an error there, where that is possible."""


class _BroadcastGroup:
    """Both backends: a broadcast from rank 0."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        self._group = group
        self._store = store  # rank 0's store is the server: it must live as long as the group
        self._is_aborted = False

    def send(self, buffer: torch.Tensor) -> None:
        self._check()
        self._broadcast(buffer)

    def receive(self, buffer: torch.Tensor) -> None:
        self._check()
        self._broadcast(buffer)

    def abort(self) -> None:
        self._is_aborted = True

    def _check(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the weight group was given up")

    def _broadcast(self, buffer: torch.Tensor) -> None:
        raise NotImplementedError


class GlooGroup(_BroadcastGroup):
    """CPU: over loopback TCP. Gloo has no abort (torch 2.13): a broadcast ends with its peer or at the timeout."""

    def __init__(self, store: dist.Store, rank: int, address: GroupAddress) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=address.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._threads = 1
        super().__init__(dist.ProcessGroupGloo(store, rank, address.world_size, options), store)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self._group.broadcast(buffer, 0).wait()


class NcclGroup(_BroadcastGroup):
    """GPUs: one rank a device, on a stream of its own so that neither training nor generation waits for it."""

    def __init__(self, store: dist.Store, rank: int, address: GroupAddress, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout_s)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            super().__init__(dist.ProcessGroupNCCL(store, rank, address.world_size, options), store)

    def abort(self) -> None:
        was_aborted = self._is_aborted
        super().abort()
        if not was_aborted:
            self._group.abort()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.broadcast(buffer, 0).wait()
            self._stream.synchronize()


def open_store(world_size: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Rank 0's store, listening on a free loopback port before anyone is told the port. Returns (store, port)."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # TCPStore by itself listens on all interfaces
    )
    return store, port


def join_group(address: GroupAddress, rank: int, device: torch.device, store: dist.Store | None = None) -> WeightGroup:
    """Form the group. Blocks until every rank has come, at most `timeout_s`; rank 0 passes its store."""
    if store is None:
        timeout = timedelta(seconds=address.timeout_s)
        store = dist.TCPStore(LOOPBACK, address.port, address.world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    prefixed = dist.PrefixStore("weights", store)
    if address.backend == "nccl":
        return NcclGroup(prefixed, rank, address, device)
    return GlooGroup(prefixed, rank, address)
