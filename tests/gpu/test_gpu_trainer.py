"""The trainer's step on GPUs: compiled or not, by any attention, on one rank or two, it is the step of the CPU in float32."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trainer_cases import config_for, made_samples, sharded_model, single_rank, start_ranks, train_steps

from accerl_mp.config import Config
from accerl_mp.models import copies, cudnn_attention, fsdp, gradient_sums
from accerl_mp.models.build import compute_dtype
from accerl_mp.models.units import iter_weights
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.ranks import Ranks, limit_memory
from accerl_mp.trainer.sharded import build_sharded
from accerl_mp.trainer.step import LocalTotals, Numbers, Stepper
from accerl_mp.transport.health import Health

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
needs_flash_attn = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
MISSING = cudnn_attention.obstacle(torch.device("cuda"), torch.bfloat16, 64) if torch.cuda.is_available() else "no GPU here"
needs_cudnn = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 1504}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ON_GPU = {"dtype": "bfloat16", "placement": "dedicated", "attn_implementation": "varlen", "compile": "on"}
SHARED = {"train_token_budget": 2048, "train_logprob_mode": "response_only_lm_head", "learning_rate": 3e-4}
STEP_SEEDS = (1, 2, 3)


def _steps() -> list[list[list[Any]]]:
    """Three optimizer steps of two packs, no two of one length."""
    steps = []
    for seed in STEP_SEEDS:
        samples = made_samples(8, seed=seed, vocab_size=1504)
        steps.append([samples[:3], samples[3:]])
    return steps


def _config(folder: Path, **values: Any) -> Config:
    return config_for(folder, **(ON_GPU | SHARED | values))


def _train(ranks: Ranks, config: Config, steps: list[list[list[Any]]]) -> dict[str, Any]:
    model, unsharded = build_sharded(config, ranks, compute_dtype(config, ranks.device))
    before = forced_logprobs(model, list(range(3, 90)), ranks.device)
    results = train_steps(model, config, ranks, steps, unsharded=unsharded)
    return {
        "losses": [result.sums["loss"] for result in results],
        "norms": [result.grad_norm for result in results],
        "before": torch.tensor(before),
        "after": torch.tensor(forced_logprobs(model, list(range(3, 90)), ranks.device)),
        "weights": {name: tensor.cpu() for name, tensor in iter_weights(model, trainable_only=False, dtype=None)},
    }


@contextmanager
def _gpu_rank(rank: int, size: int) -> Iterator[Ranks]:
    ranks = Ranks.join(rank=rank, size=size, on_gpu=True, health=Health.detached(f"trainer/{rank}"))
    try:
        yield ranks
    finally:
        ranks.leave()


def _trained_on_one_gpu(config: Config) -> dict[str, Any]:
    with _gpu_rank(0, 1) as ranks:
        return _train(ranks, config, _steps())


def _trained_on_cpu(folder: Path, **options: Any) -> dict[str, Any]:
    config = config_for(folder, **(SHARED | options))
    ranks = single_rank()
    model = sharded_model(config)
    before = forced_logprobs(model, list(range(3, 90)), ranks.device)
    results = train_steps(model, config, ranks, _steps())
    after = forced_logprobs(model, list(range(3, 90)), ranks.device)
    ranks.leave()
    norms = [result.grad_norm for result in results]
    return {"losses": [r.sums["loss"] for r in results], "norms": norms, "before": torch.tensor(before), "after": torch.tensor(after)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": "off"},
        {"attn_implementation": "sdpa", "compile": "off"},
        pytest.param({"attn_implementation": "flash_attention_2"}, marks=needs_flash_attn),
        pytest.param({"attn_implementation": "cudnn"}, marks=needs_cudnn),
        pytest.param({"attn_implementation": "cudnn", "gradient_checkpointing": True}, marks=needs_cudnn),
        {"gradient_checkpointing": True},
        {"train_logprob_mode": "full_logits_ce"},
        {"train_packing": "padded", "train_logprob_mode": "full_logits_ce"},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()) or "as it trains",
)
def test_a_step_is_that_of_float32_on_the_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, **SIZES)
    exact, got = _trained_on_cpu(tmp_path), _trained_on_one_gpu(_config(tmp_path, **options))
    assert (got["before"] - exact["before"]).abs().mean() < 0.05  # bfloat16 activations
    assert got["norms"] == pytest.approx(exact["norms"], rel=0.1)
    assert got["losses"] == pytest.approx(exact["losses"], rel=0.1)
    assert (got["after"] - exact["after"]).abs().mean() < 0.05
    assert (exact["after"] - exact["before"]).abs().mean() > 0.06  # the three steps did move it


@pytest.mark.parametrize("chosen", ["varlen", pytest.param("cudnn", marks=needs_cudnn)])
def test_one_compilation_serves_every_layer_and_length(chosen: str, tmp_path: Path) -> None:
    """A length or a layer that compiled anew would cost seconds in the middle of a run, and past eight times fall back to eager."""
    from torch._dynamo.utils import counters

    tiny.save_tiny(tmp_path, **SIZES)
    torch._dynamo.reset()
    counters.clear()
    config = _config(tmp_path, attn_implementation=chosen)
    with _gpu_rank(0, 1) as ranks:
        model, unsharded = build_sharded(config, ranks, torch.bfloat16)
        train_steps(model, config, ranks, _steps(), unsharded=unsharded)
        first = counters["stats"]["unique_graphs"]
        others = [[[sample] for sample in made_samples(6, seed=9, vocab_size=1504)]]
        train_steps(model, config, ranks, others, unsharded=unsharded)
    assert first > 0
    assert counters["stats"]["unique_graphs"] == first


@pytest.mark.parametrize("limit", [0.0, 0.05, 1e6])
def test_an_update_launched_ahead_is_that_of_the_host(limit: float, tmp_path: Path) -> None:
    """On one GPU the fused kernels clip; on the CPU the host does."""
    tiny.save_tiny(tmp_path, **SIZES)
    options = {"max_grad_norm": limit, "compile": "off", "dtype": "float32", "attn_implementation": "sdpa"}
    exact, got = _trained_on_cpu(tmp_path, max_grad_norm=limit), _trained_on_one_gpu(_config(tmp_path, **options))
    assert got["norms"] == pytest.approx(exact["norms"], rel=1e-3)
    assert (got["after"] - exact["after"]).abs().mean() < 0.02 * (exact["after"] - exact["before"]).abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_kernel_adds_what_pytorch_adds(count: int, has_sum: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = [(3, 5), (128,), (4096, 1024), (gradient_sums.BLOCK,), (gradient_sums.BLOCK + 1,), (1,)]
    sums = [torch.randn(shape, device="cuda") for shape in shapes]
    parts = [[torch.randn(shape, device="cuda").to(dtype) for _ in range(count)] for shape in shapes]
    expected = [total.clone() for total in sums]
    monkeypatch.setattr(gradient_sums, "launch", lambda *_, **__: False)
    gradient_sums.add_up(expected, parts, has_sum=has_sum)
    monkeypatch.undo()  # from here on the kernel
    assert gradient_sums.launch(sums, parts, has_sum=has_sum)
    assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


def test_numbers_are_those_of_their_place_and_wait_for_nothing_later() -> None:
    tensor, large = torch.tensor([1.0, 2.0], device="cuda"), torch.randn(8192, 8192, device="cuda")
    for _ in range(2):  # the first warms up
        torch.cuda.synchronize()
        tensor.copy_(torch.tensor([1.0, 2.0]))
        numbers = Numbers(tensor)
        for _ in range(20):
            large @ large
        tensor.zero_()
        behind = torch.cuda.Event()
        behind.record()
        assert numbers.values() == [1.0, 2.0]
    assert not behind.query()  # the products, half a second of them, are still running
    torch.cuda.synchronize()


def _first_gradient(config: Config) -> dict[str, Any]:
    """What the optimizer has seen after one step: AdamW's first moment is the clipped gradient, times 0.1."""
    (step, *_) = _steps()
    with _gpu_rank(0, 1) as ranks:
        model, unsharded = build_sharded(config, ranks, torch.bfloat16)
        stepper = Stepper(model, config, ranks, unsharded=unsharded)
        result = stepper.run(step, LocalTotals.of([sample for batch in step for sample in batch]), step=0, version=0)
        moments = {name: stepper.optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
        whole = {name: (moment.full_tensor() if hasattr(moment, "full_tensor") else moment).cpu() for name, moment in moments.items()}
    return {"loss": result.sums["loss"], "norm": result.grad_norm, "gradient": whole}


def _relative_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (got, expected))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("compile_choice", ["off", "on"])
def test_own_copies_give_the_gradient_that_fsdp2_gives(compile_choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to bfloat16's rounding and what attention's backward adds in any order. A pack's gradient that is left out is far beyond that.

    Not the weights: AdamW's first update is as large for a gradient of rounding noise as for any other.
    """
    tiny.save_tiny(tmp_path, **SIZES)
    config = _config(tmp_path, compile=compile_choice)
    own = _first_gradient(config)
    with monkeypatch.context() as patch:
        patch.setattr(copies, "add_up", lambda sums, parts, **how: gradient_sums.add_up(sums, [part[:-1] for part in parts], **how))
        lacking = _first_gradient(config)
    monkeypatch.setattr(fsdp, "is_held_whole", lambda *_: False)
    expected = _first_gradient(config)
    differences = [_relative_difference(found["gradient"], expected["gradient"]) for found in (own, lacking)]
    print("off by", *differences)
    assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert own["norm"] == pytest.approx(expected["norm"], rel=1e-3)
    assert differences[0] < 0.02
    assert differences[1] > 0.2


def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, **SIZES)
    config = _config(tmp_path, compile="off", max_bad_steps=9)
    with _gpu_rank(0, 1) as ranks:
        model, unsharded = build_sharded(config, ranks, torch.bfloat16)
        good, bad = _steps()[0], _steps()[1]
        for sample in bad[0]:
            sample.old_logprobs[:] = float("nan")
        stepper = Stepper(model, config, ranks, unsharded=unsharded)
        states = []
        for index, step in enumerate((good, bad, good)):
            totals = LocalTotals.of([sample for batch in step for sample in batch])
            result = stepper.run(step, totals, step=index, version=0)
            assert result.is_bad == (index == 1)
            tensors = list(model.parameters()) + [value for state in stepper.optimizer.state.values() for value in state.values()]
            states.append([(tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone() for tensor in tensors])
    assert all(torch.equal(one, other) for one, other in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(states[1], states[2], strict=True))


@pytest.mark.parametrize("chosen", ["varlen", pytest.param("cudnn", marks=needs_cudnn)])
def test_memory_stays_flat(chosen: str, tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, **SIZES)
    config, used = _config(tmp_path, attn_implementation=chosen), []
    with _gpu_rank(0, 1) as ranks:
        model, unsharded = build_sharded(config, ranks, torch.bfloat16)
        for _ in range(4):
            train_steps(model, config, ranks, _steps(), unsharded=unsharded)
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert used[3] == used[1]


def test_on_a_shared_card_the_trainer_stops_at_its_share() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        limit_memory(config_for(Path("unused"), placement="colocated", gpu_memory_utilization=0.9))
        torch.empty(int(0.05 * total), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.15 * total), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_other_architectures_train_compiled(kind: str, tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, kind, tied=False, **(SIZES | (EXPERTS if "moe" in kind else {})))
    compiled, plain = (_trained_on_one_gpu(_config(tmp_path, compile=choice)) for choice in ("on", "off"))
    # Of the first step: a router that is near a tie sends a few tokens elsewhere, and later steps drift apart.
    assert compiled["norms"][0] == pytest.approx(plain["norms"][0], rel=0.05)


def _half(rank: int, folder: Path) -> None:
    with _gpu_rank(rank, 2) as ranks:
        trained = _train(ranks, _config(folder, fsdp_world_size=2, compile="off"), [[step[rank]] for step in _steps()])
        if rank == 0:
            torch.save(trained, folder / "two.pt")


def test_two_ranks_over_nccl_make_the_update_of_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tiny.save_tiny(tmp_path, **SIZES)
    start_ranks(_half, 2, tmp_path)
    two, one = torch.load(tmp_path / "two.pt"), _trained_on_one_gpu(_config(tmp_path, compile="off"))
    assert two["norms"] == pytest.approx(one["norms"], rel=0.1)
    assert list(two["weights"]) == list(one["weights"])
    assert (two["after"] - one["after"]).abs().mean() < 0.05
