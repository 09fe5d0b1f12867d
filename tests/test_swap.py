"""Which way staging becomes the model's weights: only one that has left the same bytes as a layerwise reload may be taken."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from accerl_mp.weight_sync.incoming import Staging
from accerl_mp.weight_sync.swap import Swap, SwapRefused

MANIFEST: Any = [("q", (4, 6), "float32"), ("k", (2, 6), "float32"), ("square", (5, 5), "bfloat16"), ("scale", (3,), "float32")]
Weights = Iterable[tuple[str, torch.Tensor]]


class Model(nn.Module):
    """As vLLM has it: q and k are one parameter, `scale` is a buffer, and one buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 6))
        self.square = nn.Parameter(torch.zeros(5, 5, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("cache", torch.arange(7.0))
        self.num_plain = 0

    def put(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                target = {"q": self.qk[:4], "k": self.qk[4:], "square": self.square, "scale": self.scale}[name]
                target.copy_(tensor)

    def load_weights(self, weights: Weights) -> None:
        self.num_plain += 1
        self.put(weights)


class Stale(Model):
    def load_weights(self, weights: Weights) -> None:
        self.put((name, tensor) for name, tensor in weights if name != "square")


class Transposed(Model):
    def load_weights(self, weights: Weights) -> None:
        self.put((name, tensor.T if name == "square" else tensor) for name, tensor in weights)


class Packed(Model):
    def load_weights(self, weights: Weights) -> None:
        raise RuntimeError("The size of tensor a (0) must match")


def make(kind: type[Model], wanted: str, monkeypatch: pytest.MonkeyPatch, *, candidates: list[str]) -> tuple[Swap, Model, Staging]:
    """As on a GPU, where the candidates are tried; the capture itself needs one."""
    staging = Staging(MANIFEST, 64, is_whole=True, device=torch.device("cpu"))
    torch.manual_seed(0)
    for _, view in staging.weights:
        view.copy_(torch.randn(view.shape))
    model = kind()
    swap = Swap(wanted, staging, model, model.put)
    monkeypatch.setattr(swap, "_candidates", lambda: candidates)
    return swap, model, staging


def assert_has(model: Model, staging: Staging) -> None:
    views = dict(staging.weights)
    assert torch.equal(model.qk, torch.cat([views["q"], views["k"]]))
    assert torch.equal(model.square, views["square"])
    assert torch.equal(model.scale, views["scale"])
    assert torch.equal(model.cache, torch.arange(7.0))


def test_a_plain_load_that_gives_the_same_bytes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    swap, model, staging = make(Model, "auto", monkeypatch, candidates=["plain"])
    swap.load(staging.weights)
    assert (swap.path, model.num_plain) == ("plain", 1)
    assert "every byte" in swap.reason
    assert_has(model, staging)
    staging.weights[0][1].add_(1)
    swap.load(staging.weights[:2])
    assert model.num_plain == 2
    assert_has(model, staging)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Stale, "plain leaves other bytes in square"),
        (Transposed, "plain leaves other bytes in square"),
        (Packed, "plain fails: RuntimeError"),
    ],
)
def test_one_that_does_not_is_not_and_the_model_is_as_after_a_reload(
    kind: type[Model], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, model, staging = make(kind, "auto", monkeypatch, candidates=["plain", "captured"])
    swap.load(staging.weights)
    assert swap.path == "layerwise"
    assert reason in swap.reason
    assert_has(model, staging)
    staging.weights[2][1].neg_()
    swap.load(staging.weights)
    assert_has(model, staging)


def test_a_capture_that_fails_leaves_the_plain_load(monkeypatch: pytest.MonkeyPatch) -> None:
    swap, model, staging = make(Model, "auto", monkeypatch, candidates=["plain", "captured"])
    refusal: Callable[[], None] = lambda: (_ for _ in ()).throw(RuntimeError("operation not permitted when stream is capturing"))  # noqa: E731
    monkeypatch.setattr(swap, "_capture", refusal)
    swap.load(staging.weights)
    assert swap.path == "plain"
    assert "captured fails" in swap.reason
    assert_has(model, staging)


def test_what_is_asked_for_and_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    swap, model, staging = make(Stale, "plain", monkeypatch, candidates=["plain"])
    for _ in range(2):
        with pytest.raises(SwapRefused, match="--sync-swap plain does not do for this model: plain leaves other bytes in square"):
            swap.load(staging.weights)
    assert_has(model, staging)


@pytest.mark.parametrize("wanted", ["auto", "layerwise"])
def test_on_cpu_it_is_layerwise(wanted: str) -> None:
    staging = Staging(MANIFEST, 64, is_whole=True, device=torch.device("cpu"))
    model = Model()
    swap = Swap(wanted, staging, model, model.put)
    swap.load(staging.weights)
    assert (swap.path, model.num_plain) == ("layerwise", 0)
    assert swap.reason
    with pytest.raises(SwapRefused, match="CPU kernels pack"):
        Swap("plain", staging, model, model.put).load(staging.weights)
