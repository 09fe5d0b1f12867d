"""Float32 sums of gradients in half precision: one pass over the memory for all parameters and several gradients of each.

    sum = ((sum + g_1) + g_2) + ...     each addition in float32: what `sum += g` gives, gradient by gradient

PyTorch's own `float32 += bfloat16` takes a launch for each parameter and gradient and runs at half of an H200's memory rate.
"""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 8192
"""Elements of one program of the kernel."""
_ALIGNMENT = 16
"""Bytes of one load of a thread."""


def add_up(sums: list[Tensor], parts: list[list[Tensor]], *, has_sum: bool) -> None:
    """Add `parts[i]`, equally many for each i and all of one dtype, to `sums[i]` (float32), in order.

    `has_sum` False: `sums` hold nothing yet.
    """
    if sums[0].device.type == "cuda" and launch(sums, parts, has_sum=has_sum):
        return
    for total, gradients in zip(sums, parts, strict=True):
        if not has_sum:
            total.copy_(gradients[0])
        for gradient in gradients if has_sum else gradients[1:]:
            total.add_(gradient)


def launch(sums: list[Tensor], parts: list[list[Tensor]], *, has_sum: bool) -> bool:
    """The kernel; False, and nothing done, where a tensor is not one piece of memory that is aligned for it."""
    tensors = [tensor for total, gradients in zip(sums, parts, strict=True) for tensor in (total, *gradients)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    if any(address % _ALIGNMENT for address in addresses) or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    from accerl_mp.models import gradient_kernel  # Triton is there where there are GPUs

    device = sums[0].device
    table = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    blocks = _blocks(tuple(total.numel() for total in sums), device)
    gradient_kernel.launch(table, *blocks, num_parts=len(parts[0]), dtype=parts[0][0].dtype, has_sum=has_sum, block=BLOCK)
    return True


@lru_cache(maxsize=8)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tensor [P] int32 and block in it [P] int32 of each program, elements [N] int64 of each tensor) on `device`."""
    num_blocks = torch.tensor([-(-count // BLOCK) for count in counts])
    tensor_of = torch.repeat_interleave(torch.arange(len(counts)), num_blocks)
    first = num_blocks.cumsum(0) - num_blocks
    block_of = torch.arange(len(tensor_of)) - first[tensor_of]
    return tensor_of.int().to(device), block_of.int().to(device), torch.tensor(counts).to(device)
