"""The board: named integers that every process of a run can read, each written by one owner.

One small file in /dev/shm. A word is an aligned 64-bit integer, so a reader sees the old or the new value,
never a mixture. Words carry state ("version 12 is in use"), not events. Standard library only.
"""

import mmap
import os
from pathlib import Path

WORDS: dict[str, tuple[str, int]] = {
    "policy_version": ("trainer/0", -1),  # pushes that all replicas use; -1 before the first
    "next_version": ("trainer/0", 0),  # highest version ever announced, plus one
    "round_step": ("trainer/0", 0),  # optimizer step at which the weights of policy_version were taken; set before it
    "round_used": ("trainer/0", 0),  # samples that had been trained by then, over all ranks, each use counted
    "optimizer_step": ("trainer/0", 0),
    "round": ("trainer/0", 0),
    "saved_step": ("trainer/0", 0),  # optimizer step of the newest state of this run that is whole on disk
    "eval_asked": ("trainer/0", 0),  # evaluations asked for so far
    "eval_done": ("ingest/0", 0),  # evaluations finished so far
    "finished": ("trainer/0", 0),  # 1: training is over, end everything in order
    "asked_to_end": ("supervisor/0", 0),  # 1: by a person or the cluster, which DIR/stop says too where the disk has room
    "stop": ("supervisor/0", 0),  # 1: everybody leaves now (Closed)
    "failed": ("supervisor/0", 0),  # 1: the run cannot go on; DIR/failure.txt says why (PeerLost)
}
"""Name: (owner, value at the start). Only the owner writes."""

_MAGIC = 0x6163636572_0001
_SLOTS = 64


class Board:
    """Open words of one run. `get` and `set` never wait."""

    def __init__(self, memory: mmap.mmap, path: Path | None) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._slots = {name: slot for slot, name in enumerate(WORDS, start=1)}
        self.path = path

    @classmethod
    def create(cls, path: Path) -> "Board":
        """Make the file. It appears under its name only once it is complete."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        make_file(temporary, _SLOTS * 8)
        board = cls(map_file(temporary), path)
        board._reset()
        temporary.rename(path)
        return board

    @classmethod
    def attach(cls, path: Path) -> "Board":
        """Open the file of a running run; FileNotFoundError if there is none."""
        board = cls(map_file(path), path)
        if board._words[0] != _MAGIC:
            raise ValueError(f"{path} is no board of this version: {board._words[0]:#x}")
        return board

    @classmethod
    def detached(cls) -> "Board":
        """A board of this process alone, for tests and tools."""
        board = cls(mmap.mmap(-1, _SLOTS * 8), None)
        board._reset()
        return board

    def get(self, name: str) -> int:
        return self._words[self._slots[name]]

    def set(self, name: str, value: int) -> None:
        self._words[self._slots[name]] = value

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def unlink(self) -> None:
        """Remove the file; processes that have it open keep their view."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _reset(self) -> None:
        for name, (_, start) in WORDS.items():
            self.set(name, start)
        self._words[0] = _MAGIC


def make_file(path: Path, num_bytes: int) -> None:
    """Zeros, for this user alone: others could stop the run with a word."""
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(bytes(num_bytes))


def map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
