"""Sharding over real ranks (gloo): two ranks make the same update as one, whole weights come back, exports load."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trainer_cases import CPU, config_for, made_samples, run_ranks, sharded_model, single_rank, train_steps

from accerl_mp.config import Config
from accerl_mp.models.build import load_model
from accerl_mp.models.names import manifest
from accerl_mp.models.units import iter_weights
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.ranks import Ranks

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "packed, tied": ("qwen3", True, {}),
    "packed, head only": ("llama", False, {"train_mode": "lm_head", "train_logprob_mode": "response_only_lm_head"}),
    "packed, last layer, weight decay": ("qwen2", True, {"train_mode": "last_layer", "weight_decay": 0.1}),
    "padded, sequence mean, ppo": (
        "qwen3",
        False,
        {"train_packing": "padded", "loss_aggregation": "sequence", "rl_algorithm": "ppo", "ppo_normalize_advantages": True},
    ),
    "packed, start model": ("qwen3", True, {"ref_kl_coef": 0.5, "max_sample_reuse": 2, "recompute_old_logprobs": True}),
    "fused projections, last layer": ("phi3", False, {"train_mode": "last_layer", "train_logprob_mode": "response_only_lm_head"}),
    "scaled embeddings, sliding window": ("gemma3_text", True, {"train_mode": "last_layer"}),
    "experts": ("qwen3_moe", False, {"clip_mode": "gspo", "router_aux_loss_coef": 0.1}),
}
pytestmark = pytest.mark.timeout(300)  # the first test waits for two new processes that train every case twice
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _case(root: Path, name: str) -> tuple[Config, list[list[Any]]]:
    """The case's settings and its two optimizer steps of 4 micro-batches."""
    _, _, options = CASES[name]
    config = config_for(root / name, fsdp_world_size=2, **options)
    samples = made_samples(16, seed=1, algorithm=config.algorithm.rl_algorithm)
    steps = [[samples[start : start + 2] for start in range(first, first + 8, 2)] for first in (0, 8)]
    if config.algorithm.ref_kl_coef:  # of two ranks' first micro-batches one is known by now, of the second ones both
        for known in (0, 2, 3):
            steps[1][known] = steps[0][known]
    return config, steps


def _trained(config: Config, ranks: Ranks, steps: list[list[Any]], *, unsharded: bool) -> dict[str, Any]:
    model = sharded_model(config)
    before = forced_logprobs(model, list(range(3, 40)), CPU)
    results = train_steps(model, config, ranks, steps, unsharded=unsharded)
    weights = {name: tensor.clone() for name, tensor in iter_weights(model, trainable_only=False, dtype=None)}
    return {
        "weights": weights,
        "norms": [result.grad_norm for result in results],
        "before": before,
        "after": forced_logprobs(model, list(range(3, 40)), CPU),
        "manifest": manifest(model, trainable_only=True, dtype=torch.bfloat16),
    }


def _train_half(ranks: Ranks, root: Path) -> None:
    """Each rank takes every other micro-batch."""
    for name in CASES:
        config, steps = _case(root, name)
        for unsharded in (True, False):
            own = [step[ranks.rank :: 2] for step in steps]
            before = ranks.num_collectives()
            trained = _trained(config, ranks, own, unsharded=unsharded)
            count = ranks.num_collectives()
            assert count > before + 10, "those of FSDP's hooks are among them"
            assert ranks.maxima([count, -count]) == [count, -count], "whoever has begun fewer is behind"
            if ranks.rank == 0:
                torch.save(trained, root / f"{name} {unsharded}.pt")


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    for name, (kind, tied, _) in CASES.items():
        tiny.save_tiny(root / name, kind, tied=tied, **(EXPERTS if "moe" in kind else {}))
    run_ranks(_train_half, 2, root)
    return root


@pytest.mark.parametrize("unsharded", [True, False])
@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_make_the_same_update_as_one(name: str, unsharded: bool, trained_by_two: Path) -> None:
    """With gradients reduced once a step and on every micro-batch alike. One rank trains all micro-batches of both."""
    config, steps = _case(trained_by_two, name)
    ranks = single_rank()
    one = _trained(config, ranks, steps, unsharded=True)
    ranks.leave()
    two = torch.load(trained_by_two / f"{name} {unsharded}.pt", weights_only=False)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert two["manifest"] == one["manifest"]
    assert list(two["weights"]) == list(one["weights"])
    for key, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], weight, atol=2e-5, rtol=1e-4, msg=key)
    torch.testing.assert_close(torch.tensor(two["after"]), torch.tensor(one["after"]), atol=1e-3, rtol=1e-3)
    assert abs(two["after"] - two["before"]).max() > 1e-3  # it did learn something


UNEVEN = ("packed, tied", "experts")
"""Of three ranks: 32 and 512 rows, 4 experts (the third has none), norms of 32."""


def _train_third(ranks: Ranks, root: Path) -> None:
    for name in UNEVEN:
        config, steps = _case(root, name)
        trained = _trained(config, ranks, [[step[ranks.rank]] for step in steps], unsharded=name == "experts")
        if ranks.rank == 0:
            torch.save(trained, root / f"{name}, three.pt")


@pytest.mark.slow
def test_three_ranks_make_the_same_update_as_one(tmp_path: Path) -> None:
    """Shards of different sizes, empty ones too; what is gathered for vLLM and for exports is whole."""
    for name in UNEVEN:
        kind, tied, _ = CASES[name]
        tiny.save_tiny(tmp_path / name, kind, tied=tied, **(EXPERTS if "moe" in kind else {}))
    run_ranks(_train_third, 3, tmp_path)
    for name in UNEVEN:
        config, steps = _case(tmp_path, name)
        ranks = single_rank()
        one = _trained(config, ranks, [step[:3] for step in steps], unsharded=True)
        ranks.leave()
        three = torch.load(tmp_path / f"{name}, three.pt", weights_only=False)
        assert three["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert list(three["weights"]) == list(one["weights"])
        for key, weight in one["weights"].items():
            torch.testing.assert_close(three["weights"][key], weight, atol=2e-5, rtol=1e-4, msg=key)
        assert abs(three["after"] - three["before"]).max() > 1e-3


@pytest.mark.parametrize("name", ["packed, tied", "packed, head only", "packed, last layer, weight decay", "fused projections, last layer"])
def test_only_what_trains_moves(name: str, trained_by_two: Path) -> None:
    config, _ = _case(trained_by_two, name)
    start = dict(iter_weights(load_model(config, CPU), trainable_only=False, dtype=None))
    two = torch.load(trained_by_two / f"{name} True.pt", weights_only=False)
    trainable = {entry[0] for entry in two["manifest"]}
    moved = {key for key, weight in two["weights"].items() if not torch.equal(weight, start[key])}
    assert moved == trainable


def test_a_sharded_model_computes_what_the_whole_one_does(tmp_path: Path) -> None:
    reference = tiny.save_tiny(tmp_path)
    ranks = single_rank()
    got = forced_logprobs(sharded_model(config_for(tmp_path)), [5, 9, 100, 7], CPU)
    ranks.leave()
    logits = reference(input_ids=torch.tensor([[5, 9, 100, 7]])).logits[0]
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(3), torch.tensor([9, 100, 7])]
    assert got[0] == 0
    torch.testing.assert_close(torch.tensor(got[1:]).double(), expected, atol=1e-4, rtol=1e-4)
