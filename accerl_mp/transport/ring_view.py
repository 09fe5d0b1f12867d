"""What every process may see of a ring: how full it is, what was counted, which records are live."""

from typing import Self

import numpy as np

from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.ring_memory import RingMemory

ENDS = ("put", "zero_std", "rejected", "too_large", "set_aside")
"""How a training group ends for the writer: in a ring, or without samples. Each group ends once (groups, their samples)."""
WRITER_REASONS = ("committed", "evicted", "double", "blocked", *ENDS)
"""What a writer counts: samples put; evicted to make room; groups refused as doubles; puts that found no room; and ENDS."""
READER_REASONS = ("trained", "expired", "refused", "torn", "lost", "left")
"""What a reader counts: released after training, as too old, or by its own checks; failed the CRC; evicted between listing and reading;
not needed any more when training ended."""


class RingView:
    """Counts and sizes, nothing that changes the ring. Any number of processes may watch."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.path, self.capacity = memory.path, memory.capacity

    def close(self) -> None:
        self.memory.close()

    def unlink(self) -> None:
        """Remove the file; processes that have it open keep their view."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def last_sequence(self) -> int:
        """Of the newest committed record; it changes with every put, so a reader that waits need not list the records to see it."""
        return int(self.memory.writer[at.COMMITTED])

    @property
    def num_live(self) -> int:
        """Records that are committed and not released."""
        return len(self.live()[0])

    @property
    def num_unused(self) -> int:
        """Live records that were not trained yet."""
        return int((self.uses(*self.live()) == 0).sum())

    @property
    def free_slots(self) -> int:
        return self.capacity - self.num_live

    @property
    def free_bytes(self) -> int:
        """Whole pages; exact for the next record."""
        return (self.memory.num_pages - num_pages_of(self.live()[1])) * at.PAGE_BYTES

    @property
    def most_free_bytes(self) -> int:
        """`free_bytes` once a writer that evicts has taken all that it may: every group of which a sample was trained."""
        slots, rows = self.live()
        used = rows[self.uses(slots, rows) > 0, at.GROUP_FIRST]
        return (self.memory.num_pages - num_pages_of(rows[~np.isin(rows[:, at.GROUP_FIRST], used)])) * at.PAGE_BYTES

    @property
    def fill(self) -> float:
        """Share of the slots, or of the pages if fewer of those are left, that is taken."""
        slots, rows = self.live()
        return max(len(slots) / self.capacity, num_pages_of(rows) / self.memory.num_pages)

    @property
    def num_trained(self) -> int:
        """Samples that the rank released as trained, over the life of the ring."""
        return self.counters()["trained"][0]

    @property
    def num_expired(self) -> int:
        return self.counters()["expired"][0]

    @property
    def num_uses(self) -> int:
        """Times that a sample was trained; more than num_trained where samples are used again."""
        return int(self.memory.reader[at.USES])

    @property
    def num_wanted(self) -> int:
        """Unused samples that the rank waits to see in its ring right now; 0: it does not wait."""
        return int(self.memory.reader[at.WANTED])

    @property
    def next_number(self) -> int:
        """The writer's note: the first group number that was never dealt."""
        return int(self.memory.writer[at.NEXT_NUMBER])

    def counters(self) -> dict[str, tuple[int, int]]:
        """By reason: (how many, sum of their tokens), so that a bias against long episodes shows."""
        counted = {}
        for words, start, reasons in (
            (self.memory.writer, at.WRITER_COUNTERS, WRITER_REASONS),
            (self.memory.reader, at.READER_COUNTERS, READER_REASONS),
        ):
            for index, reason in enumerate(reasons):
                counted[reason] = (int(words[start + 2 * index]), int(words[start + 2 * index + 1]))
        return counted

    @property
    def recent_group_ids(self) -> set[int]:
        """The last groups that were committed (or remembered), also by writers that are gone."""
        recent = self.memory.recent.copy()
        return set(recent[self._is_committed(recent[:, 1]), 0].tolist())

    def live(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] slots that hold a committed and unreleased record, and [n, words] a copy of their rows."""
        # COMMITTED first: a row that is newer is left out, and of a group either all rows are older or none.
        committed = self.memory.writer[at.COMMITTED].copy()
        slots = self.memory.slots
        maybe = np.flatnonzero((slots[:, at.STATE] == at.READY) & (slots[:, at.SEQUENCE] != self.memory.marks[:, at.RELEASED]))
        rows, is_whole = self.memory.rows_of(maybe)
        sequence = rows[:, at.SEQUENCE]
        is_live = is_whole & (rows[:, at.STATE] == at.READY) & (sequence <= committed) & (self.memory.marks[maybe, at.RELEASED] != sequence)
        return maybe[is_live], rows[is_live]

    def uses(self, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """[n] how often each of these live records was trained."""
        used = self.memory.marks[slots, at.USED]
        return np.where(used >> at.USE_BITS == rows[:, at.SEQUENCE], used & at.MAX_USES, 0)

    def _is_committed(self, sequences: np.ndarray) -> np.ndarray:
        return (sequences > 0) & (sequences <= self.memory.writer[at.COMMITTED])


def num_pages_of(rows: np.ndarray) -> int:
    """Pages that the groups of these rows take: a group's record stays whole while one of its samples is live."""
    _, first = np.unique(rows[:, at.GROUP_FIRST], return_index=True)
    return int((-(-rows[first, at.SIZE_BYTES] // at.PAGE_BYTES)).sum())
