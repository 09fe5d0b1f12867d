"""vLLM's scheduler, but a reply's tokens leave its process together: one message a reply, not one a step for every running reply.

Nobody here reads a reply before it is whole. A message a step is packed, sent and unpacked by threads that share their interpreter
with the loop that launches the next step: 3 to 27 % of the time of a step on an H200, by the load (bench/engine_loop.py).

vLLM calls `make_scheduler` by its own option `scheduler_cls`. What this project asks of it comes as vLLM's utilities do, as a method
of EngineCore's (see the end), by `Engine`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

_MOST_PIECES = 128
"""Steps whose logprobs lie about singly: 500 bytes each, where joined ones take 12 a token."""


def make_scheduler(*args: Any, vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler that vLLM would take by itself, with outputs held."""
    kind = HoldingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HoldingScheduler
    return kind(*args, vllm_config=vllm_config, **options)


@dataclass(slots=True)
class _Begun:
    """What a reply has so far."""

    client: int
    prefill_stats: Any
    ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)

    def add(self, output: EngineCoreOutput) -> None:
        self.ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
            if len(self.logprobs) == _MOST_PIECES:
                self.logprobs = [_joined(self.logprobs)]

    def put_into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """`output` with all of it."""
        output.new_token_ids, output.prefill_stats = self.ids, self.prefill_stats
        output.new_logprobs = _joined(self.logprobs) if self.logprobs else None
        return output


class Holding:
    """A scheduler's outputs wait until their reply is over; the last one takes them along. To stand before a Scheduler of vLLM's."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun: dict[str, _Begun] = {}

    def update_from_output(self, *args: Any) -> dict[int, EngineCoreOutputs]:
        """Of a step: the replies that are over, by client. A client that gets none gets no message."""
        found = super().update_from_output(*args)  # type: ignore[misc]
        for client, outputs in found.items():
            outputs.outputs = [whole for output in outputs.outputs if (whole := self._take(client, output)) is not None]
        return {client: outputs for client, outputs in found.items() if _says_something(outputs)}

    def finish_requests(self, *args: Any) -> Any:
        """What an aborted reply has is gone with it, unless `give` was called before."""
        before = set(self.requests)
        finished = super().finish_requests(*args)  # type: ignore[misc]
        for key in before - set(self.requests):
            self._begun.pop(key, None)
        return finished

    def num_made(self) -> dict[str, int]:
        """{internal request id: output tokens} of every request that is not over."""
        return {key: request.num_output_tokens for key, request in self.requests.items()}

    def give(self) -> dict[int, EngineCoreOutputs]:
        """All that replies have so far, by client. They begin anew."""
        given: dict[int, EngineCoreOutputs] = {}
        for key, begun in self._begun.items():
            given.setdefault(begun.client, EngineCoreOutputs(outputs=[])).outputs.append(begun.put_into(EngineCoreOutput(key, [])))
        self._begun = {}
        return given

    def _take(self, client: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The last output of a reply, with all of it. Any other is taken in: None."""
        key, is_over = output.request_id, output.finish_reason is not None
        begun = self._begun.get(key)
        if begun is None:
            if is_over:
                return output
            begun = self._begun[key] = _Begun(client, output.prefill_stats)
        begun.add(output)
        if not is_over:
            return None
        del self._begun[key]
        return begun.put_into(output)


class HoldingScheduler(Holding, Scheduler):
    """Where a step is scheduled after the one before."""


class HoldingAsyncScheduler(Holding, AsyncScheduler):
    """Where it is scheduled while that one computes."""


def _says_something(outputs: EngineCoreOutputs) -> bool:
    return bool(outputs.outputs or outputs.finished_requests or outputs.scheduler_stats)


def _joined(pieces: list[LogprobsLists]) -> LogprobsLists:
    ids, logprobs, ranks, _ = zip(*pieces, strict=True)
    return LogprobsLists(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks), None)


def _give_outputs(core: Any) -> None:
    """Send all that replies have so far, ahead of the answer to this call. An abort that follows then ends them with all their tokens."""
    for message in core.scheduler.give().items():
        core.output_queue.put_nowait(message)


def _swap_weights(core: Any, version: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """`WeightReceiver.sync_swap` on every worker, and `num_made` at that moment."""
    return core.collective_rpc("sync_swap", args=(version,)), core.scheduler.num_made()


EngineCore.give_outputs, EngineCore.swap_weights = _give_outputs, _swap_weights
