"""Parameters under the names of the model's checkpoint files, whole, one after the other.

What travels to vLLM and what an export holds. Tied weights come once, under the name that the model keeps; where Transformers
fuses weights on loading (experts of a mixture), its own reverse conversion splits them again.
"""

import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_NUMBERED = re.compile(r".*?\.\d+(?=\.)")


def iter_weights(model: nn.Module, *, trainable_only: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, whole tensor on the model's device) in `manifest`'s order; floats cast to `dtype` unless None.

    Collective where the model is sharded: every rank iterates to the end, at the same place in its program. `trainable_only`
    leaves out decoder layers, and tensors outside of them, in which nothing trains. A layer goes whole: vLLM fuses its parts
    (q, k and v; gate and up; experts), and half of a fused weight would leave the rest undefined.
    """
    for name, tensor in named_tensors(model, trainable_only):
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)  # before the gathering: half the bytes with bfloat16
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield from _checkpoint_form(model, name, whole)


def manifest(model: nn.Module, *, trainable_only: bool, dtype: torch.dtype | None) -> list[tuple[str, tuple[int, ...], str]]:
    """(checkpoint name, shape, dtype such as "bfloat16") of what `iter_weights` gives, in its order, without communication."""
    entries = []
    for name, tensor in named_tensors(model, trainable_only):
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        shadow = torch.empty(tuple(tensor.shape), dtype=target, device="meta")
        for checkpoint_name, part in _checkpoint_form(model, name, shadow):
            entries.append((checkpoint_name, tuple(part.shape), str(part.dtype).removeprefix("torch.")))
    return entries


def remember_conversion(model: nn.Module) -> None:
    """Keep the model's weight conversion. Before sharding: FSDP2 changes the classes' names, by which it is looked up."""
    conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    model._weight_conversions = conversions or None  # type: ignore[assignment]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def named_tensors(model: nn.Module, trainable_only: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, as they are: a rank's own shards. See `iter_weights` for `trainable_only`."""
    named = [(_plain(name), parameter) for name, parameter in model.named_parameters()]  # a tied one once
    training = {_unit(name) for name, parameter in named if parameter.requires_grad}
    for name, tensor in itertools.chain(named, ((_plain(name), buffer) for name, buffer in persistent_buffers(model))):
        if not trainable_only or _unit(name) in training:
            yield name, tensor


def _unit(name: str) -> str:
    """What is sent or left out as one: "model.layers.3" of all that is in it; outside of the layers each tensor by itself."""
    match = _NUMBERED.match(name)
    return match.group() if match else name


def _plain(name: str) -> str:
    """Without the level that `torch.compile` and activation wrappers add."""
    return name.replace("_orig_mod.", "")


def _checkpoint_form(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if getattr(model, "_weight_conversions", None) is None:
        yield name, tensor
        return
    yield from revert_weight_conversion(model, {name: tensor}).items()
