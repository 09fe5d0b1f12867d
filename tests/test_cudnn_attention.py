"""The operators around cuDNN's kernels: what a pack is described as, shapes, gradients, and where they are refused.

The kernels themselves need a GPU (tests/gpu); here the operators run a loop over the samples.
"""

import subprocess
from collections.abc import Iterator
from itertools import pairwise

import pytest
import tiny
import torch
from torch import Tensor

from accerl_mp import topology
from accerl_mp.models import attention, cudnn_attention
from accerl_mp.models.attention import Segments

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIXES = [[1], [5], [1, 1, 1], [7, 1, 30, 2], [4] * 8, [3] * 9, list(range(1, 18)), [128] * 3, [100, 60]]


def _samples(tensors: tuple[Tensor, ...], segment_ends: Tensor, segment_sizes: Tensor) -> Iterator[list[Tensor]]:
    for start, size in zip(segment_ends.tolist(), segment_sizes.tolist(), strict=False):
        yield [tensor[start : start + size].transpose(0, 1)[None] for tensor in tensors]


def _probabilities(query: Tensor, key: Tensor, scale: float, window: int) -> Tensor:
    """[1, H, S, S]."""
    length = query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = (query @ key.mT * scale).masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
    return scores.softmax(-1)


def _for_each_query(keys: Tensor, query: Tensor) -> Tensor:
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def _packed(parts: list[Tensor]) -> Tensor:
    """[T, H, D] of samples of [1, H, S, D]."""
    return torch.cat([part[0].transpose(0, 1) for part in parts])


@torch.library.impl("accerl::cudnn_attention", "CPU")
def _forward(query, key, value, segment_ends, segment_sizes, longest, stats_rows, scale, window):
    outputs = []
    for q, k, v in _samples((query, key, value), segment_ends, segment_sizes):
        outputs.append(_probabilities(q, _for_each_query(k, q), scale, window) @ _for_each_query(v, q))
    return _packed(outputs), query.new_zeros(stats_rows * query.shape[1])  # the backward below needs none


@torch.library.impl("accerl::cudnn_attention_backward", "CPU")
def _backward(grad, query, key, value, output, stats, segment_ends, segment_sizes, longest, stats_rows, scale, window):
    """By hand: below an operator nothing is recorded."""
    grads = []
    for d_out, q, k, v, out in _samples((grad, query, key, value, output), segment_ends, segment_sizes):
        probabilities = _probabilities(q, _for_each_query(k, q), scale, window)
        d_scores = probabilities * (d_out @ _for_each_query(v, q).mT - (d_out * out).sum(-1, keepdim=True)) * scale
        d_key, d_value = (part.unflatten(1, (k.shape[1], -1)).sum(2) for part in (d_scores.mT @ q, probabilities.mT @ d_out))
        grads.append((d_scores @ _for_each_query(k, q), d_key, d_value))
    return tuple(_packed(list(parts)) for parts in zip(*grads, strict=True))


def _heads(total: int, heads: int = 4, key_heads: int = 2, size: int = 16) -> list[Tensor]:
    """[1, H, T, D] as a projection gives it."""
    return [torch.randn(1, total, count, size).transpose(1, 2).requires_grad_() for count in (heads, key_heads, key_heads)]


def _layout(lengths: list[int]) -> dict:
    return Segments.of(lengths, CPU).forward_arguments(attention.CUDNN)


@pytest.mark.parametrize("lengths", MIXES)
def test_a_pack_is_described_by_its_class(lengths: list[int]) -> None:
    pack = _layout(lengths)
    ends, sizes = pack["segment_ends"].tolist(), pack["segment_sizes"].tolist()
    num_segments = len(sizes) - 1
    assert len(ends) == len(sizes)
    assert num_segments & (num_segments - 1) == 0
    assert len(lengths) <= num_segments < 2 * len(lengths)
    assert sizes == lengths + [0] * (len(sizes) - len(lengths))
    assert ends == [sum(lengths[:index]) for index in range(len(ends))]
    assert pack["stats_rows"] in (sum(lengths), num_segments * pack["longest"])
    assert pack["stats_rows"] <= 4 * sum(lengths)
    assert pack["segment_ends"].dtype == pack["segment_sizes"].dtype == torch.int32


