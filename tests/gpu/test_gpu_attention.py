"""The GPU attention kernels against float32 SDPA of each sample alone, forward and backward."""

import importlib.util

import pytest
import torch

from accerl_mp.models import attention, cudnn_attention
from accerl_mp.models.attention import Segments

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
needs_flash_attn = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
MISSING = cudnn_attention.obstacle(GPU, torch.bfloat16, 128) if torch.cuda.is_available() else "no GPU here"
needs_cudnn = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LENGTHS = [1, 700, 2, 64, 333, 128, 5]
KERNELS = [
    pytest.param(attention.segment_attention, attention.SEGMENTS, id="sdpa"),
    pytest.param(attention.varlen_attention, attention.VARLEN, id="varlen"),
    pytest.param(attention.flash2_attention, attention.FLASH2, id="flash_attention_2", marks=needs_flash_attn),
    pytest.param(attention.cudnn_attention, attention.CUDNN, id="cudnn", marks=needs_cudnn),
]


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _heads(count: int, size: int) -> torch.Tensor:
    """[1, H, T, D] as a projection gives it: a view whose heads are not contiguous."""
    return torch.randn(1, sum(LENGTHS), count, size, device=GPU, dtype=torch.bfloat16).transpose(1, 2)


def _alone(tensors: list[torch.Tensor], window: int | None) -> torch.Tensor:
    """Float32, one sample after the other, with a plain mask."""
    outputs = []
    for query, key, value in zip(*(tensor.split(LENGTHS, dim=2) for tensor in tensors), strict=True):
        positions = torch.arange(query.shape[2], device=GPU)
        distance = positions[:, None] - positions[None]
        mask = (distance >= 0) & (distance < (window or 10**9))
        outputs.append(torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 64), (16, 8, 128), (4, 2, 32)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("kernel", "name"), KERNELS)
def test_a_pack_equals_each_sample_alone(kernel, name: str, window: int | None, heads: int, key_heads: int, size: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    tensors = [_heads(count, size).requires_grad_() for count in (heads, key_heads, key_heads)]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    arguments = Segments.of(LENGTHS, GPU).forward_arguments(name)
    got, _ = kernel(module, *tensors, None, scaling=size**-0.5, sliding_window=window, **arguments)
    expected = _alone(exact, window)
    assert _relative_error(got, expected) < 1e-2
    weights = torch.randn_like(expected)
    (got.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, other in zip(tensors, exact, strict=True):
        assert _relative_error(tensor.grad, other.grad) < 2e-2
