"""CUDA graphs of whole steps: which steps have one, and whether they compute what steps without compute.

A graph that was captured wrongly does not fail, it samples from something else than the model (`bounds.py`). So each engine is asked
once, when it has its first real weights, under a load of prompts of many lengths; if its graphs are wrong it goes on without.
"""

import asyncio
import logging
import math
import random
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from accerl_mp.config import InferenceConfig

if TYPE_CHECKING:
    from accerl_mp.inference.engine import Engine

_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, 2049, 128))
"""Tokens of a step that has a CUDA graph. vLLM's own end at twice --vllm-max-num-seqs, so that a step with a new turn's prompt in it has
none; where many episodes play that is nearly every step, and one took 38 ms with a model of 135M on an H200."""

WHOLE = {"compilation_config": {"cudagraph_mode": "FULL"}, "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}}
"""A step is one graph, also with prompts in it. vLLM's own choice breaks such a step at each layer's attention and starts the pieces from
Python: 16.6 ms where 128 episodes of a model of 135M play on an H200, 10.6 with these (bench/engine_loop.py). One split of a sequence's
keys: no buffers for more, and no kernel that combines them; only steps of few, long sequences would be faster with more."""

_MEASURED = "0.24."
"""The vLLM whose whole graphs were compared with steps without."""
_MOST_UNSPLIT = 32768
"""Tokens of a sequence that one split reads in time: 6 ms of a step with 30 layers."""

_LENGTHS = (2, 7, 20, 50, 90, 150, 250, 400, 700, 1000, 1000, 1000)
"""Of prompts, in tokens. Longer ones' logprobs would take gigabytes where the vocabulary is large."""
_ROUNDS, _REPLY = 2, 6
_RUNNING, _LONG_REPLY = 8, 60
"""Requests that decode meanwhile, so that steps hold both kinds, and tokens of their replies."""
_MOST_NATS = 0.15
"""Of the mean over the prompts, or the replies, of one length. bfloat16 in another batch makes 0.04; graphs that were wrong over 0.5."""

_log = logging.getLogger(__name__)


def is_measured(version: str) -> bool:
    """Whether this vLLM's whole graphs were compared."""
    return version.startswith(_MEASURED)


def graph_arguments(inference: InferenceConfig, version: str, most_tokens: int) -> dict[str, Any]:
    """Arguments of vLLM: which steps are graphs, and what of them. Where attention cannot (other than FlashAttention 3), vLLM falls back.

    most_tokens: of a step
    """
    sizes = {"cudagraph_capture_sizes": [size for size in _SIZES if size <= most_tokens]}
    is_plain = inference.infer_tp_size == 1 and not inference.enable_expert_parallel
    is_whole = is_measured(version) and is_plain and (inference.vllm_max_model_len or 0) <= _MOST_UNSPLIT
    return sizes | (WHOLE if is_whole else {})


class GraphGuard:
    """Asks an engine once whether its graphs are right, before its first request and its first probe."""

    def __init__(self, engine: "Engine", timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._is_asked = not engine.has_whole_graphs
        self.difference = 0.0
        """What came of it, in nats; inf: no number, no answer in time, or graphs that cannot be turned off."""

    async def ask(self) -> None:
        """Compare logprobs in graphs with those without; if they differ too much, or cannot be compared, turn the graphs off for good.

        waits for      some hundred replies of a few tokens, of vLLM alone: nothing else may be generated meanwhile
        unblocked by   `timeout_s` too; then the graphs are off
        if vLLM dies   EngineError
        """
        if self._is_asked:
            return
        self._is_asked = True
        try:
            self.difference, why = await asyncio.wait_for(_off_by(self._engine), self._timeout_s), "their logprobs are wrong"
        except (RuntimeError, TimeoutError) as error:
            self.difference, why = math.inf, f"they could not be compared: {type(error).__name__}: {error}"
        is_right = self.difference <= _MOST_NATS
        is_set = all(await self._engine.call_workers("graphs_on", is_right))
        if not is_set:
            _log.error("CUDA graphs cannot be turned on and off in this vLLM: whether their logprobs are right is not known")
        elif is_right:
            _log.info("CUDA graphs agree with steps without: off by %.2g nats", self.difference)
        else:
            _log.error("CUDA graphs: off by %.2g nats, %s. vLLM goes on without them, slower", self.difference, why)


async def _off_by(engine: "Engine") -> float:
    """Mean of |logprob in graphs - without| in nats, of what is worst: replies under load or prompts, of one length. inf: no number.

    Leaves the graphs off.
    """
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(engine.vocab_size) for _ in range(length)]

    made: list[tuple[Any, list[int], list[float]]] = []

    async def reply(ids: list[int], max_tokens: int) -> None:
        reply = await engine.generate("graphs", ids, max_tokens=max_tokens, temperature=1.0, salt="graphs")
        made.append((("replies", len(ids)), ids + reply.ids, reply.logprobs))

    longest = engine.max_model_len - _REPLY - 1
    groups = [[length for length in group if length <= longest] for group in _groups(_LENGTHS, _SIZES[-1] - 2 * _RUNNING)] * _ROUNDS
    running = [reply(tokens(length), _LONG_REPLY) for length in [10] * _RUNNING if length + _LONG_REPLY < engine.max_model_len]
    decoding = asyncio.gather(*running)
    try:
        for group in groups:
            await asyncio.gather(*(reply(tokens(length), _REPLY) for length in group))
        await decoding
    finally:
        decoding.cancel()
    prompts = [tokens(length) for length in sorted({length for group in groups for length in group})]
    made += [(("prompts", len(ids)), ids, await engine.forced_logprobs("graphs", ids)) for ids in prompts]
    if not all(await engine.call_workers("graphs_on", False)):
        return math.inf
    differences: defaultdict[Any, list[float]] = defaultdict(list)
    for kind, ids, seen in made:
        alone = await engine.forced_logprobs("graphs", ids)
        differences[kind] += [abs(one - other) for one, other in zip(seen, alone[len(alone) - len(seen) :], strict=True)]
    means = [statistics.fmean(values) for values in differences.values()]
    return max(means, default=0.0) if all(map(math.isfinite, means)) else math.inf


def _groups(lengths: tuple[int, ...], most: int) -> list[list[int]]:
    """In order, `most` tokens a group: one step of the sizes that have a graph."""
    groups: list[list[int]] = [[]]
    for length in lengths:
        if sum(groups[-1]) + length > most:
            groups.append([])
        groups[-1].append(length)
    return groups
