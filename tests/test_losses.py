"""Objectives, KL and the step's loss against NumPy float64, written from the design's formulas; gradients against differences."""

import numpy as np
import pytest
import torch

from accerl_mp.algorithms.losses import (
    StepTotals,
    k3_kl,
    normalised_advantages,
    policy_objective,
    token_losses,
    token_weights,
    truncated_weights,
    weighted_loss,
)
from accerl_mp.config import AlgorithmConfig

MODES = ["ppo", "gipo", "sapo", "cispo", "gspo"]
SEQUENCES = [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]


def _tokens(seed: int = 0, count: int = 10, spread: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    new = -rng.exponential(1.0, count) - 0.5
    return new, new + rng.normal(0, spread, count), rng.normal(0, 2, count)


def _numpy_objective(mode: str, new: np.ndarray, old: np.ndarray, advantages: np.ndarray, eps: float = 0.2) -> np.ndarray:
    d = np.clip(new - old, -20, 20)
    if mode == "gspo":
        sequences = np.array(SEQUENCES)
        d = np.array([d[sequences == s].mean() for s in sequences])
    ratio = np.exp(d)
    if mode in ("ppo", "gspo"):
        return np.minimum(ratio * advantages, np.clip(ratio, 1 - eps, 1 + eps) * advantages)
    if mode == "gipo":
        return ratio * advantages * np.exp(-0.5 * (np.log(ratio) / 0.7) ** 2)
    if mode == "sapo":
        tau = np.where(advantages > 0, 1.3, 2.5)
        return advantages * (4 / tau) / (1 + np.exp(-tau * (ratio - 1)))
    return np.clip(ratio, 1 - eps, 1 + eps) * advantages * new


def _objective(mode: str, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **options: float) -> torch.Tensor:
    settings = {"gipo_sigma": 0.7, "sapo_tau_pos": 1.3, "sapo_tau_neg": 2.5} | options
    return policy_objective(new, old, advantages, clip_mode=mode, sequence_ids=torch.tensor(SEQUENCES[: len(new)]), **settings)


def _tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(array, dtype=torch.float32) for array in arrays]


@pytest.mark.parametrize("mode", MODES)
def test_each_objective_agrees_with_its_formula(mode: str) -> None:
    new, old, advantages = _tokens()
    got = _objective(mode, *_tensors(new, old, advantages))
    np.testing.assert_allclose(got.numpy(), _numpy_objective(mode, new, old, advantages), rtol=1e-5, atol=1e-6)


