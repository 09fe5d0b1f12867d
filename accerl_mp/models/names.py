"""What travels to vLLM and what an export holds: the model's tensors under the names of its checkpoint files.

Tied weights come once, under the name that the model keeps; where Transformers fuses weights on loading (experts of a mixture), its
own reverse conversion splits them again.
"""

import functools
import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")


def manifest(model: nn.Module, *, trainable_only: bool, dtype: torch.dtype | None) -> list[tuple[str, tuple[int, ...], str]]:
    """(checkpoint name, shape, dtype such as "bfloat16") of what `units.iter_units` gives, in its order, without communication."""
    entries = []
    for name, tensor in named_tensors(model, trainable_only):
        target, parts = sent_dtype(tensor, dtype), [(name, tensor)]
        if getattr(model, "_weight_conversions", None) is not None:
            parts = list(checkpoint_form(model, name, torch.empty(tuple(tensor.shape), dtype=target, device="meta")))
        for checkpoint_name, part in parts:
            entries.append((checkpoint_name, tuple(part.shape), str(target).removeprefix("torch.")))
    return entries


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Floats are cast to `dtype` unless None, all else stays."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def remember_conversion(model: nn.Module) -> None:
    """Keep the model's weight conversion. Before sharding: FSDP2 changes the classes' names, by which it is looked up."""
    conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    model._weight_conversions = conversions or None  # type: ignore[assignment]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds."""
    for name, buffer in model.named_buffers():
        owner, _, own_name = name.rpartition(".")
        if own_name not in model.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def named_tensors(model: nn.Module, trainable_only: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, as they are: a rank's own shards.

    `trainable_only` leaves out decoder layers, and tensors outside of them, in which nothing trains. A layer goes whole: vLLM fuses
    its parts (q, k and v; gate and up; experts), and half of a fused weight would leave the rest undefined.
    """
    named = list(model.named_parameters())  # a tied one once
    training = {unit_of(name) for name, parameter in named if parameter.requires_grad}
    for name, tensor in itertools.chain(named, persistent_buffers(model)):
        if not trainable_only or unit_of(name) in training:
            yield name, tensor


@functools.cache
def unit_of(name: str) -> str:
    """What is sent or left out as one: "model.layers.3" of all that is in it; outside of the layers each tensor by itself."""
    match = _NUMBERED.match(name)
    return match.group() if match else name


def checkpoint_form(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of one parameter: itself, or the several that Transformers fuses on loading."""
    if getattr(model, "_weight_conversions", None) is None:
        yield name, tensor
        return
    yield from revert_weight_conversion(model, {name: tensor}).items()
