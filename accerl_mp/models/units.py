"""A model's tensors for a push or an export, a unit at a time: each decoder layer, and each tensor outside of the layers.

A layer has a dozen tensors: they are cast and gathered together, one kernel launch and one collective instead of a dozen.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from accerl_mp.models.names import checkpoint_form, named_tensors, sent_dtype, unit_of

_ALIGNMENT = 16


@dataclass(frozen=True)
class Whole:
    """One tensor of a checkpoint."""

    name: str
    """Its checkpoint name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """To be stored or sent in; the pieces may still be in another."""
    pieces: list[Tensor]
    """Flat; one behind the other they are the tensor. May be views of the model's own memory: for reading, before it changes."""

    def tensor(self) -> Tensor:
        """As one, cast and in its shape; a view of the model where it lies there like that."""
        flat = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return flat.to(self.dtype).view(self.shape)


def iter_units(model: nn.Module, *, trainable_only: bool, dtype: torch.dtype | None) -> Iterator[list[Whole]]:
    """The tensors of `names.manifest`, in its order; floats are for `dtype` unless None. See `names.named_tensors` for `trainable_only`.

    Collective where the model is sharded over several ranks: every rank iterates to the end, at the same place in its program.
    """
    for _, unit in itertools.groupby(named_tensors(model, trainable_only), key=lambda named: unit_of(named[0])):
        yield _gather(model, list(unit), dtype)


def iter_weights(model: nn.Module, *, trainable_only: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, whole tensor on the model's device) of `iter_units`."""
    for unit in iter_units(model, trainable_only=trainable_only, dtype=dtype):
        for whole in unit:
            yield whole.name, whole.tensor()


@torch.no_grad()
def _gather(model: nn.Module, unit: list[tuple[str, Tensor]], dtype: torch.dtype | None) -> list[Whole]:
    targets = [sent_dtype(tensor, dtype) for _, tensor in unit]
    pieces = [[] if _is_spread(tensor) else [_local(tensor).reshape(-1)] for _, tensor in unit]
    spread = [index for index, (_, tensor) in enumerate(unit) if _is_spread(tensor)]
    if spread:
        gathered = _gather_shards([unit[index][1] for index in spread], [targets[index] for index in spread])
        for index, found in zip(spread, gathered, strict=True):
            pieces[index] = found
    wholes = [Whole(name, tuple(tensor.shape), target, parts) for (name, tensor), target, parts in zip(unit, targets, pieces, strict=True)]
    return [form for whole in wholes for form in _checkpoint_forms(model, whole)]


def _checkpoint_forms(model: nn.Module, whole: Whole) -> list[Whole]:
    if getattr(model, "_weight_conversions", None) is None:
        return [whole]
    forms = checkpoint_form(model, whole.name, whole.tensor())
    return [Whole(name, tuple(tensor.shape), whole.dtype, [tensor.reshape(-1)]) for name, tensor in forms]


def _is_spread(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _gather_shards(tensors: list[DTensor], targets: list[torch.dtype]) -> list[list[Tensor]]:
    """The flat pieces of each tensor, one a rank that has rows of it: cast before the gathering, all in one collective."""
    mesh = tensors[0].device_mesh
    assert all(tensor.placements == (Shard(0),) and tensor.device_mesh == mesh for tensor in tensors), "FSDP2 shards rows over all ranks"
    num_ranks, widths, offsets, end = mesh.size(), [], [], 0
    for tensor, target in zip(tensors, targets, strict=True):
        rows = -(-tensor.shape[0] // num_ranks)  # of the first ranks; the last may have fewer, or none
        widths.append(rows * tensor.shape[1:].numel())
        offsets.append(end)
        end += -(-widths[-1] * target.itemsize // _ALIGNMENT) * _ALIGNMENT
    own = torch.empty(end, dtype=torch.uint8, device=_local(tensors[0]).device)
    locals_ = [_local(tensor).reshape(-1) for tensor in tensors]
    views = [_view(own, offset, len(local), target) for offset, local, target in zip(offsets, locals_, targets, strict=True)]
    torch._foreach_copy_(views, locals_)
    everyone = own.new_empty(num_ranks * end)
    dist.all_gather_into_tensor(everyone, own, group=mesh.get_group())
    pieces = []
    for tensor, target, width, offset in zip(tensors, targets, widths, offsets, strict=True):
        sizes = [min(width, tensor.numel() - rank * width) for rank in range(num_ranks)]
        pieces.append([_view(everyone, rank * end + offset, size, target) for rank, size in enumerate(sizes) if size > 0])
    return pieces


def _view(memory: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
