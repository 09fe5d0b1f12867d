"""What a process holds, as exactly as it can be told: bytes that `malloc` has given out, Python's blocks, files, mappings, threads."""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

_LIBC = ctypes.CDLL(None)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


_LIBC.mallinfo2.restype = _Mallinfo


def holdings() -> dict[str, int]:
    """Of this process, after its garbage is collected and free memory is given back.

    `malloc_bytes` is what was asked for and not freed, in all arenas: it does not move with fragmentation, as resident bytes do.
    """
    gc.collect()
    _LIBC.malloc_trim(0)
    process = psutil.Process()
    memory, malloc = process.memory_full_info(), _LIBC.mallinfo2()
    return {
        "malloc_bytes": malloc.uordblks + malloc.hblkhd,
        "python_objects": len(gc.get_objects()),
        "python_blocks": sys.getallocatedblocks(),
        "private_bytes": memory.uss,
        "resident_bytes": memory.rss,
        "files": process.num_fds(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": process.num_threads(),
    }


def tell_when_asked(folder: Path) -> None:
    """From now on SIGUSR2 makes this process write its `holdings` to `folder`."""

    def write(*_: Any) -> None:
        target = folder / f"holdings-{os.getpid()}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(holdings()))
        partial.rename(target)

    signal.signal(signal.SIGUSR2, write)


def holdings_of(pid: int, folder: Path, timeout_s: float = 60.0) -> dict[str, int]:
    """Ask another process that has called `tell_when_asked`."""
    target = folder / f"holdings-{pid}.json"
    target.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + timeout_s
    while not target.exists():
        assert time.monotonic() < deadline, f"process {pid} does not answer"
        time.sleep(0.01)
    return json.loads(target.read_text())


def growth_per_call(
    read: Callable[[], dict[str, dict[str, int]]], work: Callable[[], None], *, num_blocks: int, num_calls: int
) -> dict[str, dict[str, float]]:
    """By process, what each thing grew by in one of the calls that a `work()` makes: the median over blocks, after one to warm up.

    So a table that doubles once, or a cache that fills up, does not count; what is kept at every call does.
    """
    work()
    readings = [read()]
    for _ in range(num_blocks):
        work()
        readings.append(read())
    steps = list(pairwise(readings))
    return {
        name: {thing: median((after[name][thing] - before[name][thing]) / num_calls for before, after in steps) for thing in things}
        for name, things in readings[0].items()
    }


MOST_PER_CALL = {"malloc_bytes": 16 << 10, "python_blocks": 50, "python_objects": 10, "files": 0, "threads": 0, "mappings": 0.1}
"""Above what is seen: torch.distributed's flight recorder takes 1 KiB a message in each process, until it holds 2,000."""


def too_much(growth: dict[str, dict[str, float]]) -> list[str]:
    """What grows by more than MOST_PER_CALL."""
    return [
        f"{name}: {thing} grow by {things[thing]:.4g} a call, at most {most}"
        for name, things in growth.items()
        for thing, most in MOST_PER_CALL.items()
        if things[thing] > most
    ]
