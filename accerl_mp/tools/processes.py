"""Processes that a tool works with, which end with it."""

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

from accerl_mp.transport.process import die_with_parent


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
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pressed:
            raise KeyboardInterrupt


class _Context(SpawnContext):
    Process = _Process


def open_pool(num_processes: int) -> ProcessPoolExecutor:
    """Fresh interpreters. What they wait for is the pool's: tasks, until it is shut down or its process is gone."""
    return ProcessPoolExecutor(num_processes, mp_context=_Context(), initializer=die_with_parent)
