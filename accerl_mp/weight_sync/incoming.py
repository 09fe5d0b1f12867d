"""A vLLM worker's end of the weight group: a thread that fills staging memory while vLLM generates. Knows nothing of vLLM."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accerl_mp.weight_sync.group import GroupAddress, WeightGroup, join_group
from accerl_mp.weight_sync.layout import Manifest, Runs, Slot, checksum, iter_messages, plan_layout, slots_of
from accerl_mp.weight_sync.protocol import CONNECTING, FAILED, IDLE, READY, RECEIVED, RECEIVING

Weights = Iterable[tuple[str, torch.Tensor]]


class Staging:
    """Where a push arrives. Allocated once and at one address, however many groups come and go: a captured copy reads from it.

    Whole: every tensor of the model has its place; a push of a part leaves the others as they came last. Not whole
    (`--sync-staging off`): room for one message, whose tensors go on into the model at once.
    """

    def __init__(self, manifest: Manifest, bucket_bytes: int, *, is_whole: bool, device: torch.device) -> None:
        self.manifest, self.bucket_bytes, self.is_whole = manifest, bucket_bytes, is_whole
        self.slots, self.num_bytes = plan_layout(manifest)
        self._device = device
        size = self.num_bytes if is_whole else min(bucket_bytes, self.num_bytes)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor of the model: views."""
        return [(slot.name, self.view_of(slot)) for slot in self.slots]

    def view_of(self, slot: Slot) -> torch.Tensor:
        return slot.view(self._memory)

    def bytes_of(self, slot: Slot) -> torch.Tensor:
        return slot.bytes_of(self._memory)

    def receive(self, group: WeightGroup, runs: Runs) -> None:
        """Whole staging: fill what `runs` names. Blocks as `group.receive` does."""
        for message in iter_messages(self.slots, runs, self.bucket_bytes):
            group.receive(self._memory[message])

    def receive_each(self, group: WeightGroup, runs: Runs) -> Iterator[tuple[Slot, torch.Tensor]]:
        """One message at a time: the tensors of `runs` as they become complete, each in memory of its own."""
        messages = iter_messages(self.slots, runs, self.bucket_bytes)
        message = slice(0, 0)
        for slot in slots_of(self.slots, runs):
            data = torch.empty(slot.size_bytes, dtype=torch.uint8, device=self._device)
            filled = 0
            while filled < slot.size_bytes:
                at = slot.offset + filled
                if not message.start <= at < message.stop:
                    message = next(messages)
                    group.receive(self._memory[: message.stop - message.start])
                size = min(slot.size_bytes - filled, message.stop - at)
                data[filled : filled + size] = self._memory[at - message.start : at - message.start + size]
                filled += size
            yield slot, data.view(slot.dtype).view(slot.shape)


class Incoming:
    """One group: at most one thread at a time, one push. A new group gets a new one: nothing of an old thread's can reach it."""

    def __init__(self, device: torch.device, previous: "Incoming | None" = None) -> None:
        self._device = device
        # A thread of the old group that is still receiving keeps its staging to itself.
        self.staging: Staging | None = previous.staging if previous is not None and not previous.is_receiving else None
        self._group: WeightGroup | None = None
        self._thread: threading.Thread | None = None
        self._state, self._error = IDLE, ""
        self._version = -1
        self._runs: Runs = []
        self._sums: dict[str, str] = {}

    def start_connect(self, address: GroupAddress, rank: int) -> None:
        """Join in a thread."""

        def connect() -> None:
            self._group = join_group(address, rank, self._device)

        self._start(CONNECTING, READY, connect)

    def start_receive(self, version: int, runs: Runs, load: Callable[[Weights], None], *, with_sums: bool) -> None:
        """Receive in a thread; without whole staging it hands the tensors to `load` as they come, and the engine must stand."""
        if self._state != READY or self.staging is None:
            raise RuntimeError(f"push {version} cannot begin: this worker is {self._state} {self._error}".strip())
        self._version, self._runs, self._sums = version, [(first, count) for first, count in runs], {}
        staging, group = self.staging, self._group
        assert group is not None

        def receive() -> None:
            if staging.is_whole:
                staging.receive(group, self._runs)
                self._sums = self._sum_up(staging) if with_sums else {}
            else:
                load(self._summed(staging.receive_each(group, self._runs), with_sums))

        self._start(RECEIVING, RECEIVED, receive)

    def report(self) -> dict[str, Any]:
        return {"state": self._state, "version": self._version, "error": self._error}

    def checksums(self) -> dict[str, str]:
        """By name, of every tensor of the push that has arrived; it was begun with them."""
        self._expect_received(self._version)
        return self._sums

    def take(self, version: int) -> Weights | None:
        """What has arrived, to be loaded (None without whole staging: it is loaded already); the next push may begin after this.

        Views are made as they are asked for: a captured copy asks for none, and vLLM stands meanwhile.
        """
        self._expect_received(version)
        self._state = READY
        assert self.staging is not None
        if not self.staging.is_whole:
            return None
        staging = self.staging
        return ((slot.name, staging.view_of(slot)) for slot in slots_of(staging.slots, self._runs))

    def abort(self) -> None:
        """Give up. Waits for nothing: the group's own abort may block with a peer that is stuck, so it gets a thread."""
        self._state = FAILED
        self._error = self._error or "the push was given up"
        if self._group is not None:
            threading.Thread(target=self._group.abort, name="weights-abort", daemon=True).start()

    @property
    def is_receiving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _sum_up(self, staging: Staging) -> dict[str, str]:
        """Aside as well, on a stream of its own: some hundred waits for the device, which would stop vLLM's loop for as long."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):  # None: nothing changes
            return {slot.name: checksum(staging.bytes_of(slot)) for slot in slots_of(staging.slots, self._runs)}

    def _summed(self, tensors: Iterable[tuple[Slot, torch.Tensor]], with_sums: bool) -> Weights:
        for slot, tensor in tensors:
            if with_sums:
                self._sums[slot.name] = checksum(tensor)
            yield slot.name, tensor

    def _expect_received(self, version: int) -> None:
        if self._state != RECEIVED or self._version != version:
            raise RuntimeError(f"push {version} has not arrived: this worker is {self._state} with {self._version} {self._error}".strip())

    def _start(self, during: str, after: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread. Waits for nothing; ends with the group's own timeout at the latest."""

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                work()
            except (RuntimeError, ValueError, AssertionError, KeyError) as error:  # torch's are RuntimeErrors, the others model loaders'
                self._error = self._error or f"{type(error).__name__}: {error}"
                self._state = FAILED
            else:
                # Last: the front acts as soon as it sees the state. Unless abort() came first.
                self._state = after if self._state == during else self._state

        self._state = during
        self._thread = threading.Thread(target=run, name=f"weights-{during}", daemon=True)
        self._thread.start()