def test_classes_are_few_and_close() -> None:
    sizes = range(1, 70_000)
    classes = [cudnn_attention.size_class(size, 128) for size in sizes]
    assert all(size <= found <= max(128, size + 127, 1.25 * size) for size, found in zip(sizes, classes, strict=True))
    assert all(before <= after for before, after in pairwise(classes))
    assert {1 << power for power in range(7, 17)} <= set(classes)
    assert len(set(classes)) < 50


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", MIXES)
def test_the_operators_give_each_sample_its_own_attention_and_gradient(lengths: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    module, weights = torch.nn.Module(), torch.randn(1, sum(lengths), 4, 16)
    tensors = _heads(sum(lengths))
    others = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    got, _ = attention.cudnn_attention(module, *tensors, None, scaling=0.3, sliding_window=window, **_layout(lengths))
    expected, _ = attention.segment_attention(
        module, *others, None, scaling=0.3, sliding_window=window, **Segments.of(lengths, CPU).forward_arguments(attention.SEGMENTS)
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_the_operators_say_the_truth_about_themselves() -> None:
    """Schema, shapes without data, gradients, and all of it under the compiler with symbols for sizes."""
    pack, rows = _layout([5, 9, 2]), [tensor.detach()[0].transpose(0, 1).requires_grad_() for tensor in _heads(16)]
    arguments = (*rows, pack["segment_ends"], pack["segment_sizes"], pack["longest"], pack["stats_rows"], 0.25, 0)
    torch.library.opcheck(torch.ops.accerl.cudnn_attention.default, arguments)
    detached = [row.detach() for row in rows]
    output, stats = torch.ops.accerl.cudnn_attention(*detached, *arguments[3:])
    torch.library.opcheck(
        torch.ops.accerl.cudnn_attention_backward.default, (torch.randn_like(output), *detached, output, stats, *arguments[3:])
    )


def test_without_segments_rows_of_a_batch_are_plain_causal_attention() -> None:
    tensors = [tensor.detach().expand(2, -1, -1, -1) for tensor in _heads(10)]
    got, _ = attention.cudnn_attention(torch.nn.Module(), *tensors, None, scaling=0.3)
    expected, _ = attention.segment_attention(torch.nn.Module(), *tensors, None, scaling=0.3)
    assert torch.equal(got, expected)


def test_values_of_another_size_than_keys_are_refused() -> None:
    query, key, value = _heads(5)
    with pytest.raises(ValueError, match="values of another size"):
        attention.cudnn_attention(torch.nn.Linear(1, 1), query, key, value[..., :8], None, **_layout([5]))


def _on(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int] | None = (9, 0), package: str | None = None) -> None:
    """A machine with such a card; `package`: what is wrong with nvidia-cudnn-frontend there."""
    monkeypatch.setattr(cudnn_attention, "gpu_capability", lambda _: capability)
    monkeypatch.setattr(cudnn_attention, "_package_obstacle", lambda: package)


def test_auto_takes_it_only_where_card_model_and_package_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.build_tiny(head_dim=64).config
    settings = {"device": GPU, "dtype": torch.bfloat16, "config": config}
    _on(monkeypatch)
    assert attention.choose("auto", **settings) == attention.choose("cudnn", **settings) == attention.CUDNN
    assert attention.choose("varlen", **settings) == attention.VARLEN
    assert attention.choose("auto", **(settings | {"device": CPU})) == attention.SEGMENTS
    _on(monkeypatch, capability=None)  # no nvidia-smi: the trainer, which has the card, will know
    assert attention.choose("auto", **settings) == attention.CUDNN


@pytest.mark.parametrize(
    ("machine", "model", "dtype", "reason"),
    [
        ({"capability": (8, 0)}, {}, torch.bfloat16, "compute capability 9.0 .* this card has 8.0"),
        ({"package": "nvidia-cudnn-frontend is not installed"}, {}, torch.bfloat16, "is not installed"),
        ({}, {"head_dim": 256}, torch.bfloat16, "the model's is 256"),
        ({}, {"head_dim": 40}, torch.bfloat16, "multiples of 16"),
        ({}, {}, torch.float32, "bfloat16"),
    ],
)
def test_where_it_cannot_run_auto_falls_back_and_forcing_it_says_why(
    machine: dict, model: dict, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, **machine)
    settings = {"device": GPU, "dtype": dtype, "config": tiny.build_tiny(**({"head_dim": 64} | model)).config}
    assert attention.choose("auto", **settings) == (attention.SEGMENTS if dtype == torch.float32 else attention.VARLEN)
    with pytest.raises(ValueError, match=f"--attn-implementation cudnn cannot run here: .*{reason}.*; auto takes what can"):
        attention.choose("cudnn", **settings)


class _Package:
    """What the package says of itself."""

    __version__ = "1.32.0"
    diagonal_alignment = None

    def __init__(self, version: int | Exception) -> None:
        self._version = version

    def backend_version(self) -> int:
        if isinstance(self._version, Exception):
            raise self._version
        return self._version


@pytest.mark.parametrize(
    ("version", "torchs", "reason"),
    [
        (91900, 91900, None),
        (91000, 91000, "cuDNN 91200 or newer"),
        (92100, 91900, "cuDNN 92100, torch 91900"),
        (RuntimeError("Unable to find symbol cudnnGetVersion"), 91900, "does not load: Unable to find"),
    ],
)
def test_the_package_must_share_torchs_cudnn(
    version: int | Exception, torchs: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(cudnn_attention, "_frontend", lambda: _Package(version))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: torchs)
    cudnn_attention._package_obstacle.cache_clear()
    try:
        found = cudnn_attention._package_obstacle()
    finally:
        cudnn_attention._package_obstacle.cache_clear()
    assert found is None if reason is None else reason in str(found)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention.importlib.util, "find_spec", lambda name: None)
    cudnn_attention._package_obstacle.cache_clear()
    try:
        assert cudnn_attention.INSTALL in str(cudnn_attention._package_obstacle())
    finally:
        cudnn_attention._package_obstacle.cache_clear()


