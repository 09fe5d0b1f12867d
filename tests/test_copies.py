"""One rank without FSDP2 computes what FSDP2 does, bit by bit; what others see of its model is the same."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.distributed.fsdp import FSDPModule
from trainer_cases import CPU, config_for, gathered, made_samples, run_ranks, sharded_model, single_rank, train_steps

from accerl_mp.config import Config
from accerl_mp.models import fsdp
from accerl_mp.models.copies import PENDING, copies_of
from accerl_mp.models.gradient_sums import add_up
from accerl_mp.models.units import iter_weights
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.saving import Saver
from accerl_mp.trainer.state import copied, load_tensors, tensors_of
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.trainer.warmup import warm_up
from accerl_mp.transport.health import Health

pytestmark = pytest.mark.timeout(240)

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "tied": ("qwen3", True, {}),
    "own head, at trained positions": ("llama", False, {"train_logprob_mode": "response_only_lm_head", "weight_decay": 0.1}),
    "head only": ("llama", False, {"train_mode": "lm_head"}),
    "last layer, tied": ("qwen2", True, {"train_mode": "last_layer"}),
    "padded, ppo": ("qwen3", False, {"train_packing": "padded", "rl_algorithm": "ppo"}),
    "recomputed layers": ("qwen3", True, {"gradient_checkpointing": True}),
    "clipped": ("qwen3", True, {"max_grad_norm": 0.05}),
    "start model": ("qwen3", True, {"ref_kl_coef": 0.5}),
    "experts": ("qwen3_moe", False, {"router_aux_loss_coef": 0.1}),
    "float32": ("qwen3", True, {"dtype": "float32"}),
    "float16": ("llama", True, {"dtype": "float16"}),
}
PACKS_OF_STEPS = (1, PENDING - 1, PENDING, PENDING + 1, 2 * PENDING + 1)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


def _config(folder: Path, **options: Any) -> Config:
    return config_for(folder, **({"dtype": "bfloat16"} | options))


def _steps(algorithm: str) -> list[list[list[Any]]]:
    samples = made_samples(2 * sum(PACKS_OF_STEPS), seed=3, algorithm=algorithm)
    return [[[samples.pop(), samples.pop()] for _ in range(count)] for count in PACKS_OF_STEPS]


def _trained(config: Config, ranks: Ranks) -> dict[str, Any]:
    """What a run with these samples gives to others."""
    model = sharded_model(config)
    before = forced_logprobs(model, list(range(3, 40)), CPU)
    results = train_steps(model, config, ranks, _steps(config.algorithm.rl_algorithm))
    return {
        "is FSDP2": any(isinstance(module, FSDPModule) for module in model.modules()),
        "losses": [result.sums for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": {name: tensor.clone() for name, tensor in iter_weights(model, trainable_only=False, dtype=None)},
        "sent": {name: tensor.clone() for name, tensor in iter_weights(model, trainable_only=True, dtype=torch.bfloat16)},
        "before": before.tobytes(),
        "after": forced_logprobs(model, list(range(3, 40)), CPU).tobytes(),
    }


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_fsdp2_bit_by_bit(name: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one, three, four, five and nine micro-batches: gradients that wait, that are added to a sum, and both."""
    kind, tied, options = CASES[name]
    tiny.save_tiny(tmp_path, kind, tied=tied)
    config = _config(tmp_path, **options)
    own = _trained(config, ranks)
    monkeypatch.setattr(fsdp, "is_held_whole", lambda *_: False)
    expected = _trained(config, ranks)
    assert (own.pop("is FSDP2"), expected.pop("is FSDP2")) == (False, True)
    assert own["after"] != own["before"]
    for key in ("weights", "sent"):
        mine, theirs = own.pop(key), expected.pop(key)
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[tensor], theirs[tensor]) for tensor in mine), key
    assert own == expected


def test_what_does_not_train_takes_no_part_in_a_backward(tmp_path: Path, ranks: Ranks) -> None:
    tiny.save_tiny(tmp_path, tied=False)
    model = sharded_model(_config(tmp_path, train_mode="lm_head"))
    masters = dict(model.named_parameters())
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    standing = dict(model.named_parameters())
    assert {name: copy.requires_grad for name, copy in standing.items()} == {name: master.requires_grad for name, master in masters.items()}
    assert sum(copy.requires_grad for copy in standing.values()) == 1
    assert all(copy.dtype == torch.bfloat16 for copy in standing.values())
    logits.float().sum().backward()
    fsdp.collect_gradients(model)
    assert [name for name, master in model.named_parameters() if master.grad is not None] == ["lm_head.weight"]
    assert all(master is masters[name] for name, master in model.named_parameters())


