"""RLSample: one trained sequence, the record that travels from rollout to trainer.

Imports NumPy only: rollout, ingest and trainer all build or read it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

UNTRAINED = -100
"""Label of a token that is not trained (PyTorch's ignore_index)."""

_TOKEN_FIELDS = {
    "input_ids": np.int32,
    "attention_mask": np.uint8,
    "labels": np.int32,
    "old_logprobs": np.float32,
    "token_rewards": np.float32,
    "token_advantages": np.float32,
    "response_indices": np.int32,
}
_TRAINED_FIELDS = {"response_ids": np.int32, "output_versions": np.int32}
ARRAY_FIELDS: dict[str, Any] = _TOKEN_FIELDS | _TRAINED_FIELDS
"""Every array field and its dtype, in the order in which the codec writes them."""
_LAYOUT = tuple((name, np.dtype(dtype), name in _TOKEN_FIELDS) for name, dtype in ARRAY_FIELDS.items())
FLOAT_FIELDS = ("old_logprobs", "token_rewards", "token_advantages")
"""One behind the other in ARRAY_FIELDS, too."""
_count = np.count_nonzero
_get_arrays = attrgetter(*ARRAY_FIELDS)


class SampleError(ValueError):
    """A sample breaks the contract. Names the field, what was expected and what was found."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(field, expected, got)
        self.field, self.expected, self.got = field, expected, got

    def __str__(self) -> str:
        return f"RLSample.{self.field}: expected {self.expected}, got {self.got}"


@dataclass(slots=True, eq=False)
class RLSample:
    """One episode (or one turn, with `--history-mode window`) as tokens. T tokens, R of them trained.

    Example, a prompt of 3 tokens and a reply of 2, then 1 token of the next prompt:
        input_ids        [ 5,  6,  7, 40, 41,  8]
        labels           [-100, -100, -100, 40, 41, -100]
        old_logprobs     [0, 0, 0, -0.3, -1.2, 0]        at the index of the token itself, not shifted
        response_indices [-1, -1, -1, 0, 0, -1]
        response_ids     [40, 41]
    """

    algorithm: str
    """"ppo", "grpo" or "rloo": the trainer's own, or the sample is refused."""
    input_ids: np.ndarray
    """[T] int32, prompts and replies as sampled."""
    attention_mask: np.ndarray
    """[T] uint8, all ones."""
    labels: np.ndarray
    """[T] int32, the token's own id where trained, else UNTRAINED."""
    old_logprobs: np.ndarray
    """[T] float32, nats, of the distribution that was sampled from; 0 where untrained."""
    token_rewards: np.ndarray
    """[T] float32, a turn's reward on the last token of its reply."""
    token_advantages: np.ndarray
    """[T] float32, 0 where untrained."""
    response_indices: np.ndarray
    """[T] int32, number of the turn, -1 where untrained."""
    response_ids: np.ndarray
    """[R] int32, the trained tokens in order."""
    output_versions: np.ndarray
    """[R] int32, policy version that sampled each trained token."""
    advantage: float = 0.0
    """Group advantage (grpo, rloo); 0 with ppo."""
    reward: float = 0.0
    """Return that entered the group statistics (penalties included)."""
    episode_return: float = 0.0
    """Sum of step rewards."""
    group_id: int = 0
    game_id: int = 0
    """Index into the run's game list."""
    episode_id: int = 0
    truncated: bool = False
    """Cut by the turn limit or the window, not ended by the game."""
    won: bool = False
    num_turns: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """R, the number of trained tokens."""
        return len(self.response_ids)

    def validate(self) -> "RLSample":
        """Check every equality of the contract; returns self. Raises SampleError at the first that fails.

        Runs at every hop of every sample, so whole arrays are compared once and counted: what is not 0 (or -1) must be as many
        as what is trained.
        """
        num_tokens = self._check_arrays()
        _expect("input_ids", "at least 2 tokens", num_tokens, num_tokens >= 2)
        trained = (self.labels != UNTRAINED).nonzero()[0]
        _expect("labels", "at least 1 trained token", 0, len(trained) > 0)
        _expect("labels", "index 0 untrained", UNTRAINED if trained[0] else int(self.labels[0]), trained[0] > 0)
        _expect("attention_mask", "all ones", "zeros or others", _count(self.attention_mask == 1) == num_tokens)
        self._check_trained(trained)
        self._check_floats(trained)
        self._check_scalars()
        return self

    def _check_arrays(self) -> int:
        num_tokens = len(self.input_ids)
        for array, (name, dtype, is_per_token) in zip(_get_arrays(self), _LAYOUT, strict=True):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise SampleError(name, f"1-D {dtype.name} array", _describe(array))
            if is_per_token and len(array) != num_tokens:
                raise SampleError(name, f"{num_tokens} entries, as input_ids", len(array))
        return num_tokens

    def _check_trained(self, trained: np.ndarray) -> None:
        """`trained`: [R] indices of trained tokens."""
        num_trained = len(trained)
        for name in _TRAINED_FIELDS:
            got = len(getattr(self, name))
            _expect(name, f"{num_trained} entries, one a trained token", got, got == num_trained)
        labels = self.labels[trained].tobytes()
        _expect("labels", "each trained label is its own token id", "another id", labels == self.input_ids[trained].tobytes())
        _expect("response_ids", "the trained tokens in order", "others", labels == self.response_ids.tobytes())
        turns = self.response_indices
        _expect("response_indices", ">= 0 where trained", "negative", _count(turns[trained] >= 0) == num_trained)
        _expect("response_indices", "-1 where untrained", "others", _count(turns != -1) == num_trained)
        _expect("output_versions", ">= 0", "negative", _count(self.output_versions >= 0) == num_trained)

    def _check_floats(self, trained: np.ndarray) -> None:
        floats = np.concatenate((self.old_logprobs, self.token_rewards, self.token_advantages)).reshape(3, -1)
        of_trained = floats[:, trained]
        is_finite, is_set = np.isfinite(of_trained), floats != 0
        if not (_count(is_finite) == of_trained.size and _count(is_set) == _count(of_trained != 0)):
            self._raise_for_floats(is_finite, is_set, trained)
        _expect("old_logprobs", "<= 0", of_trained[0], _count(of_trained[0] <= 1e-4) == len(trained))

    def _raise_for_floats(self, is_finite: np.ndarray, is_set: np.ndarray, trained: np.ndarray) -> None:
        is_set[:, trained] = False
        for name, finite, other in zip(FLOAT_FIELDS, is_finite, is_set, strict=True):
            _expect(name, "finite where trained", getattr(self, name)[trained], bool(finite.all()))
            _expect(name, "0 where untrained", "other values", not other.any())

    def _check_scalars(self) -> None:
        for name in ("advantage", "reward", "episode_return"):
            value = getattr(self, name)
            _expect(name, "a finite number", value, math.isfinite(value))


def joined_hold(arrays: Sequence[np.ndarray], floats: np.ndarray, lengths: Sequence[int], num_trained: Sequence[int]) -> bool:
    """Whether every sample of a group keeps what `validate` checks of arrays, looked at in the joined arrays, at a fraction of the cost.

    `arrays`: for each of ARRAY_FIELDS that of all samples, one after the other, of the right type and `sum(lengths)` or
    `sum(num_trained)` long; `floats`: [3, sum(lengths)] those of FLOAT_FIELDS. At least one sample. Which one is wrong, and how,
    `validate` says.
    """
    ids, mask, labels, _, _, _, turns, response_ids, versions = arrays
    starts = np.array([0, *accumulate(lengths)])
    is_trained = labels != UNTRAINED
    trained = is_trained.nonzero()[0]
    total = len(trained)
    before = trained.searchsorted(starts).tolist()
    of_trained = floats.take(trained, axis=1)
    return bool(
        [end - start for start, end in pairwise(before)] == num_trained
        and min(num_trained) > 0
        and not is_trained[starts[:-1]].any()
        and _count(mask == 1) == len(ids)
        and labels.take(trained).tobytes() == ids.take(trained).tobytes() == response_ids.tobytes()
        and _count(turns.take(trained) >= 0) == total == _count(turns != -1) == _count(versions >= 0)
        and _count(np.isfinite(of_trained)) == of_trained.size
        and _count(floats != 0) == _count(of_trained != 0)
        and _count(of_trained[0] <= 1e-4) == total
    )


SCALAR_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(RLSample) if f.name not in ARRAY_FIELDS)
"""Every field that is not an array, `algorithm` first."""


def count_quarters(lengths: Sequence[int], max_length: int) -> list[int]:
    """How many of `lengths` lie in each quarter of `max_length`, the shortest first; what is longer counts to the last."""
    counts = [0] * 4
    for length in lengths:
        counts[min(3, 4 * max(0, length - 1) // max_length)] += 1
    return counts


def _expect(field: str, expected: object, got: object, holds: bool) -> None:
    if not holds:
        raise SampleError(field, expected, got)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-D {value.dtype} array"
    return type(value).__name__