@pytest.mark.parametrize(
    ("gpus", "listing", "expected"),
    [
        (["0"], "0, GPU-a, 9.0\n1, GPU-b, 8.0\n", (9, 0)),
        (["1", "0"], "0, GPU-a, 9.0\n1, GPU-b, 8.0\n", (8, 0)),
        (["GPU-b"], "0, GPU-a, 12.0\n1, GPU-b, 10.3\n", (10, 3)),
        (["0", "1"], "0, GPU-a, 12.0\n1, GPU-b, 9.0\n", (9, 0)),
        (["0"], "0, GPU-a, [N/A]\n", None),
        (["7"], "0, GPU-a, 9.0\n", None),
        ([], "0, GPU-a, 9.0\n", None),
    ],
)
def test_the_oldest_of_the_cards_counts(
    gpus: list[str], listing: str, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology.shutil, "which", lambda name: name)
    monkeypatch.setattr(topology.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=listing))
    assert topology.gpu_capability(gpus) == expected


def test_offsets_are_those_of_the_tensor_at_hand() -> None:
    """Kept from layer to layer; another pack's ends may lie in the same memory, another layer may have other heads."""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    first = cudnn_attention._offsets(4, 2, 16, ends)
    assert [offsets[:3].tolist() for offsets in first] == [[0, 192, 512], [0, 96, 256], [0, 12, 32]]
    assert cudnn_attention._offsets(4, 2, 16, ends) is first
    assert cudnn_attention._offsets(4, 4, 16, ends)[1][:3].tolist() == [0, 192, 512]
    alias = ends.view(ends.shape)
    alias[1] = 5
    assert cudnn_attention._offsets(4, 4, 16, alias)[1][:3].tolist() == [0, 320, 512]
    del ends, alias
    assert cudnn_attention._offsets(4, 4, 16, torch.tensor([0, 1, 2], dtype=torch.int32))[2][:3].tolist() == [0, 4, 8]