def test_a_gradient_that_some_micro_batches_lack_is_the_sum_of_the_others(tmp_path: Path, ranks: Ranks) -> None:
    tiny.save_tiny(tmp_path, num_hidden_layers=1)
    model = sharded_model(_config(tmp_path))
    copies = copies_of(model)
    assert copies is not None
    parameter, generator, expected = model.get_parameter("model.norm.weight"), torch.Generator().manual_seed(0), None
    for index in range(2 * PENDING + 1):
        copies.is_last = index == 2 * PENDING
        copies.use()
        if index not in (0, 3, PENDING + 1):
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            model.get_parameter("model.norm.weight").grad = gradient.clone()
            expected = gradient.float() if expected is None else expected + gradient
        copies.collect()
    assert model.get_parameter("model.norm.weight") is parameter
    assert expected is not None
    assert torch.equal(parameter.grad, expected)
    assert all(other.grad is None for other in model.parameters() if other is not parameter)


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_that_was_left_in_its_middle_leaves_nothing(dtype: str, is_saved: bool, tmp_path: Path, ranks: Ranks) -> None:
    """The last state of a run that fails is saved from here: of the masters; and no gradient is counted twice.

    Left when some gradients have been added up and others wait.
    """
    tiny.save_tiny(tmp_path)
    config = _config(tmp_path, dtype=dtype)
    micro_batches = [[sample] for sample in made_samples(PENDING + 3, seed=1)]
    totals = LocalTotals.of([sample for batch in micro_batches for sample in batch])
    stepper = Stepper(sharded_model(config), config, ranks, unsharded=True)
    _fail_after(PENDING + 1, stepper, micro_batches, totals)
    if is_saved:
        saved = tensors_of(stepper._model, stepper.optimizer)
        assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    after_it = stepper.run(micro_batches, totals, step=0, version=0)
    anew = Stepper(sharded_model(config), config, ranks, unsharded=True).run(micro_batches, totals, step=0, version=0)
    assert after_it.grad_norm == anew.grad_norm


