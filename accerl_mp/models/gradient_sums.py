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
    """Add `parts[i]`, equally many for each i, to `sums[i]` (float32), in order. `has_sum` False: `sums` hold nothing yet."""
    if sums[0].device.type == "cuda" and _is_plain(sums, parts):
        _launch(sums, parts, has_sum=has_sum)
        return
    for total, gradients in zip(sums, parts, strict=True):
        if not has_sum:
            total.copy_(gradients[0])
        for gradient in gradients if has_sum else gradients[1:]:
            total.add_(gradient)


def _is_plain(sums: list[Tensor], parts: list[list[Tensor]]) -> bool:
    """Whether each tensor is one aligned piece of memory, in one order of its elements, and all gradients have one dtype."""
    dtype = parts[0][0].dtype
    for total, gradients in zip(sums, parts, strict=True):
        strides = total.stride()
        if not total.is_contiguous() or total.data_ptr() % _ALIGNMENT:
            return False
        if any(part.stride() != strides or part.dtype != dtype or part.data_ptr() % _ALIGNMENT for part in gradients):
            return False
    return True


def _launch(sums: list[Tensor], parts: list[list[Tensor]], *, has_sum: bool) -> None:
    from accerl_mp.models import gradient_kernel  # Triton is there where there are GPUs

    device = sums[0].device
    rows = [[total.data_ptr(), *(part.data_ptr() for part in gradients)] for total, gradients in zip(sums, parts, strict=True)]
    addresses = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    tensor_of, block_of, counts = _blocks(tuple(total.numel() for total in sums), device)
    gradient_kernel.launch(
        addresses, tensor_of, block_of, counts, num_parts=len(parts[0]), dtype=parts[0][0].dtype, has_sum=has_sum, block=BLOCK
    )


@lru_cache(maxsize=8)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tensor [P] int32 and block in it [P] int32 of each program, elements [N] int64 of each tensor) on `device`."""
    num_blocks = torch.tensor([-(-count // BLOCK) for count in counts])
    tensor_of = torch.repeat_interleave(torch.arange(len(counts)), num_blocks)
    first = num_blocks.cumsum(0) - num_blocks
    block_of = torch.arange(len(tensor_of)) - first[tensor_of]
    return tensor_of.int().to(device), block_of.int().to(device), torch.tensor(counts).to(device)
