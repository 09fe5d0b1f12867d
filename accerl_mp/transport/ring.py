"""SharedRing: a trainer rank's samples, in one file in /dev/shm. One writer (ingest), one reader (the rank), any watchers.

There is no compare-and-swap on a mapped file, so every word has one owner (ring_memory.py) and nobody takes a lock:

    put      fill slots and pages, then store the group's last sequence in COMMITTED: a whole group appears, or nothing
    read     copy the group's bytes, then look at slot and sequence again (a seqlock), then at the checksum
    release  the reader stores the sample's sequence beside the slot; the writer takes the slot back at its next put, the pages
             with the last slot of the group

A slot holds a sample, a record in the arena a whole group: it is copied in one piece, summed and checked once.

A file in /dev/shm and mmap, not multiprocessing.shared_memory: its resource tracker unlinks segments under their owner.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accerl_mp.samples import RLSample, SampleError
from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.codec import CodecError, SampleGroup, decode_record
from accerl_mp.transport.ring_memory import RingMemory
from accerl_mp.transport.ring_view import READER_REASONS, RingView
from accerl_mp.transport.ring_writer import RingWriter
from accerl_mp.transport.wake import sleep_while

_COLUMNS = [at.SEQUENCE, at.GROUP_ID, at.GROUP_FIRST, at.GROUP_SIZE, at.TOKENS, at.TRAINED, at.OLDEST, at.NEWEST, at.EPISODE_ID, at.GAME_ID]


class ReadySample(NamedTuple):
    """A sample that can be read: what is known without reading it."""

    slot: int
    uses: int
    """Times that mark_used was called for it."""
    sequence: int
    """Grows from put to put over the life of the ring."""
    group_id: int
    group_first: int
    """Sequence of the group's first sample; with `group_size` it tells which samples belong together."""
    group_size: int
    num_tokens: int
    num_trained: int
    """Trained tokens."""
    oldest_version: int
    newest_version: int
    episode_id: int
    game_id: int


class RingReader(RingView):
    """The one process that trains on the samples.

    `ready()` lists, `read_all()` copies out, `mark_used()` says that one was trained once more, `release()` gives it back.
    A listed sample stays until it is released, except in a ring whose writer evicts: then it may read as None.
    """

    def __init__(self, memory: RingMemory) -> None:
        super().__init__(memory)
        memory.lock(1)

    @property
    def num_wanted(self) -> int:
        return super().num_wanted

    @num_wanted.setter
    def num_wanted(self, number: int) -> None:
        self.memory.reader[at.WANTED] = number

    def sleep(self, seen: int, timeout_s: float) -> None:
        """Until something was put after `seen` (a `last_sequence`), at most `timeout_s`; a signal ends it, too."""
        sleep_while(self.memory.committed, seen, timeout_s)

    def ready(self) -> list[ReadySample]:
        """Every sample that can be read, oldest first."""
        slots, rows = self.live()
        order = np.argsort(rows[:, at.SEQUENCE])
        columns = [slots[order], self.uses(slots, rows)[order], *rows[order][:, _COLUMNS].T]
        return [ReadySample(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def read(self, ready: ReadySample) -> RLSample | None:
        """`read_all` of one."""
        return self.read_all([ready])[0]

    def read_all(self, wanted: Sequence[ReadySample]) -> list[RLSample | None]:
        """Private copies; a group is copied and checked once, and stays in memory as long as one of its samples does.

        None, and counted, for one whose group was evicted meanwhile ("lost") or is damaged ("torn", then released).
        """
        groups: dict[int, list[RLSample] | str] = {}
        samples: list[RLSample | None] = []
        for ready in wanted:
            if (group := groups.get(ready.group_first)) is None:
                group = groups[ready.group_first] = self._read_group(ready)
            if isinstance(group, list):
                samples.append(group[ready.sequence - ready.group_first])
                continue
            if group == "torn":
                self.release(ready, "torn")
            else:
                self._count("lost", 1, ready.num_tokens)
            samples.append(None)
        return samples

    def _read_group(self, ready: ReadySample) -> list[RLSample] | str:
        """The samples of its group; "lost" or "torn" where there are none to be had."""
        row = self.memory.slots[ready.slot].copy()
        record = self.memory.copy_of(row)
        # One slot speaks for all: pages go to others only once no slot of the group is READY with its sequence any more.
        if not self._still_holds(ready):
            return "lost"
        try:
            group: SampleGroup = decode_record(record)
        except (CodecError, SampleError):
            return "torn"
        return group.samples if group.crc == row[at.CRC] and len(group) > ready.sequence - ready.group_first else "torn"

    def mark_used(self, ready: ReadySample) -> int:
        """Count one more training of it. Returns how often it was used now."""
        self.memory.reader[at.USES] += 1
        used = int(self.memory.marks[ready.slot, at.USED])
        before = used & at.MAX_USES if used >> at.USE_BITS == ready.sequence else 0
        if self._still_holds(ready):
            self.memory.marks[ready.slot, at.USED] = ready.sequence << at.USE_BITS | min(before + 1, at.MAX_USES)
        return before + 1

    def release(self, ready: ReadySample, reason: str) -> None:
        """Give its slot back; `reason` is one of READER_REASONS. A second release of the same record changes nothing."""
        if reason not in READER_REASONS:
            raise ValueError(f"reason {reason!r} is none of {READER_REASONS}")
        if self.memory.marks[ready.slot, at.RELEASED] == ready.sequence or not self._still_holds(ready):
            return
        self._count(reason, 1, ready.num_tokens)
        # Last: the writer may reuse the slot from here on.
        self.memory.marks[ready.slot, at.RELEASED] = ready.sequence

    def _still_holds(self, ready: ReadySample) -> bool:
        slot = self.memory.slots[ready.slot]
        return bool(slot[at.STATE] == at.READY and slot[at.SEQUENCE] == ready.sequence)

    def _count(self, reason: str, number: int, num_tokens: int) -> None:
        index = at.READER_COUNTERS + 2 * READER_REASONS.index(reason)
        self.memory.reader[index] += number
        self.memory.reader[index + 1] += num_tokens


class SharedRing(RingView):
    """A ring as a watcher opens it, and the way to open it as writer or reader."""

    @staticmethod
    def create(path: Path, capacity: int, size_bytes: int) -> None:
        """Make the file, for `capacity` samples of `size_bytes` in all. RingError if it is there or /dev/shm is too small."""
        at.create_file(path, capacity=capacity, size_bytes=size_bytes)

    @staticmethod
    def attach_writer(path: Path, *, evict_used: bool = False) -> "RingWriter":
        """Become the writer; what a killed one left half done is put right. RingBusy while another lives."""
        return RingWriter(RingMemory(path), evict_used=evict_used)

    @staticmethod
    def attach_reader(path: Path) -> "RingReader":
        """Become the reader. FileNotFoundError before the ring was made, RingBusy while another reader lives."""
        return RingReader(RingMemory(path))

    @staticmethod
    def watch(path: Path) -> "SharedRing":
        return SharedRing(RingMemory(path))
