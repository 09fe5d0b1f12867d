"""One optimizer step: micro-batches, gradients in every layout, guards and the update."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trainer_cases import CPU, LAYOUTS, config_for, made_sample, made_samples, sharded_model, single_rank, train_steps
from transformers import AutoModelForCausalLM

from accerl_mp.models.build import load_model
from accerl_mp.models.fsdp import reshard
from accerl_mp.samples import RLSample
from accerl_mp.trainer.batches import build_micro_batch
from accerl_mp.trainer.forward import micro_batch_logprobs
from accerl_mp.trainer.metrics import RoundMetrics
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.sharded import Reference
from accerl_mp.trainer.step import BadStepsError, LocalTotals, Numbers, Stepper, build_optimizer
from accerl_mp.trainer.witness import Witness


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(path)
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_predicts_each_trained_token_from_the_one_before_it(packed: bool) -> None:
    samples = made_samples(3)
    batch = build_micro_batch(samples, packed=packed, version=0, algorithm="grpo")
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.prediction_indices + 1], batch.targets)
    assert batch.targets.tolist() == [token for sample in samples for token in sample.response_ids]
    assert batch.position_ids.flatten()[batch.prediction_indices].tolist() == [
        position - 1 for sample in samples for position in np.flatnonzero(sample.labels != -100)
    ]
    assert batch.sequence_lengths.tolist() == [sample.num_trained for sample in samples]
    assert torch.bincount(batch.sequence_ids).tolist() == batch.sequence_lengths.tolist()
    logprobs = np.concatenate([sample.old_logprobs[sample.labels != -100] for sample in samples])
    assert torch.equal(batch.old_logprobs, torch.from_numpy(logprobs))


def test_packed_rows_end_where_the_next_sample_starts() -> None:
    samples = made_samples(4)
    batch = build_micro_batch(samples, packed=True, version=0, algorithm="grpo")
    assert batch.input_ids.shape == (1, sum(len(sample) for sample in samples))
    assert batch.segments is not None
    assert batch.segments.cu_seqlens.tolist() == np.cumsum([0, *(len(sample) for sample in samples)]).tolist()
    assert batch.segments.cu_seqlens.dtype == torch.int32


def test_ppo_trains_on_token_advantages_and_grpo_on_the_groups() -> None:
    samples = made_samples(2)
    per_token = np.concatenate([sample.token_advantages[sample.labels != -100] for sample in samples])
    assert build_micro_batch(samples, packed=True, version=0, algorithm="ppo").advantages.numpy() == pytest.approx(per_token)
    grpo = build_micro_batch(samples, packed=True, version=0, algorithm="grpo")
    expected = np.repeat([sample.advantage for sample in samples], [sample.num_trained for sample in samples])
    assert grpo.advantages.numpy() == pytest.approx(expected.astype(np.float32))


def test_tokens_of_the_trainers_own_version_are_marked() -> None:
    sample = made_samples(1)[0]
    sample.output_versions[:] = np.arange(len(sample.output_versions)) % 2
    batch = build_micro_batch([sample], packed=True, version=1, algorithm="grpo")
    assert batch.is_on_policy.tolist() == sample.output_versions.tolist()


def _gradients(folder: Path, ranks: Ranks, micro_batches: list[list[RLSample]], **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of one optimizer step, taken off the model before the update."""
    config = config_for(folder, **options)
    model = load_model(config, CPU)
    stepper = Stepper(model, config, ranks, unsharded=True)
    taken: dict[str, torch.Tensor] = {}
    stepper.optimizer.step = lambda: taken.update({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[method-assign]
    totals = LocalTotals.of([sample for batch in micro_batches for sample in batch])
    stepper.run(micro_batches, totals, step=0, version=0)
    return taken


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_episodes_leave_their_logprobs(layout: dict[str, Any], folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Against Transformers' model on each sample alone; samples of other episodes leave nothing."""
    samples = made_samples(4, seed=11)
    for number, sample in enumerate(samples):
        sample.episode_id = (4, 6, 7, 4)[number]
    config = config_for(folder, **layout)
    stepper = Stepper(load_model(config, CPU), config, ranks, unsharded=True, witness=Witness(tmp_path / "episodes", every=4))
    stepper.run([samples[:2], samples[2:]], LocalTotals.of(samples), step=9, version=0)
    [path] = (tmp_path / "episodes").iterdir()
    assert path.name == "train-0000004.trained.jsonl"
    reference = AutoModelForCausalLM.from_pretrained(folder)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, sample in zip(lines, (samples[0], samples[3]), strict=True):
        trained = np.flatnonzero(sample.labels != -100)
        with torch.no_grad():
            logits = reference(torch.from_numpy(sample.input_ids.astype(np.int64))[None]).logits[0].float()
        expected = logits.log_softmax(-1)[trained - 1, sample.input_ids[trained]]
        assert line["logprobs"] == pytest.approx(expected.tolist(), abs=2e-3)
        assert (line["step"], line["turns"]) == (9, sample.response_indices[trained].tolist())


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("clip_mode", ["ppo", "gspo"])
def test_padded_and_packed_have_the_same_gradient(aggregation: str, clip_mode: str, folder: Path, ranks: Ranks) -> None:
    """Whatever the layout, the logprob mode and the split into micro-batches."""
    samples = made_samples(8, seed=3)
    options = {"loss_aggregation": aggregation, "clip_mode": clip_mode, "old_new_kl_coef": 0.1, "max_grad_norm": 0.0}
    splits = [[samples[:3], samples[3:]], [samples[:4], samples[4:]], [samples[5:], samples[1:5], samples[:1]]]
    padded, *others = (_gradients(folder, ranks, split, **options, **layout) for layout, split in zip(LAYOUTS, splits, strict=True))
    assert max(float(grad.abs().max()) for grad in padded.values()) > 1e-4
    for other in others:
        for name, grad in padded.items():
            torch.testing.assert_close(other[name], grad, atol=1e-6, rtol=1e-3, msg=name)


def test_the_loss_is_the_mean_over_all_tokens_of_the_step(folder: Path, ranks: Ranks) -> None:
    """By hand: Transformers' model on each sample alone, the formula in float64."""
    samples = made_samples(5, seed=9)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    terms = []
    for sample in samples:
        logits = reference(input_ids=torch.tensor(sample.input_ids[None].astype(np.int64))).logits[0].double() / 0.7
        trained = np.flatnonzero(sample.labels != -100)
        logprobs = torch.log_softmax(logits, -1)[trained - 1, sample.input_ids[trained]].detach().numpy()
        ratio = np.exp(np.clip(logprobs - sample.old_logprobs[trained], -20, 20))
        terms.append(np.minimum(ratio * sample.advantage, np.clip(ratio, 0.8, 1.2) * sample.advantage))
    config = config_for(folder, infer_temperature=0.7)
    (result,) = train_steps(sharded_model(config), config, ranks, [[samples[:2], samples[2:]]])
    assert result.sums["loss"] == pytest.approx(-np.concatenate(terms).mean(), rel=1e-4)
    assert result.sums["num_tokens"] == sum(len(term) for term in terms)


def _with_own_logprobs(folder: Path, samples: list[RLSample], shift: float = 0.0) -> list[RLSample]:
    """The samples as if the model itself had sampled them, `shift` nats less likely."""
    config = config_for(folder)
    with torch.no_grad():
        logprobs, _ = micro_batch_logprobs(
            load_model(config, CPU), build_micro_batch(samples, packed=True, version=0, algorithm="grpo"), config
        )
    for sample, own in zip(samples, logprobs.split([sample.num_trained for sample in samples]), strict=True):
        sample.old_logprobs[sample.labels != -100] = own.numpy() - shift
    return samples


@pytest.mark.parametrize("clip_mode", ["ppo", "gipo", "sapo", "cispo", "gspo"])
def test_recomputed_old_logprobs_change_nothing_on_fresh_samples(clip_mode: str, folder: Path, ranks: Ranks) -> None:
    samples = _with_own_logprobs(folder, made_samples(6, seed=8))
    plain, recomputed = (
        _gradients(folder, ranks, [samples[:3], samples[3:]], clip_mode=clip_mode, recompute_old_logprobs=on) for on in (False, True)
    )
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, atol=1e-7, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("shift", "factor"), [(0.3, math.exp(0.3)), (-0.5, math.exp(-0.5)), (3.0, 2.0)])
def test_stale_samples_are_weighted_and_capped(shift: float, factor: float, folder: Path, ranks: Ranks) -> None:
    """All tokens as stale as each other: the fresh gradient times min(exp(shift), 2), with no token clipped away."""
    fresh = _gradients(folder, ranks, [_with_own_logprobs(folder, made_samples(6, seed=8))], max_grad_norm=0.0)
    stale_samples = _with_own_logprobs(folder, made_samples(6, seed=8), shift)
    stale = _gradients(folder, ranks, [stale_samples], recompute_old_logprobs=True, max_grad_norm=0.0)
    for name, grad in fresh.items():
        torch.testing.assert_close(stale[name], factor * grad, atol=1e-6, rtol=1e-3, msg=name)


def test_mismatch_of_kernels_and_staleness_are_two_metrics(folder: Path, ranks: Ranks) -> None:
    """KL/TrainerInferK3 over tokens of the trainer's own version alone; KL/OldNewK3TokenMean over all. Shifts of 0.01 and 0.5 nats."""
    samples = _with_own_logprobs(folder, made_samples(6, seed=8), 0.01)
    for sample in samples[3:]:
        sample.output_versions[:] = 4
        sample.old_logprobs[sample.labels != -100] -= 0.49
    for sample in samples[:3]:
        sample.output_versions[:] = 5
    fresh, stale = (sum(sample.num_trained for sample in part) for part in (samples[:3], samples[3:]))
    config = config_for(folder)
    stepper, metrics = Stepper(load_model(config, CPU), config, ranks, unsharded=True), RoundMetrics(config, ranks)
    result = stepper.run([samples[:4], samples[4:]], LocalTotals.of(samples), step=0, version=5)
    metrics.add_step(result, samples, choose_seconds=0.0)
    values = metrics.close_round()
    near, far = (math.expm1(d) - d for d in (0.01, 0.5))
    for tag, expected, count in (
        ("KL/TrainerInferK3", near, fresh),
        ("KL/OldNewK3TokenMean", (near * fresh + far * stale) / (fresh + stale), fresh + stale),
    ):
        assert values[tag][0] / values[tag][1] == pytest.approx(expected, rel=1e-2)
        assert values[tag][1] == count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_start_model_pulls_with_k3_of_its_own_logprobs(layout: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Nothing in the first step, where both models are the same; in the second as computed by hand from both, in float64."""
    samples = made_samples(6, seed=2)
    config = config_for(folder, ref_kl_coef=0.3, learning_rate=1e-2, max_grad_norm=0.0, **layout)
    model, start = sharded_model(config), load_model(config, CPU)
    reference = Reference.if_wanted(config, ranks, torch.float32)
    stepper, totals = Stepper(model, config, ranks, unsharded=True, reference=reference), LocalTotals.of(samples)
    first = stepper.run([samples[:3], samples[3:]], totals, step=0, version=0)
    assert first.sums["ref_k3"] == pytest.approx(0, abs=1e-6)
    batch = build_micro_batch(samples, packed=True, version=0, algorithm="grpo")
    with torch.no_grad():
        new, at_start = (micro_batch_logprobs(one, batch, config_for(folder))[0].double().numpy() for one in (model, start))
    reshard(model)
    second = stepper.run([samples[:3], samples[3:]], totals, step=1, version=0)
    d = np.clip(at_start - new, -20, 20)
    k3 = np.exp(d) - 1 - d
    assert k3.mean() > 1e-2
    assert second.sums["ref_k3"] == pytest.approx(k3.sum(), rel=1e-3)
    assert second.sums["loss"] == pytest.approx((second.sums["policy_loss"] + 0.3 * k3.sum()) / len(k3), rel=1e-3)


def test_the_start_models_logprobs_are_computed_once_a_sample(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(6, seed=2)
    for reuse, expected in ((1, 5), (3, 3)):
        reference = Reference(config_for(folder, max_sample_reuse=reuse, replay_capacity=8), ranks, torch.float32)
        forwards: list[int] = []
        reference._model.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        first = reference.logprobs([samples[:2], samples[2:4]])
        again = reference.logprobs([[samples[3], samples[0]]])
        assert torch.equal(torch.cat([first[1][samples[2].num_trained :], first[0][: samples[0].num_trained]]), again[0]) or reuse == 1
        reference.logprobs([samples[1:3], samples[4:]])
        assert len(forwards) == expected


def test_a_strong_pull_keeps_the_model_where_it_started(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(6, seed=2)
    distances = []
    for coef in (1e-6, 30.0):
        config = config_for(folder, ref_kl_coef=coef, learning_rate=3e-3, clip_mode="cispo")
        distances.append(train_steps(sharded_model(config), config, ranks, [[samples]] * 8)[-1].sums["ref_k3"])
    assert distances[1] < 0.2 * distances[0]


def test_advantages_are_normalised_over_the_whole_step(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(6, seed=4, algorithm="ppo")
    values = np.concatenate([sample.token_advantages[sample.labels != -100] for sample in samples]).astype(np.float64)
    for sample in samples:
        trained = sample.labels != -100
        sample.token_advantages[trained] = (sample.token_advantages[trained] - values.mean()) / (values.std() + 1e-8)
    by_hand = _gradients(folder, ranks, [samples[:3], samples[3:]], rl_algorithm="ppo")
    fresh = made_samples(6, seed=4, algorithm="ppo")
    ours = _gradients(folder, ranks, [fresh[:3], fresh[3:]], rl_algorithm="ppo", ppo_normalize_advantages=True)
    for name, grad in by_hand.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-3, msg=name)


def test_gradient_checkpointing_changes_nothing(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(4)
    plain = _gradients(folder, ranks, [samples])
    recomputed = _gradients(folder, ranks, [samples], gradient_checkpointing=True)
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, msg=name)


def test_bfloat16_compute_keeps_float32_masters(folder: Path, ranks: Ranks) -> None:
    config = config_for(folder, dtype="bfloat16", learning_rate=1e-6)
    model = sharded_model(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_steps(model, config, ranks, [[made_samples(4)]] * 3)
    moved = [(p != before[name]).float().mean() for name, p in model.named_parameters()]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert min(moved) > 0.5  # bfloat16 masters would stand still at this learning rate


def test_entropy_and_logprobs_come_for_every_trained_token(folder: Path) -> None:
    config = config_for(folder)
    batch = build_micro_batch(made_samples(3), packed=True, version=0, algorithm="grpo")
    logprobs, entropy = micro_batch_logprobs(load_model(config, CPU), batch, config)
    assert logprobs.shape == entropy.shape == batch.targets.shape
    assert (logprobs < 0).all()
    assert (entropy > 0).all()
    assert (entropy < math.log(512)).all()


def test_the_entropy_metric_is_the_mean_over_trained_tokens_and_costs_no_forward(folder: Path, ranks: Ranks) -> None:
    """By hand in float64 from Transformers' own logits; one forward a micro-batch, as without the metric."""
    samples = made_samples(4, seed=5)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    expected = []
    for sample in samples:
        logits = reference(input_ids=torch.tensor(sample.input_ids[None].astype(np.int64))).logits[0].detach().double() / 0.7
        logs = torch.log_softmax(logits, -1)[np.flatnonzero(sample.labels != -100) - 1]
        expected += (-(logs.exp() * logs).sum(-1)).tolist()
    config = config_for(folder, infer_temperature=0.7)
    model, metrics = sharded_model(config), RoundMetrics(config, ranks)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    (result,) = train_steps(model, config, ranks, [[samples[:2], samples[2:]]])
    metrics.add_step(result, samples, choose_seconds=0.0)
    total, count, _ = metrics.close_round()["Train/Entropy"]
    assert total / count == pytest.approx(np.mean(expected), rel=1e-4)
    assert len(forwards) == 2


def test_numbers_are_those_of_their_place() -> None:
    tensor = torch.tensor([1.0, 2.0])
    numbers = Numbers(tensor)
    tensor.zero_()
    assert numbers.values() == [1.0, 2.0]


def test_a_bad_step_is_skipped_and_too_many_stop_the_run(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(4)
    samples[0].advantage = math.inf
    config = config_for(folder, max_bad_steps=3, clip_mode="ppo")
    model = sharded_model(config)
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] = math.nan
    before = [p.clone() for p in model.parameters()]
    stepper = Stepper(model, config, ranks, unsharded=True)
    totals = LocalTotals.of(samples)
    assert stepper.run([samples], totals, step=0, version=0).is_bad
    assert stepper.run([samples], totals, step=1, version=0).is_bad
    stepper.check_bad_steps()
    assert stepper.run([samples], totals, step=2, version=0).is_bad
    with pytest.raises(BadStepsError, match="--max-bad-steps 3"):
        stepper.check_bad_steps()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(7.0), parameter.nan_to_num(7.0))


def test_gradients_are_clipped_to_the_norm_and_the_norm_is_that_of_all(folder: Path, ranks: Ranks) -> None:
    samples = made_samples(6)
    free = _gradients(folder, ranks, [samples], max_grad_norm=0.0)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in free.values()))
    limit = norm / 3
    clipped = _gradients(folder, ranks, [samples], max_grad_norm=limit)
    assert math.sqrt(sum(float(grad.square().sum()) for grad in clipped.values())) == pytest.approx(limit, rel=1e-3)
    config = config_for(folder, max_grad_norm=limit)
    (result,) = train_steps(sharded_model(config), config, ranks, [[samples]])
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)


