"""Processes that a tool works with, which end with it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

from accerl_mp.transport.process import die_with_parent

_started: list["_Process"] = []


class _Process(SpawnProcess):
    """Never sees Ctrl+C, not even while its interpreter starts: it inherits that the signal is blocked.

    Nor is its parent interrupted before it has told it all: another thread may take the signal, so it is put off by a handler.
    """

    def start(self) -> None:
        pressed: list[int] = []
        resource_tracker.ensure_running()  # starting it would unblock the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        handler = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
        try:
            super().start()
            _started.append(self)
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pressed:
            raise KeyboardInterrupt


class _Context(SpawnContext):
    Process = _Process


@contextlib.contextmanager
def open_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters, for one pool at a time. If the block fails or is interrupted, what they do is cut short.

    waits for      at the end, the tasks that are not done; after a failure, only until processes have left theirs
    """
    pool, is_done = ProcessPoolExecutor(num_processes, mp_context=_Context(), initializer=_begin, initargs=(os.getpid(),)), False
    try:
        yield pool
        is_done = True
    finally:
        for process in [] if is_done else _started:
            process.terminate()
        pool.shutdown(cancel_futures=not is_done)
        _started.clear()


def _begin(parent_pid: int) -> None:
    """SIGTERM ends the task, not the process, which then tidies up as at any end. A parent that is gone already ends it at once."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
