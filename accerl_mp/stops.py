"""Signals that ask a process to end, and when they may act. Standard library only."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def put_off(*numbers: signal.Signals) -> Iterator[None]:
    """These signals act after the block as they would have acted in it, each once, in the order in which they came. For the main thread.

    A handler notes them instead of a mask: another thread may take them, and what the block starts would inherit the mask.
    """
    came: list[int] = []
    is_over = False
    handlers = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, _frame: object) -> None:
        if not is_over:
            came.append(number)
            return
        # Another of them has acted, and raised, before this one's handler was there again.
        signal.signal(number, handlers[signal.Signals(number)])
        signal.raise_signal(number)

    try:
        for number in numbers:
            signal.signal(number, note)
        yield
    finally:
        is_over = True
        with contextlib.ExitStack() as acts:  # each acts though one before it raises
            for number in reversed(dict.fromkeys(came)):
                acts.callback(signal.raise_signal, number)
            for number, handler in handlers.items():
                signal.signal(number, handler)
