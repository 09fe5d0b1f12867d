"""One piece of work on a thread of its own, so that nothing waits for it."""

import threading
from collections.abc import Callable
from typing import Any

from accerl_mp.transport.errors import Closed


class Aside:
    """Begins at once. `result` once it `is_alive` no more."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work, self._value = work, None
        self._error: Exception | None = RuntimeError(f"thread {name} failed; its traceback is in this log")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, at most this long."""
        self._thread.join(timeout_s)

    def result(self) -> Any:
        """What the work has returned or raised; RuntimeError while it goes on."""
        if self.is_alive:
            raise RuntimeError(f"thread {self._thread.name} has not ended in time")
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._work()
        except (RuntimeError, TimeoutError, Closed) as error:
            self._error = error
        else:
            self._error = None
