"""Models with experts: the router's load-balancing loss and a training step with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trainer_cases import CPU, LAYOUTS, config_for, made_samples, sharded_model, single_rank, train_steps
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from accerl_mp.algorithms.losses import router_balance
from accerl_mp.models.build import load_model, model_problems
from accerl_mp.trainer.batches import build_micro_batch
from accerl_mp.trainer.forward import micro_batch_forward
from accerl_mp.trainer.ranks import Ranks

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


@pytest.fixture(scope="module", params=list(SIZES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.save_tiny(path, request.param, tied=False, **SIZES[request.param])
    return path


def test_the_balance_is_that_of_the_switch_transformer() -> None:
    """Experts x sum of (share of tokens) x (mean probability), by hand in float64, and as Transformers has it."""
    logits = [np.random.default_rng(layer).normal(0, 2, (9, 4)) for layer in range(2)]
    is_real = np.array([True] * 6 + [False] * 3)
    shares, means = np.zeros(4), np.zeros(4)
    for row in np.concatenate([layer[is_real] for layer in logits]):
        shares[np.argsort(row)[-2:]] += 1 / 12
        means += np.exp(row) / np.exp(row).sum() / 12
    tensors = [torch.tensor(layer, dtype=torch.float32) for layer in logits]
    got = router_balance(tensors, 2, torch.tensor(is_real))
    assert got.item() == pytest.approx(4 * (shares * means).sum(), rel=1e-5)
    theirs = load_balancing_loss_func(tuple(tensors), 4, 2, torch.tensor(is_real, dtype=torch.float32)[None])
    assert got.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_an_even_router_has_the_least_balance_loss_and_one_favourite_the_most() -> None:
    tokens = torch.arange(8)
    even = torch.nn.functional.one_hot(tokens % 4, 4).float() * 20
    assert router_balance([even], 1).item() == pytest.approx(1.0, rel=1e-4)
    assert router_balance([torch.tensor([[20.0, 0, 0, 0]]).expand(8, 4)], 1).item() == pytest.approx(4.0, rel=1e-4)


def test_padding_does_not_count(folder: Path) -> None:
    samples, model, config = made_samples(4, seed=6), load_model(config_for(folder), CPU), config_for(folder)
    values = []
    for packed in (True, False):
        batch = build_micro_batch(samples, packed=packed, version=0, algorithm="grpo")
        values.append(micro_batch_forward(model, batch, config, with_balance=True).balance)
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [*LAYOUTS, {"gradient_checkpointing": True}])
def test_a_model_with_experts_trains_and_its_router_becomes_more_even(layout: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    samples = made_samples(6, seed=6)
    results = {}
    for coef in (1e-6, 5.0):
        config = config_for(folder, router_aux_loss_coef=coef, learning_rate=3e-3, max_grad_norm=0.0, **layout)
        results[coef] = train_steps(sharded_model(config), config, ranks, [[samples[:3], samples[3:]]] * 6)
    assert not any(result.is_bad for steps in results.values() for result in steps)
    free, pulled = ([result.sums["balance"] / result.sums["num_tokens"] for result in results[coef]] for coef in results)
    assert free[0] == pytest.approx(pulled[0], rel=1e-5)
    assert pulled[-1] < min(free[-1], pulled[0])
    first = results[5.0][0].sums
    assert first["loss"] == pytest.approx(first["policy_loss"] / first["num_tokens"] + 5.0 * pulled[0], rel=1e-4)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path)
    problems = model_problems(config_for(tmp_path, router_aux_loss_coef=0.1, vllm_max_model_len=100), CPU)
    assert any("--router-aux-loss-coef 0.1: Qwen3ForCausalLM has no router" in problem for problem in problems)
