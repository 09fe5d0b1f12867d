"""`--verify-sync`: whether what arrived is what was sent, and whether vLLM computes with what trains.

Checksums see the wire: a tensor that is skipped, missing or damaged. After loading nothing can be compared by name any more
(weights are fused and packed), so the probe looks at what comes out: forced logprobs of the same tokens on both sides. It sees
a tensor that is transposed or stale, a buffer, a tied head that was not packed again.
"""

import logging
from typing import Any

import numpy as np
import torch

from accerl_mp.weight_sync.protocol import WrongWeights

PROBE_TOKENS = 64
PROBE_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean |logprob difference| between trainer and vLLM over the probe: kernels alone stay far below, wrong weights give nats."""

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


def compare_logprobs(version: int, expected: np.ndarray, answers: list[dict[str, Any]], bound: float) -> None:
    """Raises WrongWeights if the mean difference is over `bound`."""
    for replica, answer in enumerate(answers):
        distance = np.abs(np.array(answer["logprobs"]) - expected)
        if not distance.mean() <= bound:  # NaN fails too
            raise WrongWeights(
                f"push {version}: the probe of inference/{replica} is off: logprobs of {len(expected)} tokens differ by"
                f" {distance.mean():.2g} nats on average (at most {bound:g}), {distance.max():.2g} at worst: vLLM does not compute with"
                " the trainer's weights"
            )
        _log.info("push %d verified: inference/%d differs by %.1g nats on average", version, replica, distance.mean())
