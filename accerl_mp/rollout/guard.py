"""Ends the process when an env step hangs: the interpreter runs inside this process and cannot be interrupted.

A thread of its own watches, since the event loop is what hangs. Ingest hears which game it was and deals the group again.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from accerl_mp.transport import channels, sockets
from accerl_mp.transport.errors import EXIT_GAME_HUNG
from accerl_mp.transport.process import Process

_log = logging.getLogger(__name__)
_LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """An env step (or reset, or start) that is being made."""

    path: str
    group_id: int
    game_id: int
    since: float


class StepGuard:
    """Use as a context around each step: `with guard(path, group_id=..., game_id=...)`.

    waits for      nothing in the stepping thread; the watcher looks a few times a deadline
    at the end     `close()` stops the watcher
    on expiry      `on_expiry(step)` on the watcher's thread, once
    on a crash     `mark(group_id)` came before the step and `mark(-1)` never: so the supervisor knows whose step it was
    """

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float],
        on_expiry: Callable[[Step], None],
        mark: Callable[[int], None] = lambda group_id: None,
    ) -> None:
        self._timeout_s, self._clock, self._on_expiry, self._mark = timeout_s, clock, on_expiry, mark
        self._step: Step | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step guard", daemon=True)
        self._thread.start()

    @contextmanager
    def __call__(self, path: str, *, group_id: int, game_id: int) -> Iterator[None]:
        self._step = Step(path, group_id, game_id, self._clock())
        self._mark(group_id)
        try:
            yield
        finally:
            self._mark(-1)
            self._step = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)  # it looks every second

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            step = self._step
            if step is not None and self._clock() - step.since > self._timeout_s:
                self._on_expiry(step)
                return


def end_process(process: Process, step: Step) -> None:
    """Tell ingest which game hangs, leave the stacks in the log, and exit: the supervisor starts a new process."""
    timeout_s = process.config.games.env_step_timeout_s
    reason = f"an env step took longer than {timeout_s:g} s (--env-step-timeout-s)"
    _log.info("game %s: %s; this process ends", step.path, reason)  # the supervisor says it too
    faulthandler.dump_traceback(process.stacks, all_threads=True)
    _report(process, step, reason)
    process.health.fail(TimeoutError(f"game {step.path}: {reason}"))
    logging.shutdown()
    os._exit(EXIT_GAME_HUNG)


def _report(process: Process, step: Step, reason: str) -> None:
    """Over a socket of this thread's own: zmq's sockets belong to one thread."""
    context = sockets.new_context()
    socket = sockets.connect_dealer(context, process.paths, channels.WORK, identity=f"{process.name}/guard")
    message = {"op": "failed", "group_id": step.group_id, "game_id": step.game_id, "reason": reason}
    socket.send(channels.pack("failed", message))
    socket.close(linger=_LINGER_MS)
    context.term()
