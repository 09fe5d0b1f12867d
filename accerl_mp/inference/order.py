"""Which of vLLM's outputs came before a moment, and which after it."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

from accerl_mp.inference.replies import ReplyCollector


class OutputOrder:
    """Puts what the engine's loop sends on one side or the other of a moment: outputs carry the time at which they were made.

    Sits between vLLM's queue of outputs and the task that hands them to their requests.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.replies = ReplyCollector()
        """Gets its outputs when they pass, before the task does."""
        self._queue = llm.engine_core.outputs_queue
        self._take = llm.engine_core.get_output_async
        self._limit = math.inf
        """Outputs that were made later wait."""
        self._moved = asyncio.Event()
        self._is_blocked = False
        llm.engine_core.get_output_async = self._get

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No output passes inside the block, but for those of `let_through`."""
        self._move(-math.inf)
        try:
            yield
        finally:
            self._move(math.inf)

    async def let_through(self, until: float) -> None:
        """Return when every output made up to `until` (time.monotonic) has reached its request.

        Outputs and answers of calls share one socket: after a call that was made later than `until`, they are all in the queue.
        """
        self._move(until)
        if self._llm.output_handler is None:
            return  # it starts with the first request
        # The output handler, the only reader, waits for the queue only after it has dealt with all it took.
        while not self._llm.errored and not self._is_blocked and (self._queue.qsize() or not self._queue._getters):
            await asyncio.sleep(0)
        # The tasks that it woke stand ahead of this one in the loop: let them take their outputs.
        await asyncio.sleep(0)

    async def _get(self) -> Any:
        outputs = None
        try:
            outputs = await self._take()
        finally:
            if outputs is None:  # the task ends here, and with it all hope of an answer
                self.replies.fail()
        while outputs.timestamp > self._limit:
            self._is_blocked = True
            await self._moved.wait()
        self._is_blocked = False
        self.replies.take(outputs)
        return outputs

    def _move(self, limit: float) -> None:
        self._limit = limit
        self._is_blocked = False  # until it has looked at the new limit
        self._moved.set()
        self._moved = asyncio.Event()