def test_weight_decay_spares_norms_and_biases() -> None:
    model = tiny.build_tiny("qwen2", tied=False)
    optimizer = build_optimizer(model, config_for(Path("unused"), weight_decay=0.1), CPU)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (not name.endswith("bias") and "norm" not in name), name


def test_the_learning_rate_follows_the_schedule(folder: Path, ranks: Ranks) -> None:
    config = config_for(folder, lr_warmup_steps=2, max_steps=4, learning_rate=1e-3)
    results = train_steps(sharded_model(config), config, ranks, [[made_samples(2)]] * 4)
    assert [result.learning_rate for result in results] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_training_raises_what_was_good(folder: Path, ranks: Ranks) -> None:
    """A few steps on fixed samples: replies with a positive advantage become likelier, others less."""
    rng = np.random.default_rng(0)
    samples = [made_sample(rng, advantage=1.0 if index % 2 else -1.0) for index in range(8)]
    config = config_for(folder, learning_rate=3e-3, clip_mode="cispo")
    model = sharded_model(config)
    batch = build_micro_batch(samples, packed=True, version=0, algorithm="grpo")
    for sample in samples:
        sample.old_logprobs = np.where(sample.labels != -100, -6.2, 0).astype(np.float32)

    def mean_logprobs() -> tuple[float, float]:
        with torch.no_grad():
            logprobs, _ = micro_batch_logprobs(model, batch, config)
        reshard(model)
        return float(logprobs[batch.advantages > 0].mean()), float(logprobs[batch.advantages < 0].mean())

    good, bad = mean_logprobs()
    train_steps(model, config, ranks, [[samples]] * 15)
    better, worse = mean_logprobs()
    assert better > good + 0.5
    assert better - worse > good - bad + 1.0
