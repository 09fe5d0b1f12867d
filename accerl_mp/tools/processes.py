"""Processes that a tool works with, which end with it."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from accerl_mp.stops import put_off
from accerl_mp.transport.process import die_with_parent

_started: list["_Process"] = []


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """For those that the block starts, who inherit it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Process(SpawnProcess):
    """Never sees Ctrl+C, not even while its interpreter starts: it inherits that the signal is blocked."""

    def start(self) -> None:
        super().start()
        _started.append(self)


class _Context(SpawnContext):
    Process = _Process


class _Pool(ProcessPoolExecutor):
    """For the main thread. A stop waits until a task is handed over: what half a hand-over has started could not be shut down."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        resource_tracker.ensure_running()  # starting it in the block would unblock the signal
        with put_off(signal.SIGINT, signal.SIGTERM), _ctrl_c_blocked():
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def open_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters, for one pool at a time. If the block fails or is interrupted, what they do is cut short.

    SIGTERM interrupts it as Ctrl+C does: a tool that died of it would leave the pool's semaphores, which Python's tracker tells
    the terminal. For the main thread.

    waits for      at the end, the tasks that are not done; after a failure, only until processes have left theirs
    """
    pool, is_done = _Pool(num_processes, mp_context=_Context(), initializer=_begin, initargs=(os.getpid(),)), False
    on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield pool
        is_done = True
    finally:
        for process in [] if is_done else _started:
            process.terminate()
        pool.shutdown(cancel_futures=not is_done)
        _started.clear()
        signal.signal(signal.SIGTERM, on_term)


def _begin(parent_pid: int) -> None:
    """SIGTERM ends the task, not the process, which then tidies up as at any end. A parent that is gone already ends it at once."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
