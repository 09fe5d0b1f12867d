"""Where a process spends its time: seconds by named phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Sums of phases since the last `take()`. One thread (or one event loop) each; phases may nest.

    Example:
        with timer.phase("wait"):
            ...
        timer.take() == {"wait": (0.25, 1, 0.25)}
    """

    def __init__(self) -> None:
        self._phases: dict[str, tuple[float, int, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count one stretch that was measured elsewhere."""
        total, count, longest = self._phases.get(name, (0.0, 0, 0.0))
        self._phases[name] = (total + seconds, count + 1, max(longest, seconds))

    def take(self) -> dict[str, tuple[float, int, float]]:
        """`{phase: (sum, count, max)}` in seconds since the last call, and start again."""
        phases, self._phases = self._phases, {}
        return phases
