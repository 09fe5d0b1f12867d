"""The Triton kernels of `rotation`: forward and backward, each one pass over queries and keys.

A program takes TOKENS tokens and walks over their heads, so that the tokens' cosines are read once. A head's two halves, which
rotation mixes, are tiles of their own: [TOKENS, HALF].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 8
FORWARD_WARPS, BACKWARD_WARPS = 4, 2
"""The fastest of 4, 8, 16 tokens and 1 to 8 warps on an H200, by a few percent: memory is the limit."""
PROGRAMS_PER_PROCESSOR = 16
"""Of the backward: each leaves one row of the weights' gradients."""


def forward(query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (num_tokens, heads, size), key_heads = query.shape, key.shape[1]
    outputs = torch.empty_like(query), torch.empty_like(key)
    _forward[(triton.cdiv(num_tokens, TOKENS),)](
        query, key, *weights, cos, sin, *outputs, num_tokens, eps, heads, key_heads, size // 2, TOKENS, num_warps=FORWARD_WARPS
    )  # fmt: skip
    return outputs


def backward(
    grads: tuple[Tensor, Tensor], query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key, and those of both weights: [2, D] float32."""
    (num_tokens, heads, size), key_heads = query.shape, key.shape[1]
    results = torch.empty_like(query), torch.empty_like(key)
    num_programs = min(triton.cdiv(num_tokens, TOKENS), PROGRAMS_PER_PROCESSOR * _num_processors(query.device))
    parts = query.new_empty((num_programs, 2, size), dtype=torch.float32)
    _backward[(num_programs,)](
        *grads, query, key, *weights, cos, sin, *results, parts, num_tokens, eps, heads, key_heads, size // 2, TOKENS,
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return *results, parts.sum(0)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _forward(
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    query_output,
    key_output,
    num_tokens,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    is_there = tokens < num_tokens
    angles = tokens * (2 * HALF) + tl.arange(0, HALF)[None, :]
    cos_1, cos_2 = _load(cos + angles, is_there, HALF)
    sin_1, sin_2 = _load(sin + angles, is_there, HALF)
    _rotate(query, query_weight, query_output, tokens, is_there, cos_1, cos_2, sin_1, sin_2, eps, HEADS, HALF)
    _rotate(key, key_weight, key_output, tokens, is_there, cos_1, cos_2, sin_1, sin_2, eps, KEY_HEADS, HALF)


@triton.jit
def _rotate(source, weight, target, tokens, is_there, cos_1, cos_2, sin_1, sin_2, eps, HEADS: tl.constexpr, HALF: tl.constexpr):
    columns = tl.arange(0, HALF)[None, :]
    weight_1, weight_2 = _load(weight + columns, columns < HALF, HALF)
    for head in range(HEADS):
        offsets = (tokens * HEADS + head) * (2 * HALF) + columns
        x_1, x_2 = _load(source + offsets, is_there, HALF)
        scale = _scale(x_1, x_2, eps, HALF)
        x_1 = x_1 * scale * weight_1
        x_2 = x_2 * scale * weight_2
        tl.store(target + offsets, (x_1 * cos_1 - x_2 * sin_1).to(target.dtype.element_ty), mask=is_there)
        tl.store(target + offsets + HALF, (x_2 * cos_2 + x_1 * sin_2).to(target.dtype.element_ty), mask=is_there)


@triton.jit
def _backward(
    query_grad,
    key_grad,
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    query_result,
    key_result,
    parts,
    num_tokens,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    query_1 = tl.zeros((TOKENS, HALF), tl.float32)
    query_2 = tl.zeros((TOKENS, HALF), tl.float32)
    key_1 = tl.zeros((TOKENS, HALF), tl.float32)
    key_2 = tl.zeros((TOKENS, HALF), tl.float32)
    for start in range(tl.program_id(0) * TOKENS, num_tokens, tl.num_programs(0) * TOKENS):
        tokens = (start + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        is_there = tokens < num_tokens
        angles = tokens * (2 * HALF) + tl.arange(0, HALF)[None, :]
        cos_1, cos_2 = _load(cos + angles, is_there, HALF)
        sin_1, sin_2 = _load(sin + angles, is_there, HALF)
        query_1, query_2 = _rotate_back(
            query_grad, query, query_weight, query_result, tokens, is_there, cos_1, cos_2, sin_1, sin_2, eps, query_1, query_2, HEADS, HALF
        )
        key_1, key_2 = _rotate_back(
            key_grad, key, key_weight, key_result, tokens, is_there, cos_1, cos_2, sin_1, sin_2, eps, key_1, key_2, KEY_HEADS, HALF
        )
    row = parts + tl.program_id(0) * (4 * HALF) + tl.arange(0, HALF)
    tl.store(row, tl.sum(query_1, 0))
    tl.store(row + HALF, tl.sum(query_2, 0))
    tl.store(row + 2 * HALF, tl.sum(key_1, 0))
    tl.store(row + 3 * HALF, tl.sum(key_2, 0))


@triton.jit
def _rotate_back(
    grad,
    source,
    weight,
    target,
    tokens,
    is_there,
    cos_1,
    cos_2,
    sin_1,
    sin_2,
    eps,
    sum_1,
    sum_2,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    columns = tl.arange(0, HALF)[None, :]
    weight_1, weight_2 = _load(weight + columns, columns < HALF, HALF)
    for head in range(HEADS):
        offsets = (tokens * HEADS + head) * (2 * HALF) + columns
        x_1, x_2 = _load(source + offsets, is_there, HALF)
        grad_1, grad_2 = _load(grad + offsets, is_there, HALF)
        scale = _scale(x_1, x_2, eps, HALF)
        x_1 *= scale
        x_2 *= scale
        turned_1 = grad_1 * cos_1 + grad_2 * sin_2
        turned_2 = grad_2 * cos_2 - grad_1 * sin_1
        sum_1 += turned_1 * x_1
        sum_2 += turned_2 * x_2
        turned_1 *= weight_1
        turned_2 *= weight_2
        mean = tl.sum(turned_1 * x_1 + turned_2 * x_2, 1, keep_dims=True) / (2 * HALF)
        tl.store(target + offsets, ((turned_1 - x_1 * mean) * scale).to(target.dtype.element_ty), mask=is_there)
        tl.store(target + offsets + HALF, ((turned_2 - x_2 * mean) * scale).to(target.dtype.element_ty), mask=is_there)
    return sum_1, sum_2


@triton.jit
def _load(pointers, mask, HALF: tl.constexpr):
    """Both halves."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32), tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scale(x_1, x_2, eps, HALF: tl.constexpr):
    """[TOKENS, 1]: what divides a head by the root of its mean square."""
    return tl.rsqrt(tl.sum(x_1 * x_1 + x_2 * x_2, 1, keep_dims=True) / (2 * HALF) + eps)
