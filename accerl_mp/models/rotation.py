"""Norm and rotation of queries and keys, as Qwen3 has them, in one operator: one pass over the memory forward, one backward.

    n = x / root(mean(x^2) + eps) * weight          each head by itself
    rotated = n * cos + (-n_2, n_1) * sin           n_1 and n_2: a head's halves

Left to the compiler these are two kernels forward, which take twice the time that their memory traffic needs, and seven backward.
All is computed in float32 and rounded once. T tokens, H heads, K key heads, D head size.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SMALLEST, _LARGEST = 32, 256
"""Head sizes; powers of two."""

_SHARED = "Tensor query, Tensor key, Tensor query_weight, Tensor key_weight, Tensor cos, Tensor sin, float eps"
_COMPILES = {"tags": torch.Tag.pt2_compliant_tag}
torch.library.define("accerl::norm_and_rotate", f"({_SHARED}) -> (Tensor, Tensor)", **_COMPILES)
torch.library.define(
    "accerl::norm_and_rotate_backward", f"(Tensor query_grad, Tensor key_grad, {_SHARED}) -> (Tensor, Tensor, Tensor, Tensor)", **_COMPILES
)


def norm_and_rotate(
    query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`query` [T, H, D], `key` [T, K, D], `weights` [D] of the norms of both, `cos` and `sin` [T, D]; all of one dtype and on a GPU.

    Differentiable in all but `cos` and `sin`.
    """
    return torch.ops.accerl.norm_and_rotate(query, key, *weights, cos, sin, eps)


def fuse_rotations(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Let `model`'s attention layers do so where they can (parameters may be on the meta device). Returns how many do."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return 0
    found = [module for module in model.modules() if _is_known(module)]
    for module in found:
        module.__class__ = _rotating(type(module))  # in place: names of parameters and who holds the module stay as they are
    return len(found)


@cache
def _kinds() -> tuple[type[nn.Module], ...]:
    """Transformers' classes that compute just this; those of a model folder's own code may be called the same."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    return Qwen3Attention, Qwen3MoeAttention


def _is_known(module: nn.Module) -> bool:
    if type(module) not in _kinds():
        return False
    size: int = module.head_dim  # type: ignore[assignment]
    norms = (module.q_norm, module.k_norm)
    return _SMALLEST <= size <= _LARGEST and size & (size - 1) == 0 and len({norm.variance_epsilon for norm in norms}) == 1


@cache
def _rotating(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Rotating{kind.__name__}", (_Rotating, kind), {})


class _Rotating(nn.Module):
    """Transformers' own forward, but for this operator."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`hidden_states` [B, S, hidden size], `position_embeddings` cos and sin [B or 1, S, D]."""
        if past_key_values is not None:
            raise ValueError("a model in training keeps no keys and values: call it with use_cache=False")
        (batch, length, _), size = hidden_states.shape, self.head_dim
        query, key, value = (linear(hidden_states).view(batch, length, -1, size) for linear in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = (part.expand(batch, length, size).reshape(-1, size) for part in position_embeddings)
        weights = (self.q_norm.weight, self.k_norm.weight)
        rotated = norm_and_rotate(query.flatten(0, 1), key.flatten(0, 1), weights, cos, sin, self.q_norm.variance_epsilon)
        query, key = (part.unflatten(0, (batch, length)) for part in rotated)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = attention(
            self,
            *(part.transpose(1, 2) for part in (query, key, value)),
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **options,
        )
        return self.o_proj(output.reshape(batch, length, -1)), weights


def _forward(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from accerl_mp.models import rotation_kernel  # Triton is there where there are GPUs

    query, key, cos, sin = (tensor.contiguous() for tensor in (query, key, cos, sin))
    return rotation_kernel.forward(query, key, (query_weight, key_weight), cos, sin, eps)


@torch.library.register_fake("accerl::norm_and_rotate")
def _(query, key, query_weight, key_weight, cos, sin, eps):
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _backward(
    query_grad: Tensor, key_grad: Tensor,
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and both weights."""
    from accerl_mp.models import rotation_kernel

    query_grad, key_grad, query, key, cos, sin = (tensor.contiguous() for tensor in (query_grad, key_grad, query, key, cos, sin))
    *grads, weight_grads = rotation_kernel.backward((query_grad, key_grad), query, key, (query_weight, key_weight), cos, sin, eps)
    return *grads, *weight_grads.to(query_weight.dtype).unbind()


@torch.library.register_fake("accerl::norm_and_rotate_backward")
def _(query_grad, key_grad, query, key, query_weight, key_weight, cos, sin, eps):
    return query.new_empty(query.shape), key.new_empty(key.shape), torch.empty_like(query_weight), torch.empty_like(key_weight)


def _remember(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.accerl.norm_and_rotate_backward(query_grad, key_grad, *ctx.saved_tensors, ctx.eps)
    return *grads, None, None, None


torch.library.impl("accerl::norm_and_rotate", "CUDA", _forward)
torch.library.impl("accerl::norm_and_rotate_backward", "CUDA", _backward)
torch.library.register_autograd("accerl::norm_and_rotate", _differentiate, setup_context=_remember)
