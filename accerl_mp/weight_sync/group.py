"""The process group that weights travel over: one of its own, never the trainer's default group.

Rank 0 is trainer rank 0, the vLLM workers of all replicas follow. Three calls block: forming the group, `send` and `receive`.
Each is made from a side thread, so that no loop ever hangs with a peer. What ends them: a peer that dies (at once, its connection
closes), the group's timeout, and with NCCL `abort()`.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgpack
import torch
import torch.distributed as dist

from accerl_mp.weight_sync.aside import Aside

LOOPBACK = "127.0.0.1"
_GIVEN_UP = "the weight group was given up"
_STORE_LOOK = timedelta(seconds=0.5)
"""Longest wait inside the store between two looks at `abort()`."""
_NICER = 5
"""On CPU the wire is made of copies, on the cores that generate: it takes what they leave, and a third of their share where they leave
nothing (the kernel's weight of this nice level: 335, of the usual one 1024)."""


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """What a peer needs to join. Travels over the control channel as a dict."""

    backend: str
    """"gloo", "nccl" or "ipc": see `backend_of`."""
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
            raise RuntimeError(_GIVEN_UP)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        raise NotImplementedError


class GlooGroup(_BroadcastGroup):
    """CPU: over loopback TCP. Gloo has no abort (torch 2.13): a broadcast ends with its peer or at the timeout."""

    def __init__(self, store: dist.Store, rank: int, address: GroupAddress) -> None:
        making = Aside(lambda: self._make(store, rank, address), "weights-gloo")
        making.join(2 * address.timeout_s)  # gloo itself takes one at most
        super().__init__(making.result(), store)

    def _make(self, store: dist.Store, rank: int, address: GroupAddress) -> dist.ProcessGroup:
        """Gloo's threads, which do all the work, get the priority of the thread that makes them: this one's, which has no other use."""
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=address.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, address.world_size, options)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self._group.broadcast(buffer, 0).wait()


class NcclGroup(_BroadcastGroup):
    """GPUs: one rank a device, on a stream of its own so that neither training nor generation waits for it.

    `NCCL_CUMEM_ENABLE` must be the same in all of the group's processes (launcher/environment.py).
    """

    def __init__(self, store: dist.Store, rank: int, address: GroupAddress, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout_s)
        self._device = device
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)
        super().__init__(dist.ProcessGroupNCCL(store, rank, address.world_size, options), store)
        # NCCL connects with the first operation. Now, so that a push is only bytes and a peer that is missing shows here.
        self._broadcast(torch.zeros(16, dtype=torch.uint8, device=device))

    def abort(self) -> None:
        was_aborted = self._is_aborted
        super().abort()
        if not was_aborted:
            self._group.abort()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            self._group.broadcast(buffer, 0).wait()
            self._stream.synchronize()
        self._check()  # an operation that abort() has ended looks like one that is done


class IpcGroup:
    """One GPU for all: NCCL refuses two ranks on a device, so the receivers copy out of rank 0's memory, which they have mapped.

    The store carries what is needed: the handle of each send buffer once, then one word a message, there and back. What a
    receive has copied is complete before it says so: both sides synchronise, no event crosses.
    """

    def __init__(self, store: dist.Store, rank: int, address: GroupAddress, device: torch.device) -> None:
        self._store, self._rank, self._world_size = store, rank, address.world_size
        self._timeout_s = address.timeout_s
        self._device = device
        self._buffers: list[torch.Tensor] = []
        """Rank 0: its own, shared. Others: rank 0's, mapped."""
        self._number = 0
        self._is_aborted = False
        for peer in range(self._world_size):
            self._tell("joined", peer) if peer == rank else self._hear("joined", peer, is_last=False)

    def send(self, buffer: torch.Tensor) -> None:
        """`buffer` begins where its storage does, as `buckets.make_buffers` gives them: the same few each time."""
        index = self._share(buffer)
        self._store.set(f"{self._number}/sent", msgpack.packb([index, len(buffer)]))
        for peer in range(1, self._world_size):
            self._hear("taken", peer)
        self._store.delete_key(f"{self._number}/sent")
        self._number += 1

    def receive(self, buffer: torch.Tensor) -> None:
        index, size = msgpack.unpackb(self._wait(f"{self._number}/sent"))
        if size != len(buffer):
            raise RuntimeError(f"a message of {size} bytes came where {len(buffer)} were expected")
        while len(self._buffers) <= index:
            self._buffers.append(self._open(msgpack.unpackb(self._wait(f"buffer/{len(self._buffers)}/{self._rank}"))))
        self._copy(buffer, self._buffers[index][:size])
        self._tell("taken", self._rank)
        self._number += 1

    def abort(self) -> None:
        self._is_aborted = True
        if self._rank:
            self._buffers = []

    def _share(self, buffer: torch.Tensor) -> int:
        starts = [shared.data_ptr() for shared in self._buffers]
        if buffer.data_ptr() in starts:
            return starts.index(buffer.data_ptr())
        for peer in range(1, self._world_size):  # a handle each: torch counts who has let go
            self._store.set(f"buffer/{len(self._buffers)}/{peer}", msgpack.packb(self._handle(buffer)))
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def _handle(self, buffer: torch.Tensor) -> list[Any]:
        return list(buffer.untyped_storage()._share_cuda_())  # numbers and bytes

    def _open(self, handle: list[Any]) -> torch.Tensor:
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index or 0, *handle[1:])
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            target.copy_(source)
        stream.synchronize()

    def _tell(self, what: str, rank: int) -> None:
        self._store.set(f"{self._number}/{what}/{rank}", b"1")

    def _hear(self, what: str, rank: int, *, is_last: bool = True) -> None:
        key = f"{self._number}/{what}/{rank}"
        self._wait(key)
        if is_last:
            self._store.delete_key(key)

    def _wait(self, key: str) -> bytes:
        """The key's value once it is there, at most `timeout_s`; RuntimeError then, after abort(), or when rank 0 is gone."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._is_aborted:
                raise RuntimeError(_GIVEN_UP)
            try:
                self._store.wait([key], _STORE_LOOK)
                return self._store.get(key)
            except dist.DistStoreError:
                if time.monotonic() > deadline:
                    raise


def backend_of(device: torch.device, placement: str) -> str:
    """How weights travel from trainer to vLLM."""
    if device.type == "cpu":
        return "gloo"
    return "ipc" if placement == "colocated" else "nccl"


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
    if address.backend == "gloo":
        return GlooGroup(prefixed, rank, address)
    return NcclGroup(prefixed, rank, address, device) if address.backend == "nccl" else IpcGroup(prefixed, rank, address, device)
