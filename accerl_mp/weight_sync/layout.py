"""How the tensors of a model lie in one stretch of bytes, and how a tensor's bytes are summed up for comparison.

Both ends compute the same layout from the manifest alone, so that a push is nothing but bytes, cut into messages. A push of a
part of the model fills its part of the same layout: a tensor's place in staging never changes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

Manifest = list[tuple[str, tuple[int, ...], str]]
"""(checkpoint name, shape, dtype such as "float32") of every tensor of the model, in sending order."""

Runs = list[tuple[int, int]]
"""(index of the first slot, number of slots) of each stretch of neighbours that a push sends, in order."""

_ALIGNMENT = 16
"""Each tensor starts at a multiple of this, so that a view of the staging bytes is aligned for every dtype."""

_WORDS_AT_A_TIME = 1 << 20
_WEIGHT_PERIOD = 65521


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size_bytes: int

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """The tensor inside `staging` (flat uint8), not a copy."""
        return self.bytes_of(staging).view(self.dtype).view(self.shape)

    def bytes_of(self, staging: torch.Tensor) -> torch.Tensor:
        """The tensor's own bytes inside `staging`."""
        return staging[self.offset : self.offset + self.size_bytes]


def plan_layout(manifest: Iterable[tuple[str, Iterable[int], str]]) -> tuple[list[Slot], int]:
    """A slot for each tensor, in order, and the bytes of all of them together."""
    slots, offset = [], 0
    for name, shape, dtype_name in manifest:
        dtype, shape = getattr(torch, dtype_name), tuple(shape)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        slots.append(Slot(name, shape, dtype, offset, size_bytes))
        offset += align(size_bytes)
    return slots, offset


def align(num_bytes: int) -> int:
    """Rounded up to where the next tensor may start."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def find_runs(indices: Iterable[int]) -> Runs:
    """Ascending slot indices as stretches of neighbours: `[0, 1, 4]` -> `[(0, 2), (4, 1)]`."""
    runs: Runs = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def slots_of(slots: list[Slot], runs: Runs) -> list[Slot]:
    """Those that `runs` names, in order."""
    return [slot for first, count in runs for slot in slots[first : first + count]]


def iter_messages(slots: list[Slot], runs: Runs, bucket_bytes: int) -> Iterator[slice]:
    """The byte ranges of the layout that travel as one message each."""
    for first, count in runs:
        last = slots[first + count - 1]
        end = last.offset + align(last.size_bytes)
        for start in range(slots[first].offset, end, bucket_bytes):
            yield slice(start, min(start + bucket_bytes, end))


def checksum(tensor: torch.Tensor) -> str:
    """A sum of the tensor's bytes that depends on their order; the same on every device.

    Two sums of 32-bit words, one weighted by position: any single flipped bit changes both.
    """
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 4))
    words = padded.view(torch.int32)
    plain = weighted = 0
    for start in range(0, len(words), _WORDS_AT_A_TIME):
        chunk = words[start : start + _WORDS_AT_A_TIME].long()
        positions = torch.arange(start, start + len(chunk), device=chunk.device) % _WEIGHT_PERIOD + 1
        plain += int(chunk.sum())
        weighted += int((chunk * positions).sum())
    return f"{plain & (2**64 - 1):016x}{weighted & (2**64 - 1):016x}"
