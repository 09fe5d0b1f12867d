"""Signals that ask a process to end, and when they may act. Standard library only."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def put_off(*numbers: signal.Signals) -> Iterator[None]:
    """These signals act after the block as they would have acted in it, each once. For the main thread.

    A handler notes them instead of a mask: another thread may take them, and what the block starts would inherit the mask.
    """
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
