"""Shared memory that libraries make under names of their own, found by the processes that have mapped it. Standard library only."""

import os
from collections.abc import Iterable
from pathlib import Path

FOREIGN = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
"""multiprocessing's shared memory and semaphores, and what vLLM's CPU workers of one model share."""


def mapped(pids: Iterable[int]) -> set[str]:
    """Files of these names that the processes have mapped."""
    return {file for pid in pids for file in _mapped_by(pid)}


def remove(files: Iterable[str]) -> None:
    """Those that are still there; only while nobody uses them any more."""
    for file in files:
        Path(file).unlink(missing_ok=True)


def descendants(pid: int = 0) -> list[int]:
    """Living processes below this one, or the one of that pid."""
    parents = parent_of_each()
    found, level = [], [pid or os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


def parent_of_each() -> dict[int, int]:
    """Parent of every living process of the machine."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, ppid = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != b"Z":
            found[int(folder.name)] = int(ppid)
    return found


def _mapped_by(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    files = {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
    return {file for file in files if file.startswith(FOREIGN) and not file.endswith("(deleted)")}
