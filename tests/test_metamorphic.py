"""What must not matter to an optimizer step: values under the mask, order, layout, split into micro-batches, number of ranks.

Compared are the gradients of one step, its loss and its gradient norm. What only reorders float32 sums may differ by TOLERANCE of the
largest gradient entry: a sum of n terms is off by at most n eps of their absolute sum, here n is some thousand and eps 6e-8 (seen: at
most 8e-7). Values under the mask may not change a bit.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trainer_cases import LAYOUTS, config_for, gathered, made_samples, run_ranks, sharded_model, single_rank

from accerl_mp.config import Config
from accerl_mp.samples import RLSample
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.step import LocalTotals, Stepper

TOLERANCE = 1e-5
NUM_SAMPLES = 16
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo, ppo clip": {"old_new_kl_coef": 0.1},
    "ppo, normalised, gipo": {"rl_algorithm": "ppo", "ppo_normalize_advantages": True, "clip_mode": "gipo"},
    "rloo, gspo, sequence mean": {"rl_algorithm": "rloo", "clip_mode": "gspo", "loss_aggregation": "sequence"},
}

Step = dict[str, Any]
"""loss, norm and gradients (by name) of an optimizer step."""


def take_step(config: Config, ranks: Ranks, micro_batches: list[list[RLSample]]) -> Step:
    """Collective. The gradients are whole, taken before the update."""
    model = sharded_model(config)
    stepper = Stepper(model, config, ranks, unsharded=True)
    taken: dict[str, torch.Tensor] = {}

    def take() -> None:
        for name, parameter in model.named_parameters():
            taken[name] = gathered(parameter.grad)

    stepper.optimizer.step = take  # type: ignore[method-assign,assignment]
    local = LocalTotals.of([sample for batch in micro_batches for sample in batch])
    result = stepper.run(micro_batches, LocalTotals(*ranks.sums(local.numbers())), step=0, version=0)
    (loss,) = ranks.sums([result.sums["loss"]])
    return {"loss": loss, "norm": result.grad_norm, "gradients": {name: grad.clone() for name, grad in taken.items()}}


def assert_same_step(got: Step, expected: Step, *, tolerance: float = TOLERANCE) -> None:
    assert got["loss"] == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance * 1e-2)
    assert got["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    largest = max(float(grad.abs().max()) for grad in expected["gradients"].values())
    for name, grad in expected["gradients"].items():
        assert float((got["gradients"][name] - grad).abs().max()) <= tolerance * largest, name


def settings_of(folder: Path, objective: str, layout: dict[str, Any]) -> tuple[Config, list[RLSample]]:
    config = config_for(folder, max_grad_norm=0.0, **OBJECTIVES[objective], **layout)
    return config, made_samples(NUM_SAMPLES, seed=11, algorithm=config.algorithm.rl_algorithm)


def split(samples: list[RLSample], count: int) -> list[list[RLSample]]:
    return [samples[start::count] for start in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(path)
    return path


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_values_under_the_mask_change_no_bit(objective: str, folder: Path, ranks: Ranks) -> None:
    """Of fields that count per trained token. (A sample that comes with such values is refused; the step would not mind.)"""
    config, samples = settings_of(folder, objective, LAYOUTS[1])
    noisy, rng = copy.deepcopy(samples), np.random.default_rng(0)
    for sample in noisy:
        untrained = sample.labels == -100
        for values in (sample.old_logprobs, sample.token_advantages, sample.token_rewards):
            values[untrained] = rng.normal(0, 1e3, int(untrained.sum()))
        sample.response_indices[untrained] = 7
    clean, other = (take_step(config, ranks, split(each, 4)) for each in (samples, noisy))
    assert_same_step(other, clean, tolerance=0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_order_layout_and_split_change_nothing(objective: str, layout: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Against 4 padded micro-batches: this layout, backwards, in 1, 2 and 16 micro-batches."""
    reference, samples = settings_of(folder, objective, LAYOUTS[0])
    expected = take_step(reference, ranks, split(samples, 4))
    assert expected["norm"] > 1e-3
    config, _ = settings_of(folder, objective, layout)
    for count in (1, 2, NUM_SAMPLES):
        assert_same_step(take_step(config, ranks, split(samples[::-1], count)), expected)


CASES = list(zip(OBJECTIVES, LAYOUTS, strict=True))


def _take_part(ranks: Ranks, folder: Path) -> None:
    """Each rank has every so manyth micro-batch of all cases."""
    for number, (objective, layout) in enumerate(CASES):
        config, samples = settings_of(folder, objective, layout | {"fsdp_world_size": ranks.size})
        step = take_step(config, ranks, split(samples, 8)[ranks.rank :: ranks.size])
        if ranks.rank == 0:
            torch.save(step, folder / f"{ranks.size}-{number}.pt")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_number_of_ranks_changes_nothing(num_ranks: int, folder: Path) -> None:
    """1 rank with 8 micro-batches, 2 with 4 each, 4 with 2 each; parameters sharded over all of them."""
    run_ranks(_take_part, num_ranks, folder)
    alone = single_rank()
    for number, (objective, layout) in enumerate(CASES):
        config, samples = settings_of(folder, objective, layout)
        one = take_step(config, alone, split(samples, 8))
        assert_same_step(torch.load(folder / f"{num_ranks}-{number}.pt", weights_only=False), one)
    alone.leave()
