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

_LENGTHS = (2, 7, 20, 50, 90, 150, 250, 400, 700, 1000, 1500, 2000, 3000)
"""Of prompts, in tokens: together and alone they fall into steps of many sizes, with new prompts in them and without."""
_EACH, _REPLY = 3, 6
"""Prompts of a length, and tokens of a reply."""
_MOST_NATS = 0.15
"""Of the mean over the prompts, or the replies, of one length. bfloat16 in another batch makes 0.04; graphs that were wrong over 0.5."""

_log = logging.getLogger(__name__)


def graph_arguments(inference: InferenceConfig, version: str, most_tokens: int) -> dict[str, Any]:
    """Arguments of vLLM: which steps are graphs, and what of them. Where attention cannot (other than FlashAttention 3), vLLM falls back.

    most_tokens: of a step
    """
    sizes = {"cudagraph_capture_sizes": [size for size in _SIZES if size <= most_tokens]}
    is_plain = inference.infer_tp_size == 1 and not inference.enable_expert_parallel
    is_whole = version.startswith(_MEASURED) and is_plain and (inference.vllm_max_model_len or 0) <= _MOST_UNSPLIT
    return sizes | (WHOLE if is_whole else {})


async def leave_wrong_graphs(engine: "Engine") -> float:
    """Compare logprobs in graphs with those without; if they differ too much, turn the graphs off for good. Returns the difference.

    waits for      some hundred replies of a few tokens, of vLLM alone: nothing else may be generated meanwhile
    if vLLM dies   EngineError
    """
    difference = await _off_by(engine)
    if difference > _MOST_NATS:
        await engine.call_workers("graphs_on", False)
        _log.error("CUDA graphs give wrong logprobs here, off by %.2g nats: vLLM goes on without them, slower", difference)
    else:
        _log.info("CUDA graphs agree with steps without: off by %.2g nats", difference)
    return difference


async def _off_by(engine: "Engine") -> float:
    """Mean of |logprob in graphs - without| in nats, of what is worst: replies under load or prompts, of one length. inf: no number."""
    rng = random.Random(0)
    lengths = [length for length in _LENGTHS if length + _REPLY < engine.max_model_len]
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(length)] for _ in range(_EACH) for length in lengths]
    replies = [engine.generate("graphs", ids, max_tokens=_REPLY, temperature=1.0, salt="graphs") for ids in prompts]
    answers = await asyncio.gather(*replies)
    made = [(("replies", len(ids)), ids + reply.ids, reply.logprobs) for ids, reply in zip(prompts, answers, strict=True)]
    made += [(("prompts", len(ids)), ids, await engine.forced_logprobs("graphs", ids)) for ids in prompts[: len(lengths)]]
    await engine.call_workers("graphs_on", False)
    try:
        alone = [await engine.forced_logprobs("graphs", ids) for _, ids, _ in made]
    finally:
        await engine.call_workers("graphs_on", True)
    differences: defaultdict[Any, list[float]] = defaultdict(list)
    for (kind, _, seen), wanted in zip(made, alone, strict=True):
        differences[kind] += [abs(one - other) for one, other in zip(seen, wanted[len(wanted) - len(seen) :], strict=True)]
    worst = [statistics.fmean(values) for values in differences.values()]
    return max(worst) if all(map(math.isfinite, worst)) else math.inf
