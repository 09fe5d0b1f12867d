"""The file of a SharedRing: which word lies where, and who owns it. No rules here, those are in ring.py.

    header   written once, by whoever creates the file
    writer   committed sequence, counters              writer's
    reader   wanted samples, counters                  reader's
    slots    one row a sample                          writer's
    marks    one row a slot: uses, released sequence   reader's
    recent   ids of the last groups put                writer's
    chain    number of the page after this page        writer's
    arena    pages of PAGE_BYTES, a record a group     writer's

A word is an aligned int64 with one owner, so it is read whole without a lock (x86 keeps the order of stores; elsewhere
the CRC of a record catches what comes out of order).
"""

import fcntl
import mmap
import os
import struct
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
"""Records are chains of whole pages, so a ring never fragments: what fits by number of pages fits."""
NUM_RECENT = 4096
"""Group ids kept against doubles: a rollout resends at most its last few groups."""

FREE, WRITING, READY, EVICTED = range(4)
"""States of a slot. EVICTED is FREE that remembers: a writer killed in the middle of an eviction is finished by the next."""

MAGIC, VERSION, CAPACITY, NUM_PAGES, CREATED = range(5)
COMMITTED, NEXT_NUMBER, EARLIER, WRITER_COUNTERS, INTENT = 0, 1, 2, 8, 40
"""EARLIER: 1 + groups that ended in an earlier start of the run. INTENT: a sequence, then (counter, its two values to be) twice."""
WANTED, USES, READER_COUNTERS = 0, 1, 8
STATE, SEQUENCE, GROUP_FIRST, GROUP_SIZE, GROUP_ID, FIRST_PAGE, SIZE_BYTES, CRC = range(8)
TOKENS, TRAINED, OLDEST, NEWEST, EPISODE_ID, GAME_ID, SLOT_END = range(8, 15)
RELEASED, USED = range(2)
USE_BITS = 16
MAX_USES = (1 << USE_BITS) - 1
"""The USED word is sequence << USE_BITS | uses: one store, never a count that belongs to an earlier record."""

_MAGIC, _VERSION = 0x6163636572_7231, 3
_WORDS, _SLOT_WORDS = 64, 16


class RingError(RuntimeError):
    """A ring that cannot be made or opened. Says which file and why."""


class RingBusy(RingError):
    """Another process is already this ring's writer, or its reader."""


