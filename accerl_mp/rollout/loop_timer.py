"""Where an event loop's time goes: its own work, and waiting in which nothing else was done."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from accerl_mp.timing import Timer


class LoopTimer(Timer):
    """A Timer for many coroutines in one loop: any number of them may be inside `waiting("reply")` at once.

    Its seconds are those in which at least one waited and no phase ran: the shares of phases and one kind of waiting add up to at most 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_inside: dict[str, int] = {}
        self._since: dict[str, float] = {}
        """For each kind of waiting that goes on: since when, moved on by the phases that ran meanwhile."""

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self._since.setdefault(name, time.perf_counter())
        self._num_inside[name] = self._num_inside.get(name, 0) + 1
        try:
            yield
        finally:
            self._num_inside[name] -= 1
            if self._num_inside[name] == 0:
                self._count(name)
                del self._since[name]

    def add(self, name: str, seconds: float) -> None:
        super().add(name, seconds)
        for waiting in self._since:
            self._since[waiting] += seconds

    def take(self) -> dict[str, tuple[float, int, float]]:
        for name in self._since:
            self._count(name)
            self._since[name] = time.perf_counter()
        return super().take()

    def _count(self, name: str) -> None:
        super().add(name, max(0.0, time.perf_counter() - self._since[name]))
