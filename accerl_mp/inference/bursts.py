"""vLLM's scheduler that lets new requests in together, so that most steps are decoding alone. vLLM loads it by name, in EngineCore.

A step that only decodes is one CUDA graph; one with a new prompt in it runs piece by piece from Python and costs three times as much,
nearly whatever the number of prompts. Where replies are short and many episodes play, requests come as fast as steps go, and every
step would be such a one.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

ADMIT_EVERY = 4
"""Steps from one admission to the next, at most."""
_DUE_SHARE = 4
"""A burst is due when one request waits for so many that run. So a lone request, and one among few, never waits."""


class BurstScheduler(AsyncScheduler):
    """Requests wait for at most `ADMIT_EVERY` - 1 steps more than vLLM's own scheduler lets them wait.

    waits for      a new request for enough others, or for the next admission; vLLM's own bounds come on top
    unblocked by   the engine's own steps: while nothing decodes, and while more wait than a step holds, nothing is held back
    at the end     an abort takes a waiting request out as ever
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.admit_every = ADMIT_EVERY
        self._steps = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        is_due = self._steps + 1 >= self.admit_every or _DUE_SHARE * len(self.waiting) >= len(self.running)
        scheduled = super().schedule(throttle_prefills or not is_due)
        self._steps = 0 if scheduled.scheduled_new_reqs else self._steps + 1
        return scheduled
