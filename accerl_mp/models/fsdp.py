"""FSDP2: shards a model over the trainer's ranks, each decoder layer a unit, the rest (embeddings, norm, head) the root unit.

One rank that has room for whole parameters shares nothing with anybody and goes without FSDP2 (`models/copies.py`).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from accerl_mp.models.copies import copied_bytes, copies_of, hold_copies

UNSHARDED_SHARE = 0.25
"""Share of a GPU's memory that whole parameters and gradients may take for the length of an optimizer step."""
UNSHARDED_BYTES_CPU = 2 << 30
"""Likewise on CPU, where ranks share the machine's memory with vLLM."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, found by the class names that Transformers keeps whole (`_no_split_modules`)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layer class (_no_split_modules {sorted(names)}): it cannot be sharded")
    return layers


def shard(model: nn.Module, *, compute_dtype: torch.dtype, device: torch.device, unsharded: bool, is_frozen: bool = False) -> None:
    """Shard `model` in place over all ranks (parameters may still be on the meta device).

    Masters and gradients are float32, compute is in `compute_dtype`. Gradients are *summed* over ranks: the loss already
    carries the count of the whole optimizer step. `unsharded`: keep whole parameters from a forward to its backward.
    `is_frozen`: it never sees a backward, and its whole parameters are needed for a moment only.
    """
    world_size = torch.distributed.get_world_size()
    if world_size == 1 and unsharded and not is_frozen and is_held_whole(model, compute_dtype, memory_of(device)):
        if compute_dtype != torch.float32:
            hold_copies(model, compute_dtype)
        return
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    layers = decoder_layers(model)
    # A frozen model on one rank has nothing to send beside its computing: one unit, whose hooks cost the host least.
    for module in [model] if world_size == 1 and unsharded and is_frozen else [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not unsharded)
    if world_size == 1:
        return  # nothing is summed: a divisor, even 1, would be one more pass over all gradients
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def is_held_whole(model: nn.Module, compute_dtype: torch.dtype, memory_bytes: int | None) -> bool:
    """Whether one rank goes without FSDP2: room for float32 gradients, copies and gradients that wait (`memory_bytes` None: a CPU)."""
    size_bytes = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if compute_dtype != torch.float32:
        size_bytes += copied_bytes(model, compute_dtype)
    return size_bytes <= _unsharded_bytes(memory_bytes)


def fits_unsharded(model: nn.Module, *, compute_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every rank can hold whole parameters and float32 gradients for an optimizer step.

    Then parameters are gathered once a step and gradients reduced once, on its last micro-batch.
    """
    size_bytes = sum(p.numel() * (compute_dtype.itemsize + 4 * p.requires_grad) for p in model.parameters())
    return size_bytes <= _unsharded_bytes(memory_of(device))


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU; None on CPU, where the machine's memory is shared."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _unsharded_bytes(memory_bytes: int | None) -> float:
    return UNSHARDED_BYTES_CPU if memory_bytes is None else UNSHARDED_SHARE * memory_bytes


def set_last_micro_batch(model: nn.Module, is_last: bool, *, unsharded: bool) -> None:
    """Before a forward: reduce gradients and free whole parameters only on the last micro-batch; with `unsharded` False, on every one."""
    if (copies := copies_of(model)) is not None:
        copies.is_last = is_last
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last)
    if unsharded:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)


def collect_gradients(model: nn.Module) -> None:
    """After each backward. What FSDP2 shards does this by itself; after a step's last one `parameters()` have their gradients."""
    if (copies := copies_of(model)) is not None:
        copies.collect()


def note_update(model: nn.Module) -> None:
    """After an optimizer's update: launch what the next forward needs of it."""
    if (copies := copies_of(model)) is not None:
        copies.refresh()


def reshard(model: nn.Module) -> None:
    """Free whole parameters that a forward without backward has left: the next forward would not see the next update."""
    if (copies := copies_of(model)) is not None:
        copies.release()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer for packs of any length (before sharding). Recompiling for every length would cost more."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
