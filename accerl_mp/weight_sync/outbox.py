"""Rank 0's sending: tensors are copied into message buffers on the main thread and sent by a thread, while everything goes on."""

import queue
import threading

import torch

from accerl_mp.transport.errors import Closed, DeadlineExpired, PeerLost
from accerl_mp.transport.health import Health
from accerl_mp.weight_sync.group import WeightGroup
from accerl_mp.weight_sync.layout import align
from accerl_mp.weight_sync.protocol import GroupBroken, SyncError

_NUM_BUFFERS = 2
"""One is filled while the other travels."""


class Outbox:
    """One push. `put` every tensor in order, then `finish`; `is_done` or `error` follows from the thread."""

    def __init__(
        self, group: WeightGroup, total_bytes: int, *, bucket_bytes: int, device: torch.device, health: Health, timeout_s: float
    ) -> None:
        self._group, self._health, self._timeout_s = group, health, timeout_s
        self._total_bytes, self._bucket_bytes = total_bytes, bucket_bytes
        self._position = 0
        self._buffer: torch.Tensor | None = None
        size = min(bucket_bytes, total_bytes)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(min(_NUM_BUFFERS, -(-total_bytes // bucket_bytes))):
            self._free.put(torch.empty(size, dtype=torch.uint8, device=device))
        self._full: queue.SimpleQueue[tuple[torch.Tensor, int, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.is_done = False
        self._thread = threading.Thread(target=self._send_all, name="weights-send", daemon=True)
        self._thread.start()

    def put(self, data: torch.Tensor) -> None:
        """Append a tensor's bytes (flat uint8).

        waits for      a free buffer, at most `--sync-timeout-s`
        after a failure returns at once: the ranks must still gather to the end, in lock-step
        """
        while len(data) and (buffer := self._current_buffer()) is not None:
            at = self._position % self._bucket_bytes
            part = data[: len(buffer) - at]
            buffer[at : at + len(part)].copy_(part)
            data = data[len(part) :]
            self._advance(self._position + len(part))
        self._advance(align(self._position))

    def finish(self) -> None:
        """All tensors are in: send what is left."""
        if self._buffer is not None:
            self._ship(self._total_bytes % self._bucket_bytes or self._bucket_bytes)
        self._full.put(None)

    def give_up(self) -> None:
        """Let the thread end as soon as it can. abort() may block with a peer that is stuck, so it gets a thread too."""
        self.error = self.error or SyncError("the push was given up")
        self._full.put(None)
        threading.Thread(target=self._group.abort, name="weights-abort", daemon=True).start()

    def _advance(self, position: int) -> None:
        # Messages and tensors both end at multiples of the alignment, so padding never crosses a message.
        self._position = position
        if self._buffer is not None and position % self._bucket_bytes == 0:
            self._ship(self._bucket_bytes)

    def _ship(self, num_bytes: int) -> None:
        buffer, self._buffer = self._buffer, None
        copied = None
        if buffer.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._full.put((buffer, num_bytes, copied))

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
                self._group.send(buffer[:num_bytes])
                self._free.put(buffer)
        except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
            self.error = self.error or GroupBroken(f"sending weights failed: {error}")
        self.is_done = self.error is None
