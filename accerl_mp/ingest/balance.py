"""How much work a sample is for a trainer rank, and which rank gets the next group."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class FlopsEstimate:
    """FLOPs of forward and backward over a sample of T tokens: `per_token * T + per_pair * T^2`. Only ratios matter here."""

    per_token: float = 1.0
    per_pair: float = 0.0

    @classmethod
    def of_model(cls, model_path: Path) -> "FlopsEstimate":
        """From the model folder's config.json; proportional to tokens where that does not say enough."""
        file = model_path / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        config = config.get("text_config", config)
        try:
            hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
            inner = config.get("moe_intermediate_size", config["intermediate_size"]) * config.get("num_experts_per_tok", 1)
        except KeyError:
            return cls()
        per_layer = 4 * hidden**2 + 3 * hidden * inner
        return cls(per_token=6.0 * (layers * per_layer + hidden * vocab), per_pair=6.0 * layers * hidden)

    def of(self, num_tokens: np.ndarray) -> float:
        """Sum over samples of these lengths."""
        tokens = num_tokens.astype(np.float64)
        return float((self.per_token * tokens + self.per_pair * tokens**2).sum())


@dataclass(frozen=True)
class RankLoad:
    """What waits in a rank's ring."""

    rank: int
    flops: float
    """Of samples that were not trained yet."""
    num_missing: int
    """Samples that the rank waits for right now and that are not in its ring."""


def order_ranks(loads: Sequence[RankLoad]) -> list[int]:
    """Ranks in the order in which the next group is offered: those that stand still first, then the least work waiting."""
    return [load.rank for load in sorted(loads, key=lambda load: (load.num_missing <= 0, load.flops, load.rank))]
