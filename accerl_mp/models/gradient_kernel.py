"""The Triton kernel of `gradient_sums`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUM_WARPS = 8


def launch(
    addresses: Tensor, tensor_of: Tensor, block_of: Tensor, counts: Tensor, *, num_parts: int, dtype: torch.dtype, has_sum: bool, block: int
) -> None:
    """`addresses` [N * (1 + num_parts)] int64: of each float32 sum, then of its gradients in `dtype`, each a multiple of 16.

    A program for each of [P] blocks: `tensor_of` and `block_of` say which elements it adds. `counts` [N] int64 elements.
    """
    _add_up[(len(tensor_of),)](
        addresses, tensor_of, block_of, counts, num_parts, _DTYPES[dtype], has_sum, block, num_warps=_NUM_WARPS
    )  # fmt: skip


@triton.jit
def _add_up(
    addresses,
    tensor_of,
    block_of,
    counts,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program).to(tl.int64)
    start = tl.load(block_of + program).to(tl.int64) * BLOCK
    count = tl.load(counts + tensor)
    row = addresses + tensor * (NUM_PARTS + 1)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= count:  # a mask would cut loads of 16 bytes into loads of one element
        _add_block(row, offsets, None, NUM_PARTS, DTYPE, HAS_SUM)
    else:
        _add_block(row, offsets, offsets < count, NUM_PARTS, DTYPE, HAS_SUM)


@triton.jit
def _add_block(row, offsets, mask, NUM_PARTS: tl.constexpr, DTYPE: tl.constexpr, HAS_SUM: tl.constexpr):
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    if HAS_SUM:
        total = tl.load(target + offsets, mask=mask)
    for part in tl.static_range(NUM_PARTS):
        source = tl.multiple_of(tl.load(row + part + 1).to(tl.pointer_type(DTYPE)), 16)
        gradient = tl.load(source + offsets, mask=mask).to(tl.float32)
        if HAS_SUM or part > 0:
            total += gradient
        else:
            total = gradient
    tl.store(target + offsets, total, mask=mask)
