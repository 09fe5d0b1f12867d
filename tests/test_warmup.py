"""The micro-batch that is thrown away: as large as one may be, and nothing is left of it."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trainer_cases import LAYOUTS, config_for, made_samples, sharded_model, single_rank, train_steps

from accerl_mp.models.units import iter_weights
from accerl_mp.trainer.warmup import largest_micro_batch, warm_up


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({"train_token_budget": 1000, "max_length": 300}, [300, 300, 300, 100]),
        ({"train_token_budget": 900, "max_length": 300}, [300, 300, 300]),
        ({"train_token_budget": 901, "max_length": 300}, [300, 300, 300]),  # one token alone trains nothing
        ({"train_token_budget": 900, "max_length": 300, "batch_size": 2}, [300, 300]),
        ({"train_packing": "padded", "max_length": 30, "batch_size": 3}, [30, 30, 30]),
    ],
)
def test_it_is_as_large_as_one_may_be(values: dict[str, Any], lengths: list[int]) -> None:
    batch = largest_micro_batch(config_for(Path("unused"), **values))
    assert batch.lengths == lengths
    assert batch.input_ids.numel() == batch.position_ids.numel() == sum(lengths)
    assert int(batch.sequence_lengths.sum()) == len(batch.targets) == len(batch.sequence_ids)
    assert int(batch.prediction_indices.max()) < sum(lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_as_without_it(layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_tiny(tmp_path)
    config = config_for(tmp_path, max_length=64, train_token_budget=128, batch_size=2, **layout)
    samples = made_samples(4, seed=3)
    trained = []
    for is_warm in (False, True):
        ranks = single_rank()
        model = sharded_model(config)
        if is_warm:
            monkeypatch.setattr("accerl_mp.algorithms.logprobs._compiled_reduce", lambda: pytest.fail("compiled on the CPU"))
            warm_up(model, config, ranks)  # not compiled: nothing happens
            on = config.replace(compile="on")
            monkeypatch.setattr("accerl_mp.trainer.warmup.micro_batch_forward", _eager(config))
            warm_up(model, on, ranks)
            assert all(parameter.grad is None for parameter in model.parameters())
        train_steps(model, config, ranks, [[samples[:2], samples[2:]]])
        trained.append({name: tensor.clone() for name, tensor in iter_weights(model, trainable_only=False, dtype=None)})
        ranks.leave()
    for name, tensor in trained[0].items():
        assert torch.equal(tensor, trained[1][name]), name


def _eager(config: Any) -> Any:
    from accerl_mp.trainer.forward import micro_batch_forward

    return lambda model, batch, _, **options: micro_batch_forward(model, batch, config, **options)
