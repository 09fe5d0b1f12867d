"""Replies put together from what vLLM's engine loop sends: whole ones, and parts of those that are aborted (scheduler.py).

AsyncLLM does the same for its requests with much that is not needed here (text, ranks, statistics, tasks of its own) in the one
process that serves every rollout, which bounds short replies of a small model on a GPU.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any


class EngineLost(RuntimeError):
    """vLLM's engine has died under a request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What vLLM made of one request."""

    ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Of the distribution that was sampled from."""
    finish_reason: str
    """"stop", "length", "abort"; vLLM's own "error" and "repetition" as well."""
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""


@dataclass(slots=True)
class _Growing:
    reply: asyncio.Future[Generation]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0


class ReplyCollector:
    """The requests that were sent to vLLM's engine loop around AsyncLLM. One event loop."""

    def __init__(self) -> None:
        self._growing: dict[str, _Growing] = {}

    def expect(self, request_id: str) -> asyncio.Future[Generation]:
        """Collect this request's outputs from now on; the future is done with the last."""
        growing = _Growing(asyncio.get_running_loop().create_future())
        self._growing[request_id] = growing
        return growing.reply

    def forget(self, request_id: str) -> None:
        """Whatever still comes for it is dropped."""
        self._growing.pop(request_id, None)

    def take(self, outputs: Any) -> None:
        """Take what belongs to expected requests out of an EngineCoreOutputs; AsyncLLM finds the rest in it."""
        others = []
        for output in outputs.outputs:
            growing = self._growing.get(output.request_id)
            if growing is None:
                others.append(output)
            else:
                self._grow(growing, output)
        outputs.outputs = others

    def fail(self) -> None:
        """Nothing comes any more: every waiter gets EngineLost."""
        for growing in self._growing.values():
            if not growing.reply.done():
                growing.reply.set_exception(EngineLost("vLLM's engine sends nothing any more"))
        self._growing.clear()

    def _grow(self, growing: _Growing, output: Any) -> None:
        growing.ids += output.new_token_ids
        if (logprobs := output.new_logprobs) is not None:
            growing.logprobs += logprobs.logprobs[:, 0].tolist()  # [tokens, 1]: the sampled one's
        if (prefill := output.prefill_stats) is not None and not growing.num_cached_tokens:
            growing.num_cached_tokens = prefill.num_cached_tokens
        if output.finish_reason is not None:
            del self._growing[output.request_id]
            if not growing.reply.done():
                reason = str(output.finish_reason)
                growing.reply.set_result(Generation(growing.ids, growing.logprobs, reason, growing.num_cached_tokens))
