"""`--verify-sync`: whether what arrived is what was sent, and whether vLLM computes with what trains.

Checksums see the wire: a tensor that is skipped, missing or damaged. After loading nothing can be compared by name any more
(weights are fused and packed), so the probe looks at what comes out: forced logprobs of the same tokens on both sides. It sees
a tensor that is transposed or stale, a buffer, a tied head that was not packed again.
"""

import logging
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from accerl_mp.weight_sync.protocol import WrongWeights

PROBE_TOKENS = 256


class Bound(NamedTuple):
    """Of what kernels may do to a probe."""

    most: float
    """`relative_distance`."""
    left_out: float
    """Share of the tokens, those that differ most, which do not count."""


PROBE_BOUNDS = {torch.float32: Bound(4e-4, 0.0), torch.bfloat16: Bound(0.08, 0.02)}
"""SmolLM2 in bfloat16 against float32, also with logits twice as sharp, has 0.018 to 0.030, one untrained 0.010 to 0.015; one tensor
zeroed, rolled or exchanged in the middle or near the end gives 0.14 to 0.27. In nats no bound would do: noise of the sharper model (0.18)
is more than a zeroed tensor of the untrained one (0.07). In bfloat16 one of some hundred tokens may be nats off with all weights right.
"""
_LEAST_SPREAD = 0.1

_log = logging.getLogger(__name__)


def compare_sums(version: int, sent: dict[str, str], answers: list[dict[str, Any]]) -> None:
    """Raises WrongWeights naming process, worker and tensor. `answers`: of each inference process, in order."""
    for replica, answer in enumerate(answers):
        for worker, arrived in enumerate(answer["checksums"]):
            wrong = [name for name, expected in sent.items() if arrived.get(name) != expected]
            if wrong or len(arrived) != len(sent):
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                what = f"tensor {wrong[0]}{more} arrived damaged" if wrong else "there are tensors that were not sent"
                where = f"push {version} at inference/{replica}, worker {worker}"
                raise WrongWeights(f"{where}: {what} (checksums differ); it is not in use")


def probe_ids(version: int, vocab_size: int, max_model_len: int | None) -> list[int]:
    """Tokens from the whole vocabulary, the same on every rank."""
    length = min(PROBE_TOKENS, (max_model_len or PROBE_TOKENS + 1) - 1)
    return np.random.default_rng(version).integers(0, vocab_size, length).tolist()


def compare_logprobs(version: int, expected: np.ndarray, answers: list[dict[str, Any]], bound: Bound) -> None:
    """Raises WrongWeights if the `relative_distance` of a replica is over the bound. The first token of a prompt has no logprob."""
    if len(expected) < 2:
        return
    for replica, answer in enumerate(answers):
        got = np.array(answer["logprobs"])[1:]
        off, nats = relative_distance(got, expected[1:], bound.left_out), np.abs(got - expected[1:])
        differs = f"{nats.mean():.2g} nats on average, {nats.max():.2g} at worst"
        if not off <= bound.most:  # NaN fails too
            raise WrongWeights(
                f"push {version}: the probe of inference/{replica} is off: logprobs of {len(got)} tokens differ by {off:.2g} of their"
                f" spread (at most {bound.most:g}), {differs}: vLLM does not compute with the trainer's weights"
            )
        _log.info("push %d verified: inference/%d differs by %s, %.1g of the spread", version, replica, differs, off)


def relative_distance(got: np.ndarray, expected: np.ndarray, left_out: float) -> float:
    """Mean |difference| of logprobs [T] in units of the standard deviation of `expected`; NaN if one is no finite number.

    Both grow with the scale of the logits, so their ratio says how exactly a model is computed, not how sharp it is.

    left_out: share of the tokens, those that differ most, which do not count
    """
    distance = np.sort(np.abs(got - expected)) / max(float(np.std(expected)), _LEAST_SPREAD)
    if not np.isfinite(distance).all():
        return math.nan
    return float(distance[: len(distance) - int(left_out * len(distance))].mean())
