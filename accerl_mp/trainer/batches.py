"""Samples -> tensors of a micro-batch. One form for both layouts: trained tokens are [R] whatever rows they come from.

packed  one row [1, T] of several samples, position ids restart at 0 in each
padded  [B, S], padding on the right, which no token of a causal model sees: no mask
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from accerl_mp.models.attention import Segments
from accerl_mp.samples import UNTRAINED, RLSample


@dataclass
class MicroBatch:
    """B rows, S columns, N samples, R trained tokens."""

    input_ids: Tensor
    """[B, S] int64."""
    position_ids: Tensor
    """[B, S] int64."""
    prediction_indices: Tensor
    """[R] int64 into the flattened rows: where each trained token is predicted, one before it."""
    targets: Tensor
    """[R] int64, the trained tokens."""
    old_logprobs: Tensor
    """[R] float32."""
    advantages: Tensor
    """[R] float32."""
    sequence_ids: Tensor
    """[R] int64, 0-based sample of each trained token."""
    sequence_lengths: Tensor
    """[N] int64, trained tokens of each sample."""
    is_on_policy: Tensor
    """[R] float32, 1 where the token was sampled by the trainer's own version."""
    lengths: list[int]
    """[N] tokens of each sample."""
    is_packed: bool
    segments: Segments | None = None

    def pinned(self) -> "MicroBatch":
        """In memory from which a copy to the GPU runs beside the GPU's work."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> "MicroBatch":
        """On `device`, without waiting for the copy."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "MicroBatch":
        segments = self.segments.moved(move) if self.segments else None
        moved = {f.name: move(getattr(self, f.name)) for f in fields(self) if f.type is Tensor}
        return MicroBatch(**moved, lengths=self.lengths, is_packed=self.is_packed, segments=segments)


def build_micro_batch(samples: list[RLSample], *, packed: bool, version: int, algorithm: str) -> MicroBatch:
    """On the CPU. `algorithm`: ppo trains on token advantages, grpo and rloo on the sample's one advantage."""
    lengths = [len(sample) for sample in samples]
    width = max(lengths)
    starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(len(samples)) * width
    trained = [np.flatnonzero(sample.labels != UNTRAINED) for sample in samples]
    counts = [len(indices) for indices in trained]
    if algorithm == "ppo":
        advantages = np.concatenate([sample.token_advantages[indices] for sample, indices in zip(samples, trained, strict=True)])
    else:
        advantages = np.repeat(np.array([sample.advantage for sample in samples], np.float32), counts)
    versions = np.concatenate([sample.output_versions for sample in samples])
    return MicroBatch(
        input_ids=_rows([sample.input_ids for sample in samples], packed, width),
        position_ids=_rows([np.arange(length) for length in lengths], packed, width),
        prediction_indices=_int64(np.concatenate([start + indices - 1 for start, indices in zip(starts, trained, strict=True)])),
        targets=_int64(np.concatenate([sample.response_ids for sample in samples])),
        old_logprobs=torch.from_numpy(
            np.concatenate([sample.old_logprobs[indices] for sample, indices in zip(samples, trained, strict=True)])
        ),
        advantages=torch.from_numpy(advantages),
        sequence_ids=_int64(np.repeat(np.arange(len(samples)), counts)),
        sequence_lengths=_int64(np.array(counts)),
        is_on_policy=torch.from_numpy((versions == version).astype(np.float32)),
        lengths=lengths,
        is_packed=packed,
        segments=Segments.of(lengths, "cpu") if packed else None,
    )


def _rows(parts: list[np.ndarray], packed: bool, width: int) -> Tensor:
    if packed:
        return _int64(np.concatenate(parts))[None]
    rows = np.zeros((len(parts), width), np.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(rows)


def _int64(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