def _stopped_objective(mode: str, new: np.ndarray, old: np.ndarray, advantages: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The formula with what carries no gradient held at `at`."""
    if mode == "gipo":
        return np.exp(new - old) * advantages * np.exp(-0.5 * ((at - old) / 0.7) ** 2)
    if mode == "cispo":
        return np.clip(np.exp(at - old), 0.8, 1.2) * advantages * new
    return _numpy_objective(mode, new, old, advantages)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_agree_with_central_differences(mode: str) -> None:
    new, old, advantages = _tokens(seed=3)
    tensor = torch.tensor(new, dtype=torch.float32, requires_grad=True)
    _objective(mode, tensor, *_tensors(old, advantages)).sum().backward()
    step, expected = 1e-6, np.zeros(len(new))
    for index in range(len(new)):
        up, down = new.copy(), new.copy()
        up[index] += step
        down[index] -= step
        difference = _stopped_objective(mode, up, old, advantages, new) - _stopped_objective(mode, down, old, advantages, new)
        expected[index] = difference.sum() / (2 * step)
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-3, atol=1e-4)


def test_ppo_by_hand() -> None:
    """Advantage 1 at r = 2 is clipped to 1.2; advantage -1 is not."""
    new, old = torch.log(torch.tensor([2.0, 2.0, 0.5, 0.5])), torch.zeros(4)
    got = policy_objective(new, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_mode="ppo")
    torch.testing.assert_close(got, torch.tensor([1.2, -2.0, 0.5, -0.8]))


def test_dual_clip_bounds_tokens_that_should_become_rarer() -> None:
    new, old = torch.log(torch.tensor([9.0, 9.0, 1.0])), torch.zeros(3)
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    got = policy_objective(new, old, advantages, clip_mode="ppo", dual_clip=3.0)
    torch.testing.assert_close(got, torch.tensor([-3.0, 1.2, -1.0]))


def test_on_policy_every_objective_has_the_policy_gradient() -> None:
    """At r = 1 the gradient of each is A (gspo: the sequence's mean A); sapo is scaled so that its slope is 1 there."""
    old, advantages = torch.full((5,), -1.0), torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])
    for mode in ("ppo", "gipo", "sapo", "cispo"):
        new = old.clone().requires_grad_()
        policy_objective(new, old, advantages, clip_mode=mode).sum().backward()
        torch.testing.assert_close(new.grad, advantages, msg=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_any_finite_input_gives_finite_values_and_gradients(mode: str, dual_clip: float | None) -> None:
    extremes = torch.tensor([0.0, -1.0, -50.0, -1e4, -1e30, -3e38, 88.0, 1e30])
    for advantage in (0.0, 1.0, -1.0, 1e6, -1e30):
        for old in extremes:
            new = extremes.clone().requires_grad_()
            got = policy_objective(
                new, old.expand(8), torch.full((8,), advantage), clip_mode=mode, dual_clip=dual_clip, sequence_ids=torch.arange(8)
            )
            got.sum().backward()
            assert torch.isfinite(got).all(), (mode, advantage, old)
            assert torch.isfinite(new.grad).all(), (mode, advantage, old)


def test_k3_is_never_negative_and_zero_on_policy() -> None:
    new, old, _ = _tokens(count=200, spread=2.0)
    d = np.clip(new - old, -20, 20)
    got = k3_kl(*_tensors(new, old))
    np.testing.assert_allclose(got.numpy(), np.exp(d) - 1 - d, rtol=1e-4, atol=1e-6)
    assert (got >= 0).all()
    assert k3_kl(*_tensors(new, new)).abs().max() == 0
    assert torch.isfinite(k3_kl(torch.tensor([1e30, -1e30]), torch.zeros(2))).all()


def test_token_aggregation_is_the_mean_over_all_tokens_of_all_micro_batches() -> None:
    assert _aggregated("token") == pytest.approx(_mean_over_tokens(), rel=1e-5)


def test_sequence_aggregation_is_the_mean_over_samples_of_token_means() -> None:
    new, old, advantages = _tokens()
    objective, sequences = _numpy_objective("ppo", new, old, advantages), np.array(SEQUENCES)
    expected = -np.mean([objective[sequences == s].mean() for s in range(3)])
    assert _aggregated("sequence") == pytest.approx(expected, rel=1e-5)


def test_the_kl_term_is_weighted_like_the_objective() -> None:
    new, old, _ = _tokens()
    d = new - old
    assert _aggregated("token", kl_coef=0.5) == pytest.approx(_mean_over_tokens() + 0.5 * np.mean(np.exp(d) - 1 - d), rel=1e-5)


def _mean_over_tokens() -> float:
    return -float(np.mean(_numpy_objective("ppo", *_tokens())))


def _aggregated(aggregation: str, kl_coef: float = 0.0) -> float:
    """The three samples split over two micro-batches (or ranks): their losses add up to the step's."""
    new, old, advantages = _tensors(*_tokens())
    totals, config = StepTotals(num_tokens=10, num_samples=3), AlgorithmConfig()
    loss = torch.zeros(())
    for tokens, lengths, sequences in ((slice(0, 5), [3, 2], SEQUENCES[:5]), (slice(5, 10), [5], [0] * 5)):
        ids = torch.tensor(sequences)
        weights = token_weights(torch.tensor(lengths), ids, totals, aggregation=aggregation)
        loss += weighted_loss(token_losses(new[tokens], old[tokens], advantages[tokens], ids, config), weights, kl_coef=kl_coef)
    return float(loss)


def test_advantages_are_standardised_with_the_steps_sums() -> None:
    values = np.array([1.0, 2.0, 4.0, -3.0])
    got = normalised_advantages(torch.tensor(values), total=values.sum(), total_squares=(values**2).sum(), count=len(values), eps=1e-8)
    np.testing.assert_allclose(got.numpy(), (values - values.mean()) / (values.std() + 1e-8), rtol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_recomputed_logprobs_weight_each_token_by_the_truncated_ratio(mode: str) -> None:
    """Design, section 8: r = exp(lp - lp_prox), each token weighted by min(exp(lp_prox - lo), cap), in float64."""
    new, old, advantages = _tokens(spread=0.8)
    proximal = new + np.random.default_rng(7).normal(0, 0.3, len(new))
    config = AlgorithmConfig(clip_mode=mode, recompute_old_logprobs=True, tis_cap=1.1, gipo_sigma=0.7, sapo_tau_pos=1.3, sapo_tau_neg=2.5)
    tensors = _tensors(new, old, advantages)
    got = token_losses(*tensors, torch.tensor(SEQUENCES), config, proximal_logprobs=_tensors(proximal)[0])
    ratio = np.exp(proximal - old)
    expected = _numpy_objective(mode, new, proximal, advantages) * np.minimum(ratio, 1.1)
    assert 0 < (ratio > 1.1).sum() < len(ratio)
    np.testing.assert_allclose(got.objective.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.is_capped.numpy(), ratio > 1.1)
    np.testing.assert_allclose(got.k3.numpy(), np.exp(new - old) - 1 - (new - old), rtol=1e-4, atol=1e-6)  # still of what sampled


@pytest.mark.parametrize("mode", MODES)
def test_recomputed_logprobs_change_nothing_on_fresh_samples(mode: str) -> None:
    """lp_prox = lo: every weight is exactly 1, whatever lp is."""
    new, old, advantages = _tensors(*_tokens())
    config, ids = AlgorithmConfig(clip_mode=mode, recompute_old_logprobs=True), torch.tensor(SEQUENCES)
    gradients = []
    for proximal in (None, old):
        leaf = new.clone().requires_grad_()
        losses = token_losses(leaf, old, advantages, ids, config, proximal_logprobs=proximal)
        losses.objective.sum().backward()
        gradients.append((losses.objective.detach(), leaf.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_the_truncated_weight_carries_no_gradient_and_stays_finite() -> None:
    proximal = torch.tensor([0.0, -1e4, 1e4, -3.0]).requires_grad_()
    weights, is_capped = truncated_weights(proximal, torch.tensor([0.0, 1e4, -1e4, -5.0]), cap=2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, float(np.exp(-20.0)), 2.0, 2.0]))
    assert is_capped.tolist() == [0, 0, 1, 1]