def _fail_after(count: int, stepper: Stepper, micro_batches: list[list[Any]], totals: LocalTotals) -> None:
    inner, calls = stepper._backward, iter(range(count))

    def backward(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise ZeroDivisionError
        return inner(*arguments)

    stepper._backward = backward  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        stepper.run(micro_batches, totals, step=0, version=0)
    stepper._backward = inner  # type: ignore[method-assign]


def test_a_saved_state_goes_on_with_the_same_bits(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one that has just computed, with and without FSDP2, into either: copies of the weights before are not used again."""
    import torch.distributed.checkpoint as dcp

    tiny.save_tiny(tmp_path)
    config = _config(tmp_path)
    saver = Saver(tmp_path / "resume", config, ranks, Health.detached("trainer/0"))
    samples = [[[sample] for sample in made_samples(3, seed=seed)] for seed in (1, 2)]
    found = []
    for is_held in (True, False):
        monkeypatch.setattr(fsdp, "is_held_whole", lambda *_, is_held=is_held: is_held)
        model = sharded_model(config)
        stepper = Stepper(model, config, ranks, unsharded=True)
        _run(stepper, samples[0])
        folder = tmp_path / f"held {is_held}"
        dcp.save(copied(tensors_of(model, stepper.optimizer), saver.mesh), checkpoint_id=folder, process_group=saver.group)
        found.append(_run(stepper, samples[1]))
    for is_held in (True, False):
        monkeypatch.setattr(fsdp, "is_held_whole", lambda *_, is_held=is_held: is_held)
        for is_saved_held in (True, False):
            model = sharded_model(config)
            stepper = Stepper(model, config, ranks, unsharded=True)
            _run(stepper, samples[1])  # something else
            load_tensors(model, stepper.optimizer, tmp_path / f"held {is_saved_held}", saver.group)
            found.append(_run(stepper, samples[1]))
    assert all(one == found[0] for one in found[1:])


def test_two_ranks_go_on_from_it(tmp_path: Path, ranks: Ranks) -> None:
    """The same weights and moments, and the next step's gradient as of one rank, up to bfloat16's rounding of two halves."""
    import torch.distributed.checkpoint as dcp

    tiny.save_tiny(tmp_path / "model")
    config = _config(tmp_path / "model")
    saver = Saver(tmp_path / "resume", config, ranks, Health.detached("trainer/0"))
    stepper = Stepper(sharded_model(config), config, ranks, unsharded=True)
    _run(stepper, [[sample] for sample in made_samples(3, seed=1)])
    dcp.save(copied(tensors_of(stepper._model, stepper.optimizer), saver.mesh), checkpoint_id=tmp_path / "state", process_group=saver.group)
    expected = _state(stepper) | {"norm": _norm(stepper, ranks)}
    run_ranks(_go_on, 2, tmp_path)
    got = torch.load(tmp_path / "two.pt")
    assert got.pop("norm") == pytest.approx(expected.pop("norm"), rel=1e-2)
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in got)


def _go_on(ranks: Ranks, folder: Path) -> None:
    config = _config(folder / "model", fsdp_world_size=2)
    stepper = Stepper(sharded_model(config), config, ranks, unsharded=True)
    saver = Saver(folder / "resume", config, ranks, Health.detached())
    load_tensors(stepper._model, stepper.optimizer, folder / "state", saver.group)
    found = _state(stepper)
    found["norm"] = _norm(stepper, ranks)
    if ranks.rank == 0:
        torch.save(found, folder / "two.pt")


def _state(stepper: Stepper) -> dict[str, Any]:
    """Weights and moments, whole. Collective."""
    tensors = tensors_of(stepper._model, stepper.optimizer)
    return {name: gathered(tensor).clone() for name, tensor in tensors.items()}


def _norm(stepper: Stepper, ranks: Ranks) -> float:
    """Of the gradient of one more step, on the same four samples whatever the number of ranks."""
    samples = made_samples(4, seed=2)[ranks.rank :: ranks.size]
    totals = LocalTotals(*ranks.sums(LocalTotals.of(samples).numbers()))
    return stepper.run([samples], totals, step=1, version=0).grad_norm


def _run(stepper: Stepper, micro_batches: list[list[Any]]) -> list[bytes]:
    totals = LocalTotals.of([sample for batch in micro_batches for sample in batch])
    stepper.run(micro_batches, totals, step=0, version=0)
    return [tensor.numpy().tobytes() for _, tensor in iter_weights(stepper._model, trainable_only=False, dtype=None)]


def test_warming_up_leaves_masters_without_gradients(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_tiny(tmp_path)
    config = _config(tmp_path, compile="on")
    model = sharded_model(config)
    before = [parameter.clone() for parameter in model.parameters()]
    warm_up(model, config, ranks)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())


_ON_THE_CPU = """
import torch
from accerl_mp.models import gradient_sums

torch.manual_seed(0)
shapes = [(3, 5), (128,), (257, 33), (gradient_sums.BLOCK,), (gradient_sums.BLOCK + 1,), (100, 200), (1,)]
for dtype in (torch.bfloat16, torch.float16):
    for count in (1, 2, 3, 4):
        for has_sum in (False, True):
            sums = [torch.randn(shape) for shape in shapes]
            parts = [[torch.randn(shape).to(dtype) for _ in range(count)] for shape in shapes]
            expected = [total.clone() for total in sums]
            gradient_sums.add_up(expected, parts, has_sum=has_sum)
            assert gradient_sums.launch(sums, parts, has_sum=has_sum)
            assert all(torch.equal(one, other) for one, other in zip(sums, expected)), (dtype, count, has_sum)
whole = torch.randn(64, 64)
for strange in (whole.t(), whole.view(-1)[1:]):
    assert not gradient_sums.launch([strange], [[torch.zeros(strange.shape, dtype=torch.bfloat16)]], has_sum=True)
print("equal")
"""


def test_the_kernel_adds_what_pytorch_adds() -> None:
    """In Triton's interpreter; tests/gpu has the real thing."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _ON_THE_CPU], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_gradients_are_added_in_order() -> None:
    """Float32 additions are not associative: 1 is lost in 2^24 unless the two large ones meet first."""
    total, large = torch.tensor([1.0]), torch.tensor([2.0**24]).bfloat16()
    add_up([total], [[large, -large]], has_sum=True)
    assert total.item() == 0.0
    add_up([total], [[large, -large, torch.tensor([1.0]).bfloat16()]], has_sum=False)
    assert total.item() == 1.0
