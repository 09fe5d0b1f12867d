"""How much work a sample is for a trainer rank, and which rank gets the next group."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accerl_mp.files import read_text


@dataclass(frozen=True)
class FlopsEstimate:
    """FLOPs of forward and backward over a sample of T tokens: `per_token * T + per_pair * T^2`. Only ratios matter here."""

    per_token: float = 1.0
    per_pair: float = 0.0

    @classmethod
    def of_model(cls, model_path: Path) -> "FlopsEstimate":
        """From the model folder's config.json; proportional to tokens where that does not say enough."""
        try:
            config = json.loads(read_text(model_path / "config.json"))
            config = config.get("text_config", config)
            hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
            inner = config.get("moe_intermediate_size", config["intermediate_size"]) * config.get("num_experts_per_tok", 1)
            per_layer = 4 * hidden**2 + 3 * hidden * inner
            return cls(per_token=6.0 * (layers * per_layer + hidden * vocab), per_pair=6.0 * layers * hidden)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return cls()

    def of(self, num_tokens: np.ndarray) -> float:
        """Sum over samples of these lengths."""
        tokens = num_tokens.astype(np.float64)
        return float((self.per_token * tokens + self.per_pair * tokens**2).sum())


@dataclass(frozen=True)
class RankLoad:
    """What waits in a rank's ring."""

    rank: int
    num_tokens: int
    """Of samples that were not trained yet; so are the FLOPs."""
    flops: float
    num_missing: int
    """Samples that the rank waits for right now and that are not in its ring."""
    num_given: float = 0.0
    """Uses that the rank has had, and those that are left to the samples that wait."""


def order_ranks(loads: Sequence[RankLoad], estimate: FlopsEstimate, group_tokens: np.ndarray) -> list[int]:
    """Ranks in the order in which a group with samples of `group_tokens` is offered.

    First those that stand still; then those with the fewest tokens waiting, to within this group's. Among these, as a step has about
    the same tokens on all ranks, a group of long samples (more FLOPs a token than the rest) goes where there are fewest too many FLOPs
    for the tokens, one of short samples where there are most.
    """
    num_tokens, flops = int(group_tokens.sum()), estimate.of(group_tokens)
    fewest = min(load.num_tokens for load in loads)
    per_token = (flops + sum(load.flops for load in loads)) / (num_tokens + sum(load.num_tokens for load in loads))
    sign = 1.0 if flops > per_token * num_tokens else -1.0

    def urgency(load: RankLoad) -> tuple[bool, bool, float, float, int]:
        excess = load.flops - per_token * load.num_tokens
        return load.num_missing <= 0, load.num_tokens > fewest + num_tokens, sign * excess, load.flops, load.rank

    return [load.rank for load in sorted(loads, key=urgency)]


def order_by_count(loads: Sequence[RankLoad]) -> list[int]:
    """As `order_ranks`, where each rank must get the same number of samples (`--synchronous`): the one that was given the fewest first.

    Whether a rank waits says nothing here: after a push one looks into its ring before another.
    """
    return [load.rank for load in sorted(loads, key=lambda load: (load.num_given, load.flops, load.rank))]
