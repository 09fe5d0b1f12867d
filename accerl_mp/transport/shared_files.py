"""Shared memory that libraries make under names of their own, found by the processes that have mapped it. Standard library only."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from accerl_mp.transport.health import is_alive

_SHM = "/dev/shm"
_FOREIGN = (f"{_SHM}/psm_", f"{_SHM}/sem.mp-", f"{_SHM}/vllm_dist_")
"""multiprocessing's shared memory and semaphores, and what vLLM's CPU workers of one model share."""
_BY_PID = re.compile(_SHM + r"/(?:torch_(\d+)_|__KMP_REGISTERED_LIB_(\d+)_|cuda\.shm\.[^./]+\.([0-9a-f]+)\.)[^/]*")
"""What torch and CUDA make where a process hands out memory of its GPU, and Intel's OpenMP of each process: named after its pid,
CUDA's in hexadecimal. It stays where the process ends without the interpreter's own end (`exit_now`, `kill -9`)."""


def used_by(pids: Iterable[int]) -> set[str]:
    """Files of such names that the processes have mapped, or that are named after them."""
    pids = set(pids)
    return {file for pid in pids for file in _mapped_by(pid)} | named_after(pids)


def named_after(pids: Iterable[int]) -> set[str]:
    """Files of this user's that libraries have made for processes of these pids, living or not.

    Containers that share /dev/shm must share their pids as well, or it may be another one's process that is meant.
    """
    wanted, user = set(pids), os.getuid()
    with os.scandir(_SHM) as entries:
        return {entry.path for entry in entries if _owner_of(entry.path) in wanted and _user_of(entry.path) == user}


def is_shared(file: str) -> bool:
    """Whether it has such a name, in /dev/shm itself."""
    return _owner_of(file) is not None or (file.startswith(_FOREIGN) and "/" not in file.removeprefix(f"{_SHM}/"))


def may_be_removed(file: str) -> bool:
    """Of a file with such a name: whether whoever it is named after is gone; of another kind nothing tells."""
    owner = _owner_of(file)
    return owner is None or not is_alive(owner)


def _user_of(file: str) -> int | None:
    try:
        return Path(file).stat().st_uid
    except FileNotFoundError:
        return None


def _owner_of(file: str) -> int | None:
    if (found := _BY_PID.fullmatch(file)) is None:
        return None
    return int(found[1] or found[2]) if found[1] or found[2] else int(found[3], 16)


def remove(files: Iterable[str]) -> None:
    """Those that are still there; only while nobody uses them any more."""
    for file in files:
        with contextlib.suppress(PermissionError):  # another user's
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
    files = {line.split(None, 5)[5] for line in lines if f"{_SHM}/" in line}
    return {file for file in files if file.startswith(_FOREIGN) and not file.endswith("(deleted)")}
