"""The kernels of `models/rotation` in Triton's interpreter, on a CPU; a case a function, run as a script by test_rotation.

The interpreter is chosen before Triton is imported, hence a process of its own (TRITON_INTERPRET=1).
"""

import sys
from collections.abc import Callable
from typing import Any

import tiny
import torch
from torch import Tensor, nn

from accerl_mp.models import rotation, rotation_kernel
from accerl_mp.models.attention import Segments, register
from accerl_mp.models.rotation import norm_and_rotate

GPU = torch.device("cuda")
KINDS = ("qwen3", "qwen3_moe")
SIZES: dict[str, Any] = {"head_dim": 32, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
"""The second layer sees four tokens."""
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Of the norm: what rounding the results once leaves, and a little."""
Shape = tuple[int, int, int, int]
"""Tokens, heads, key heads, head size."""


def plain(query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float) -> list[Tensor]:
    """What Transformers computes, in the dtype of its arguments."""
    rotated = []
    for heads, weight in zip((query, key), weights, strict=True):
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight
        first, second = normed.chunk(2, -1)
        rotated.append(normed * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None])
    return rotated


def made(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """([query, key and both weights], (cos, sin), no half of which is the other)."""
    num_tokens, heads, key_heads, size = shape
    leaves = [
        torch.randn(num_tokens, heads, size),
        torch.randn(num_tokens, key_heads, size),
        torch.rand(size) + 0.5,
        torch.rand(size) + 0.5,
    ]
    cos, sin = (torch.randn(num_tokens, size).to(device, dtype) for _ in range(2))
    return [leaf.to(device, dtype) for leaf in leaves], (cos, sin)


def values_and_gradients(
    function: Callable[..., Any], leaves: list[Tensor], angles: tuple[Tensor, Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """[rotated query and key, gradients of query, key and both weights]."""
    query, key, *weights = leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    outputs = function(query, key, tuple(weights), *angles, 1e-6)
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def check_kernels(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """With the formula in float64."""
    leaves, (cos, sin) = made(shape, dtype, device)
    grads = [torch.randn_like(leaf) for leaf in leaves[:2]]
    doubles = [leaf.double() for leaf in leaves]
    exact = values_and_gradients(plain, doubles, (cos.double(), sin.double()), [grad.double() for grad in grads])
    got = values_and_gradients(norm_and_rotate, leaves, (cos, sin), grads)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= TOLERANCES[dtype] * other.norm(), (shape, dtype)


def kernels_give_what_the_formula_gives() -> None:
    """Tokens that fill no tile, one tile, several; heads in no fixed ratio; a backward whose programs take several tiles."""
    assert rotation_kernel.PROGRAMS_PER_PROCESSOR * rotation_kernel.TOKENS < 150
    for shape in ((1, 1, 1, 32), (16, 4, 2, 32), (150, 3, 1, 64), (37, 2, 2, 128)):
        for dtype in TOLERANCES:
            check_kernels(shape, dtype)


def gradients(model: nn.Module, inputs: dict[str, Any], weights: Tensor) -> list[Tensor]:
    model.zero_grad()
    (model(**inputs, use_cache=False).logits * weights).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def batches() -> dict[str, dict[str, Any]]:
    """A pack of three samples, whose positions begin anew, and two padded rows."""
    lengths = [7, 1, 12]
    pack = {"input_ids": torch.randint(1, 96, (1, 20)), "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    rows = {"input_ids": torch.randint(1, 96, (2, 9)), "position_ids": torch.arange(9).expand(2, 9)}
    return {
        "pack": pack | Segments.of(lengths, "cpu").forward_arguments("accerl_segments"),
        "rows": rows,
        "no positions": {"input_ids": rows["input_ids"]},
    }


def made_model(kind: str) -> nn.Module:
    register()
    model = tiny.build_tiny(kind, **SIZES)
    model.set_attn_implementation("accerl_segments")
    with torch.no_grad():  # weights of one would hide which norm is which
        for name, parameter in model.named_parameters():
            if name.endswith("_norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model.train()


def models_give_the_same() -> None:
    """Logits and all gradients, of packs and of padded rows; recomputed layers and compiled ones too."""
    for kind in KINDS:
        torch.manual_seed(0)
        model = made_model(kind)
        names = [name for name, _ in model.named_parameters()]
        found = batches()
        weights = {name: torch.randn(*batch["input_ids"].shape, model.config.vocab_size) for name, batch in found.items()}
        expected = {name: gradients(model, batch, weights[name]) for name, batch in found.items()}
        assert rotation.fuse_rotations(model, GPU, torch.bfloat16) == 2
        assert [name for name, _ in model.named_parameters()] == names
        calls = count_calls()
        for name, batch in found.items():
            check(gradients(model, batch, weights[name]), expected[name], names)
        assert calls == {"forward": 6, "backward": 6}
        model.gradient_checkpointing_enable()
        check(gradients(model, found["pack"], weights["pack"]), expected["pack"], names)
        assert calls == {"forward": 10, "backward": 8}
        model.gradient_checkpointing_disable()


def layers_compile_as_one_graph() -> None:
    """With this operator within; other lengths compile nothing anew."""
    torch.manual_seed(0)
    model = made_model("qwen3")
    layer = model.model.layers[0]
    tokens = [torch.randn(1, length, model.config.hidden_size, requires_grad=True) for length in (20, 33, 50)]
    turns = [model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None]) for hidden in tokens]
    run = lambda function: [  # noqa: E731
        torch.autograd.grad(function(hidden, position_embeddings=turn).square().sum(), [hidden, *layer.parameters()])
        for hidden, turn in zip(tokens, turns, strict=True)
    ]
    expected = run(layer)
    rotation.fuse_rotations(model, GPU, torch.bfloat16)
    from torch._dynamo.utils import counters

    layer.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    got = run(layer)
    assert counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(got, expected, strict=True):
        check(list(ours), list(theirs), ["hidden"] + [name for name, _ in layer.named_parameters()])


def count_calls() -> dict[str, int]:
    calls = {"forward": 0, "backward": 0}
    for name in calls:
        inner = getattr(rotation_kernel, name)

        def counted(*arguments: Any, inner: Any = inner, name: str = name) -> Any:
            calls[name] += 1
            return inner(*arguments)

        setattr(rotation_kernel, name, counted)
    return calls


def check(got: list[Tensor], expected: list[Tensor], names: list[str]) -> None:
    for name, one, other in zip(names, got, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, name


if __name__ == "__main__":
    for operator, function in (("norm_and_rotate", rotation._forward), ("norm_and_rotate_backward", rotation._backward)):
        torch.library.impl(f"accerl::{operator}", "CPU")(function)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    print("done")
