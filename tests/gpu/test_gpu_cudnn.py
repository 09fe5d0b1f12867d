"""cuDNN's attention over packs: every sample as if it were alone, whatever the mix of lengths; and a class of packs is planned once."""

import pytest
import torch

from accerl_mp.models import attention, cudnn_attention
from accerl_mp.models.attention import Segments

GPU = torch.device("cuda")
MISSING = cudnn_attention.obstacle(GPU, torch.bfloat16, 128) if torch.cuda.is_available() else "no GPU here"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

HEADS = [(16, 8, 128), (9, 3, 64), (4, 4, 96)]
MIXES = {
    "one token": [1],
    "one long sample": [5000],
    "nothing but single tokens": [1, 1, 1],
    "one over the padded class": [130, 128, 127, 1, 64],
    "just as many as the class": [3, 700, 64, 511],
    "edges of tiles": [127, 128, 129, 255, 256, 257, 1],
    "many short ones and a long one": [*range(1, 60), 3000],
    "equal": [512] * 8,
}


def _alone(tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Float32 SDPA of one sample after the other: [T, H, D]."""
    outputs = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in tensors), strict=True):
        rows = (part.transpose(0, 1)[None] for part in (query, key, value))
        outputs.append(torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _attend(tensors: list[torch.Tensor], lengths: list[int], scale: float) -> torch.Tensor:
    return cudnn_attention.attend(*tensors, **Segments.of(lengths, GPU).forward_arguments(attention.CUDNN), scale=scale, window=None)


@pytest.mark.parametrize(("heads", "key_heads", "size"), HEADS)
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_every_sample_is_as_if_alone(lengths: list[int], heads: int, key_heads: int, size: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    tensors = [torch.randn(total, count, size, device=GPU).bfloat16().requires_grad_() for count in (heads, key_heads, key_heads)]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    got, expected = _attend(tensors, lengths, size**-0.5), _alone(exact, lengths)
    assert _relative_error(got, expected) < 1e-2
    weights = torch.randn_like(expected)
    (got.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, other in zip(tensors, exact, strict=True):
        assert torch.isfinite(tensor.grad).all()
        assert _relative_error(tensor.grad, other.grad) < 2e-2 or other.grad.norm() < 1e-3  # a single token has no gradient in its key


def test_no_sample_sees_another() -> None:
    """Bit for bit: a neighbour's values may be anything."""
    torch.manual_seed(0)
    lengths = [300, 200, 77]
    tensors = [torch.randn(577, count, 64, device=GPU).bfloat16() for count in (4, 2, 2)]
    before = _attend(tensors, lengths, 0.125)
    for tensor in tensors:
        tensor[:300] = 100.0
        tensor[500:] = -100.0
    assert torch.equal(_attend(tensors, lengths, 0.125)[300:500], before[300:500])


def test_rows_that_are_views_are_taken() -> None:
    """A fused projection gives queries, keys and values as columns of one matrix."""
    torch.manual_seed(0)
    lengths = [600, 31]
    joined = torch.randn(631, 8, 64, device=GPU).bfloat16().requires_grad_()
    whole = [part.detach().contiguous().requires_grad_() for part in joined.split([4, 2, 2], dim=1)]
    got, expected = _attend(list(joined.split([4, 2, 2], dim=1)), lengths, 0.125), _attend(whole, lengths, 0.125)
    assert torch.equal(got, expected)
    got.float().sum().backward()
    expected.float().sum().backward()
    assert _relative_error(joined.grad, torch.cat([part.grad for part in whole], dim=1)) < 1e-2  # dq is added up in any order


def test_packs_of_a_class_are_planned_once() -> None:
    tensors = [torch.randn(2000, count, 64, device=GPU).bfloat16().requires_grad_() for count in (4, 2, 2)]
    counts = []
    for lengths in ([1000, 600, 400], [990, 510, 250, 250], [1001, 333, 333, 333]):
        _attend(tensors, lengths, 0.125).float().sum().backward()
        counts.append((cudnn_attention._forward_plan.cache_info().currsize, cudnn_attention._backward_plan.cache_info().currsize))
    assert counts[0] == counts[1] == counts[2]


def test_a_compiled_caller_is_one_graph_for_all_lengths() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    @torch.compile(dynamic=True, fullgraph=True)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **pack) -> torch.Tensor:
        return cudnn_attention.attend(query * 1.0, key * 1.0, value * 1.0, **pack, scale=0.125, window=None) * 2.0

    for lengths in ([64, 700, 3], [1200], [5] * 40, [300, 300]):
        tensors = [torch.randn(sum(lengths), count, 64, device=GPU).bfloat16().requires_grad_() for count in (4, 2, 2)]
        pack = Segments.of(lengths, GPU).forward_arguments(attention.CUDNN)
        got = attend(*tensors, **pack)
        got.float().sum().backward()
        assert _relative_error(got / 2, _alone([tensor.detach().float() for tensor in tensors], lengths)) < 1e-2
    assert counters["stats"]["unique_graphs"] == 1
