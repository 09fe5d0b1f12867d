"""Rank 0's sending: tensors are copied into message buffers on the main thread and sent by a thread, while everything goes on."""

import queue
import threading
import time
from collections.abc import Iterable

import torch

from accerl_mp.transport.errors import Closed, DeadlineExpired, PeerLost
from accerl_mp.transport.health import Health
from accerl_mp.weight_sync.group import WeightGroup
from accerl_mp.weight_sync.layout import align
from accerl_mp.weight_sync.protocol import GroupBroken, SyncError

_NUM_BUFFERS = 2
"""One is filled while the other travels."""


def make_buffers(bucket_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """What a BucketSender sends from. They outlive it: allocated once, and mapped once into a process on the same GPU."""
    return [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_BUFFERS)]


class BucketSender:
    """One push. `put` every tensor in order, `flush` before any of them changes, then `finish`; `is_done` or `error` follows.

    A thread of its own sends.
    """

    def __init__(
        self, group: WeightGroup, messages: Iterable[slice], buffers: list[torch.Tensor], *, health: Health, timeout_s: float
    ) -> None:
        self._group, self._health, self._timeout_s = group, health, timeout_s
        self._sizes = iter([message.stop - message.start for message in messages])
        self._size = next(self._sizes, 0)
        self._at = 0
        """Bytes of the message in hand that are filled, out of `_size`."""
        self._buffer: torch.Tensor | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(part of the buffer, what is to stand there)."""
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._full: queue.SimpleQueue[tuple[torch.Tensor, int, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.is_done = False
        self.busy_s = 0.0
        """Seconds that the thread spent sending."""
        self._thread = threading.Thread(target=self._send_all, name="weights-send", daemon=True)
        self._thread.start()

    def put(self, pieces: list[torch.Tensor], dtype: torch.dtype) -> None:
        """Append a tensor: flat pieces, which are cast to `dtype`. Nothing of it is read before `flush` or the end of a message.

        waits for      a free buffer, at most `--sync-timeout-s`
        after a failure returns at once: the ranks must still gather to the end, in lock-step
        """
        for piece in pieces:
            start, end = 0, piece.numel()
            while start < end and (buffer := self._current_buffer()) is not None:
                count = min(end - start, (self._size - self._at) // dtype.itemsize)
                target = buffer[self._at : self._at + count * dtype.itemsize].view(dtype)
                self._copies.append((target, piece if count == end else piece[start : start + count]))
                start += count
                self._advance(count * dtype.itemsize)
        # Messages and tensors both end at multiples of the alignment, so padding never crosses a message.
        if self._buffer is not None:
            self._advance(align(self._at) - self._at)

    @torch.no_grad()
    def flush(self) -> None:
        """Copy all that was put: from here on the pieces may change. One kernel launch or a few, however many there are."""
        kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in self._copies:
            kinds.setdefault((target.dtype, source.dtype), []).append((target, source))
        self._copies = []
        for pairs in kinds.values():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def finish(self) -> None:
        """All tensors are in."""
        self._full.put(None)

    def give_up(self) -> None:
        """Let the thread end as soon as it can. abort() may block with a peer that is stuck, so it gets a thread too."""
        self.error = self.error or SyncError("the push was given up")
        self._full.put(None)
        threading.Thread(target=self._group.abort, name="weights-abort", daemon=True).start()

    def _advance(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at < self._size:
            return
        self.flush()
        buffer, self._buffer = self._buffer, None
        copied = None
        if buffer.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._full.put((buffer, self._size, copied))
        self._size, self._at = next(self._sizes, 0), 0

    def _current_buffer(self) -> torch.Tensor | None:
        """The buffer that is being filled; None once sending has failed."""
        if self._buffer is None and self.error is None:
            self._buffer = self._wait_for_buffer()
        return self._buffer if self.error is None else None

    def _wait_for_buffer(self) -> torch.Tensor | None:
        try:
            with self._health.waiting("inference to take a part of a push", self._timeout_s, "--sync-timeout-s") as wait:
                while self.error is None:
                    try:
                        return self._free.get(timeout=0.02)
                    except queue.Empty:
                        wait.check()
        except (DeadlineExpired, Closed, PeerLost) as end:  # raised by whoever finishes the push, once all ranks have gathered
            self.error = end
        return None

    def _send_all(self) -> None:
        try:
            while (message := self._full.get()) is not None and self.error is None:
                buffer, num_bytes, copied = message
                if copied is not None:
                    copied.synchronize()
                start = time.monotonic()
                self._group.send(buffer[:num_bytes])
                self.busy_s += time.monotonic() - start
                self._free.put(buffer)
        except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
            self.error = self.error or GroupBroken(f"sending weights failed: {error}")
        self.is_done = self.error is None
