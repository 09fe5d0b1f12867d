"""The writing side of a ring (`ring.py` says how the sides work together)."""

from collections.abc import Sequence

import numpy as np

from accerl_mp.samples import RLSample
from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.codec import Frame, SampleGroup, encode_group
from accerl_mp.transport.ring_memory import RingError, RingMemory
from accerl_mp.transport.ring_view import WRITER_REASONS, RingView
from accerl_mp.transport.wake import wake


class RingWriter(RingView):
    """The one process that puts.

    when full      try_put_group returns False and nothing changes; with `evict_used` the oldest used group makes room
    unblocked by   the reader's release
    a dead writer  leaves an uncommitted group, which nobody ever sees; the next writer takes its slots and pages
    """

    def __init__(self, memory: RingMemory, *, evict_used: bool) -> None:
        super().__init__(memory)
        memory.lock(0)
        self.evict_used = evict_used
        self.evicted_lengths: list[int] = []
        """Tokens of each sample that this writer evicted; whoever reports them clears the list."""
        self._pages: dict[int, list[int]] = {}
        """A group's first sequence: the pages of its record, for every group that has a slot."""
        self._num_slots: dict[int, int] = {}
        """A group's first sequence: slots that it has."""
        self._free_slots: list[int] = []
        self._free_pages: list[int] = []
        self._recover()

    def try_put_group(self, samples: Sequence[RLSample] | SampleGroup) -> bool:
        """Put a whole group, or nothing. True as well for a group that was put before (counted as a double)."""
        # Encoded before anything is touched: a sample that cannot be encoded must not leave a slot half taken.
        group = samples if isinstance(samples, SampleGroup) else encode_group(samples)
        if len(group_ids := set(group.column("group_id"))) != 1:
            raise ValueError(f"a group is one or more samples of one group_id, got {sorted(group_ids)}")
        group_id = group_ids.pop()
        if self.has_group(group_id):
            self._count("double", 1, 0)
            return True
        if not self._make_room(len(group), at.pages_for(group.size_bytes)):
            self._count("blocked", 1, 0)
            return False
        self._write(group, first=self._next_sequence)
        counts = {"committed": (len(group), sum(group.lengths)), "put": (1, len(group))}
        self._commit(group_id, self._next_sequence + len(group) - 1, counts)
        return True

    def restore_group(self, samples: Sequence[RLSample], *, uses: Sequence[int], versions: Sequence[tuple[int, int]], size: int) -> bool:
        """Put what a saved state holds of a group: use counts, (oldest, newest) version that lag is counted by, samples that it had.

        Only while nobody reads the ring: the use counts are the reader's words. False: no room, nothing changed.
        """
        if not self.try_put_group(samples):
            return False
        rows = self.memory.slots
        for offset, sequence in enumerate(range(self._next_sequence - len(samples), self._next_sequence)):
            slot = int(np.flatnonzero(rows[:, at.SEQUENCE] == sequence)[0])
            rows[slot, at.GROUP_SIZE] = size
            rows[slot, [at.OLDEST, at.NEWEST]] = versions[offset]
            self.memory.marks[slot, at.USED] = sequence << at.USE_BITS | min(uses[offset], at.MAX_USES)
        return True

    def remember_group(self, group_id: int, end: str = "") -> None:
        """Note a group that leaves no samples, so that it is not taken again either. `end`: one of ENDS; empty: not counted."""
        if not self.has_group(group_id):
            self._commit(group_id, self._next_sequence, {end: (1, 0)} if end else {})

    def has_group(self, group_id: int) -> bool:
        return group_id in self._known

    @property
    def next_number(self) -> int:
        return super().next_number

    @next_number.setter
    def next_number(self, number: int) -> None:
        self.memory.writer[at.NEXT_NUMBER] = number

    def _make_room(self, num_slots: int, num_pages: int) -> bool:
        if num_slots > self.capacity or num_pages > self.memory.num_pages:
            group = f"a group of {num_slots} samples in {num_pages} pages of {at.PAGE_BYTES} bytes"
            ring = f"{self.capacity} slots and {self.memory.num_pages} pages"
            raise RingError(f"{self.path} can never hold {group}: it has {ring}; raise --replay-capacity or --replay-bytes")
        self._reclaim()
        while len(self._free_slots) < num_slots or len(self._free_pages) < num_pages:
            if not self.evict_used or not self._evict_oldest_used():
                return False
        return True

    def _reclaim(self) -> None:
        """Take back what the reader has released."""
        released = self.memory.marks[:, at.RELEASED] == self.memory.slots[:, at.SEQUENCE]
        for slot in np.flatnonzero(released & (self.memory.slots[:, at.STATE] == at.READY)).tolist():
            self._free(slot, at.FREE)

    def _evict_oldest_used(self) -> bool:
        """Free the oldest group whose samples were all used, else the oldest of which one was."""
        slots, rows = self.live()
        is_used = self.uses(slots, rows) > 0
        some = set(rows[is_used, at.GROUP_FIRST].tolist())
        if not some:
            return False
        oldest = min((some - set(rows[~is_used, at.GROUP_FIRST].tolist())) or some)
        in_group = rows[:, at.GROUP_FIRST] == oldest
        self._evict(slots[in_group].tolist())
        lengths = rows[in_group, at.TOKENS].tolist()
        self.evicted_lengths += lengths
        self._count("evicted", len(lengths), sum(lengths))
        return True

    def _evict(self, slots: list[int]) -> None:
        # All states before any page is given away: a death in between leaves a mark on the group (see _recover).
        for slot in slots:
            self.memory.slots[slot, at.STATE] = at.EVICTED
        for slot in slots:
            self._free(slot, at.EVICTED)

    def _free(self, slot: int, state: int) -> None:
        self.memory.slots[slot, at.STATE] = state
        self._free_slots.append(slot)
        first = int(self.memory.slots[slot, at.GROUP_FIRST])
        self._num_slots[first] -= 1
        if not self._num_slots[first]:
            del self._num_slots[first]
            self._free_pages.extend(reversed(self._pages.pop(first)))  # taken from the end: a record gets pages in a row where it can

    def _write(self, group: SampleGroup, *, first: int) -> None:
        """Slots and pages of a group for which there is room."""
        pages = self._free_pages[: -1 - at.pages_for(group.size_bytes) : -1]
        table = _rows(group, first=first, first_page=pages[0])
        slots, rows = np.array(self._free_slots[: -1 - len(group) : -1]), self.memory.slots
        del self._free_pages[-len(pages) :], self._free_slots[-len(slots) :]
        self._pages[first], self._num_slots[first] = pages, len(slots)
        # WRITING and the new sequence first: a reader that still copies an old record sees that it is gone.
        rows[slots, at.STATE] = at.WRITING
        rows[slots, at.SEQUENCE] = np.arange(first, first + len(slots))
        self._write_pages(pages, [group.header, group.body])
        rows[slots, at.GROUP_FIRST : at.SLOT_END] = table
        rows[slots, at.STATE] = at.READY

    def _write_pages(self, pages: list[int], record: list[Frame]) -> None:
        """The chain, then the record: each run of pages at once."""
        self.memory.chain[pages[:-1]] = pages[1:]
        spaces = iter([self.memory.bytes_of(run) for run in at.runs_of(pages)])
        space = next(spaces)
        for part in map(memoryview, record):
            while part:
                if not space:
                    space = next(spaces)
                size_bytes = min(len(part), len(space))
                space[:size_bytes] = part[:size_bytes]
                part, space = part[size_bytes:], space[size_bytes:]

    def _commit(self, group_id: int, last_sequence: int, counts: dict[str, tuple[int, int]]) -> None:
        """The group becomes visible, its id a known one, and it is counted (or its successor's `_recover` does that), with one store."""
        entry = self.memory.recent[self._recent_at]
        if entry[1]:
            self._known.discard(int(entry[0]))
        entry[1] = last_sequence  # not committed yet, so neither is the id that comes next
        entry[0] = group_id
        self._intend(last_sequence, counts)
        self.memory.writer[at.COMMITTED] = last_sequence
        self._carry_out()
        wake(self.memory.committed)
        self._known.add(group_id)
        self._recent_at = (self._recent_at + 1) % at.NUM_RECENT
        self._next_sequence = last_sequence + 1

    def _intend(self, sequence: int, counts: dict[str, tuple[int, int]]) -> None:
        """Write down what the counters will be once `sequence` is committed: a writer killed in between has counted all the same."""
        words, intended = self.memory.writer, [0] * 6
        for place, (reason, (number, num_tokens)) in enumerate(counts.items()):
            index = _counter(reason)
            intended[3 * place : 3 * place + 3] = index, words[index] + number, words[index + 1] + num_tokens
        words[at.INTENT] = 0
        words[at.INTENT + 1 : at.INTENT + 7] = intended
        words[at.INTENT] = sequence

    def _carry_out(self) -> None:
        words = self.memory.writer
        if not 0 < words[at.INTENT] <= words[at.COMMITTED]:
            return
        for start in (at.INTENT + 1, at.INTENT + 4):
            if index := int(words[start]):
                words[index : index + 2] = words[start + 1 : start + 3]

    def _count(self, reason: str, number: int, num_tokens: int) -> None:
        index = _counter(reason)
        self.memory.writer[index] += number
        self.memory.writer[index + 1] += num_tokens

    def _recover(self) -> None:
        """Start from what the file says, after a writer that ended anywhere."""
        memory, slots = self.memory, self.memory.slots
        committed = int(memory.writer[at.COMMITTED])
        self._carry_out()
        half_written = (slots[:, at.STATE] == at.WRITING) | (slots[:, at.SEQUENCE] > committed)
        slots[half_written, at.STATE] = at.FREE
        evicted = slots[slots[:, at.STATE] == at.EVICTED, at.GROUP_FIRST]
        half_evicted = (slots[:, at.STATE] == at.READY) & np.isin(slots[:, at.GROUP_FIRST], evicted)
        slots[half_evicted, at.STATE] = at.EVICTED
        memory.recent[memory.recent[:, 1] > committed] = 0
        self._next_sequence = max(committed, int(slots[:, at.SEQUENCE].max())) + 1
        self._known = self.recent_group_ids
        self._recent_at = (int(memory.recent[:, 1].argmax()) + 1) % at.NUM_RECENT if self._known else 0
        self._free_slots = np.flatnonzero(slots[:, at.STATE] != at.READY)[::-1].tolist()
        for slot in np.flatnonzero(slots[:, at.STATE] == at.READY).tolist():
            first = int(slots[slot, at.GROUP_FIRST])
            if first not in self._pages:
                self._pages[first], self._num_slots[first] = memory.pages_of(slots[slot]), 0
            self._num_slots[first] += 1
        taken = {page for pages in self._pages.values() for page in pages}
        self._free_pages = [page for page in reversed(range(memory.num_pages)) if page not in taken]


def _rows(group: SampleGroup, *, first: int, first_page: int) -> np.ndarray:
    """[n, words] what the slots of a group say from GROUP_FIRST on."""
    table = np.empty((len(group), at.SLOT_END), np.int64)
    table[:, at.GROUP_FIRST : at.TOKENS] = [first, len(group), group.column("group_id")[0], first_page, group.size_bytes, group.crc]
    table[:, at.TOKENS], table[:, at.TRAINED] = group.lengths, group.num_trained
    table[:, at.OLDEST], table[:, at.NEWEST] = group.versions()
    table[:, at.EPISODE_ID], table[:, at.GAME_ID] = group.column("episode_id"), group.column("game_id")
    return table[:, at.GROUP_FIRST :]


def _counter(reason: str) -> int:
    return at.WRITER_COUNTERS + 2 * WRITER_REASONS.index(reason)
