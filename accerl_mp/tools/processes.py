"""Processes that a tool works with, which end with it."""

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

from accerl_mp.transport.process import die_with_parent


class _Process(SpawnProcess):
    """Never sees Ctrl+C, not even while its interpreter starts: it inherits that the signal is blocked."""

    def start(self) -> None:
        resource_tracker.ensure_running()  # starting it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _Process


def open_pool(num_processes: int) -> ProcessPoolExecutor:
    """Fresh interpreters. What they wait for is the pool's: tasks, until it is shut down or its process is gone."""
    return ProcessPoolExecutor(num_processes, mp_context=_Context(), initializer=die_with_parent)
