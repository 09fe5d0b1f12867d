"""Episodes to numbers, each with a 95 % interval.

Rates have Wilson's interval, which stays inside [0, 1] and means something at 0 of 20; the normalised score has one from resampled
episodes; means have 1.96 standard errors. All take episodes as independent: those of one game are less so, and the truth is a little wider.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_Z = 1.959964
_RESAMPLES = 1000

Record = dict[str, Any]
"""An episode as `tools/playing.py` writes it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: float, trials: float) -> Estimate:
    """A rate. Without trials: nan within [0, 1].

    Example: `wilson(0, 20)` is 0 within [0, 0.161].
    """
    if trials == 0:
        return Estimate(math.nan, 0.0, 1.0)
    rate, square = successes / trials, _Z * _Z
    centre = (rate + square / (2 * trials)) / (1 + square / trials)
    half = _Z / (1 + square / trials) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials * trials))
    return Estimate(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def mean_of(values: Sequence[float]) -> Estimate:
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    array = np.asarray(values, np.float64)
    half = _Z * array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return Estimate(float(array.mean()), float(array.mean() - half), float(array.mean() + half))


def ratio_of(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Sum of parts / sum of wholes, as `TextWorld/NormalizedScore`; the interval from resampled episodes, always the same ones."""
    part, whole = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    if whole.sum() == 0:
        return Estimate(math.nan, math.nan, math.nan)
    chosen = np.random.default_rng(0).integers(len(part), size=(_RESAMPLES, len(part)))
    sums = whole[chosen].sum(1)
    ratios = part[chosen].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(float(part.sum() / whole.sum()), float(low), float(high))


def estimates(records: Sequence[Record]) -> dict[str, Estimate]:
    """What the tables show of a set of episodes."""

    def column(name: str) -> list[float]:
        return [record[name] for record in records]

    return {
        "win_rate": wilson(sum(column("won")), len(records)),
        "normalized_score": ratio_of(column("score"), column("max_score")),
        "invalid_rate": wilson(sum(column("num_invalid")), sum(column("num_turns"))),
        "truncated_rate": wilson(sum(column("truncated")), len(records)),
        "turns": mean_of(column("num_turns")),
        "env_steps": mean_of(column("num_env_steps")),
    }


HEADER = ["episodes", "win rate", "normalised score", "invalid rate", "turns", "env steps"]


def cells(records: Sequence[Record]) -> list[str]:
    """One row under HEADER."""
    values = estimates(records)
    rates = [_rate(values[name]) for name in ("win_rate", "normalized_score", "invalid_rate")]
    return [str(len(records)), *rates, *(_mean(values[name]) for name in ("turns", "env_steps"))]


def rate_of_wins(records: Sequence[Record]) -> str:
    """As in `cells`: the rate, then its interval."""
    return _rate(wilson(sum(record["won"] for record in records), len(records)))


def as_json(records: Sequence[Record]) -> dict[str, Any]:
    """The same as numbers; an interval is [low, high]."""
    numbers = {name: [value.value, value.low, value.high] for name, value in estimates(records).items()}
    rows = {name: {"value": _finite(value), "interval": [_finite(low), _finite(high)]} for name, (value, low, high) in numbers.items()}
    return {"episodes": len(records), "games": len({record["game"] for record in records}), **rows}


def grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Records by what `key` says, sorted by it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items()))


def _rate(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _mean(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.1f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
