"""FSDP2: shards a model over the trainer's ranks, each decoder layer a unit, the rest (embeddings, norm, head) the root unit.

One rank that has room for it makes the whole model one unit.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

UNSHARDED_SHARE = 0.25
"""Share of a GPU's memory that whole parameters and gradients may take for the length of an optimizer step."""
UNSHARDED_BYTES_CPU = 2 << 30
"""Likewise on CPU, where ranks share the machine's memory with vLLM."""
ONE_UNIT_SHARE = 0.05
"""Share of a GPU's memory that two float32 copies of the gradients may take where a model is one unit."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, found by the class names that Transformers keeps whole (`_no_split_modules`)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layer class (_no_split_modules {sorted(names)}): it cannot be sharded")
    return layers


def shard(model: nn.Module, *, compute_dtype: torch.dtype, device: torch.device, unsharded: bool) -> None:
    """Shard `model` in place over all ranks (parameters may still be on the meta device).

    Masters and gradients are float32, compute is in `compute_dtype`. Gradients are *summed* over ranks: the loss already
    carries the count of the whole optimizer step. `unsharded`: keep whole parameters from a forward to its backward.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    layers = decoder_layers(model)
    for module in [model] if unsharded and _is_one_unit(model, device) else [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not unsharded)
    if torch.distributed.get_world_size() == 1:
        return  # nothing is summed: a divisor, even 1, would be one more pass over all gradients
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def _is_one_unit(model: nn.Module, device: torch.device) -> bool:
    """Whether the model is sharded as a whole rather than layer by layer.

    One rank that keeps whole parameters has nothing to send beside its computing, and a unit's hooks cost the host half a millisecond
    a layer and pass: with the model as one unit it stays ahead of the GPU. Gradients are then copied all at once.
    """
    if torch.distributed.get_world_size() > 1:
        return False
    copies_bytes = sum(2 * 4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return device.type != "cuda" or copies_bytes <= ONE_UNIT_SHARE * torch.cuda.get_device_properties(device).total_memory


def fits_unsharded(model: nn.Module, *, compute_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every rank can hold whole parameters and float32 gradients for an optimizer step.

    Then parameters are gathered once a step and gradients reduced once, on its last micro-batch.
    """
    size_bytes = sum(p.numel() * (compute_dtype.itemsize + 4 * p.requires_grad) for p in model.parameters())
    if device.type == "cuda":
        return size_bytes <= UNSHARDED_SHARE * torch.cuda.get_device_properties(device).total_memory
    return size_bytes <= UNSHARDED_BYTES_CPU


def set_last_micro_batch(model: nn.Module, is_last: bool, *, unsharded: bool) -> None:
    """Reduce gradients and free whole parameters only on the last micro-batch; with `unsharded` False, on every one."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last)
    if unsharded:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Free whole parameters that a forward without backward has left: the next forward would not see the next update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer for packs of any length (before sharding). Recompiling for every length would cost more."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