class RingMemory:
    """An open ring file as NumPy arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(self._file, 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise RingError(f"{path} cannot be mapped: {error}") from error
        self.header = np.frombuffer(self._memory, np.int64, _WORDS)
        if self.header[MAGIC] != _MAGIC or self.header[VERSION] != _VERSION:
            self.close()
            raise RingError(f"{path} is no ring of this version of accerl_mp")
        self.capacity, self.num_pages = int(self.header[CAPACITY]), int(self.header[NUM_PAGES])
        self._lay_out()

    def _lay_out(self) -> None:
        offsets = _offsets(self.capacity, self.num_pages)

        def array(name: str, dtype: type, *shape: int) -> np.ndarray:
            return np.frombuffer(self._memory, dtype, int(np.prod(shape)), offsets[name]).reshape(shape)

        self.writer, self.reader = array("writer", np.int64, _WORDS), array("reader", np.int64, _WORDS)
        self.committed = self.writer[COMMITTED : COMMITTED + 1]
        """The word COMMITTED, to sleep on."""
        self.slots = array("slots", np.int64, self.capacity, _SLOT_WORDS)
        self.marks = array("marks", np.int64, self.capacity, 2)
        self.recent = array("recent", np.int64, NUM_RECENT, 2)
        self.chain = array("chain", np.int32, self.num_pages)
        self.arena = array("arena", np.uint8, self.num_pages, PAGE_BYTES)
        self.arena_bytes = memoryview(self.arena.reshape(-1))

    def lock(self, role: int) -> None:
        """Be the only writer (role 0) or reader (role 1) while this object lives; the kernel lets go when its process dies."""
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, role, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except BlockingIOError as error:
            raise RingBusy(f"{self.path} already has a {('writer', 'reader')[role]}") from error

    def rows_of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A copy of these slots, and which rows of it are whole: one that changed meanwhile is not."""
        before = self.slots[slots, :GROUP_FIRST]
        rows = self.slots[slots]
        after = self.slots[slots, :GROUP_FIRST]
        return rows, (before == after).all(axis=1) & (before == rows[:, :GROUP_FIRST]).all(axis=1)

    def pages_of(self, slot_row: np.ndarray) -> list[int]:
        """The pages of a slot's record in order. Fewer if the chain is being rewritten."""
        num_pages, first = pages_for(int(slot_row[SIZE_BYTES])), int(slot_row[FIRST_PAGE])
        if not 0 <= first < self.num_pages:
            return []
        in_a_row = range(first, first + num_pages)
        if self.chain[first : first + num_pages - 1].tolist() == list(in_a_row[1:]):
            return list(in_a_row)
        pages = [first]
        while len(pages) < num_pages and 0 <= (page := int(self.chain[pages[-1]])) < self.num_pages:
            pages.append(page)
        return pages

    def copy_of(self, slot_row: np.ndarray) -> bytearray:
        """A slot's record; cut or mixed if it is being rewritten (look at the slot again afterwards)."""
        runs, size_bytes = runs_of(self.pages_of(slot_row)), int(slot_row[SIZE_BYTES])
        if len(runs) == 1:
            return bytearray(self.arena_bytes[runs[0].start * PAGE_BYTES :][:size_bytes])
        return bytearray(b"".join(self.bytes_of(run) for run in runs))[:size_bytes]

    def bytes_of(self, run: range) -> memoryview:
        """Of pages that follow each other."""
        return self.arena_bytes[run.start * PAGE_BYTES : run.stop * PAGE_BYTES]

    def close(self) -> None:
        for name in ("header", "writer", "committed", "reader", "slots", "marks", "recent", "chain", "arena", "arena_bytes"):
            setattr(self, name, None)
        self._memory.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def create_file(path: Path, *, capacity: int, size_bytes: int) -> None:
    """Make an empty ring; it appears under its name only once it is complete. RingError if it is there or does not fit."""
    num_pages = capacity + pages_for(size_bytes)  # each record may waste most of its last page
    total = _offsets(capacity, num_pages)["end"]
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Takes the memory now: a full /dev/shm is an error here, and not a SIGBUS in the middle of a run.
        os.posix_fallocate(file, 0, total)
        os.pwrite(file, struct.pack("5q", _MAGIC, _VERSION, capacity, num_pages, time.time_ns()), 0)
        os.link(temporary, path)
    except FileExistsError as error:
        raise RingError(f"{path} is there already: another run of this folder, or one that was killed") from error
    except OSError as error:
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        needs = f"{total / 2**20:.0f} MiB for a ring, {free / 2**20:.0f} MiB are free"
        raise RingError(f"{path.parent}: {needs} ({error.strerror}); lower --replay-capacity or --replay-bytes") from error
    finally:
        os.close(file)
        temporary.unlink(missing_ok=True)


def pages_for(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES)


def runs_of(pages: list[int]) -> list[range]:
    """Pages that follow each other, together: each run is copied at once."""
    if not pages:
        return []
    if pages == list(in_a_row := range(pages[0], pages[0] + len(pages))):
        return [in_a_row]
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    return [range(pages[start], pages[end - 1] + 1) for start, end in pairwise([0, *breaks, len(pages)])]


def _offsets(capacity: int, num_pages: int) -> dict[str, int]:
    sizes = {
        "header": _WORDS * 8,
        "writer": _WORDS * 8,
        "reader": _WORDS * 8,
        "slots": capacity * _SLOT_WORDS * 8,
        "marks": capacity * 16,
        "recent": NUM_RECENT * 16,
        "chain": num_pages * 4,
    }
    offsets, position = {}, 0
    for name, size in sizes.items():
        offsets[name] = position
        position += -(-size // 64) * 64  # a cache line has one owner
    offsets["arena"] = -(-position // PAGE_BYTES) * PAGE_BYTES
    offsets["end"] = offsets["arena"] + num_pages * PAGE_BYTES
    return offsets
