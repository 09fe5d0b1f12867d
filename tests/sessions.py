"""Processes by their session: those of a command that was started with `start_new_session=True`, whoever their parents are by now."""

import os
import time
from pathlib import Path

import psutil


def processes_of(session: int) -> list[psutil.Process]:
    """Those that live; a zombie does not."""
    return [process for process in psutil.process_iter() if _session(process) == session]


def shared_memory_of(session: int) -> set[str]:
    """Files of /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for process in processes_of(session):
        try:
            found |= {one.path for one in process.memory_maps() if one.path.startswith("/dev/shm/") and "(deleted)" not in one.path}
        except psutil.Error:
            continue
    return found


def wait_until_gone(session: int, shared_memory: set[str] = frozenset(), timeout_s: float = 40) -> list[str]:
    """What is left of both at last: nothing, if all is well."""
    end = time.monotonic() + timeout_s
    while True:
        left = [text for process in processes_of(session) if (text := command_of(process))]
        left += [name for name in shared_memory if Path(name).exists()]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def command_of(process: psutil.Process) -> str:
    """Empty: it has ended meanwhile."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _session(process: psutil.Process) -> int:
    try:
        return -1 if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.Error, ProcessLookupError):
        return -1
