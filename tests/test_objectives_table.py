"""The table: each formula of the design (section 8) against NumPy float64, each gradient against central differences.

Written from the design's text, not from the code: lp new, lo old, d = lp - lo clamped to [-20, 20], r = exp(d), A advantage.
What carries no gradient by the text (gipo's w, cispo's clipped r) is held fixed in the differences.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from accerl_mp.algorithms.advantages import group_advantages, monte_carlo_returns, rloo_advantages
from accerl_mp.algorithms.losses import k3_kl, policy_objective, token_losses, truncated_weights
from accerl_mp.config import AlgorithmConfig

Array = np.ndarray
Formula = Callable[[Array, Array, Array, Array], Array]
EPS, SIGMA, TAU_POS, TAU_NEG, DUAL = 0.2, 0.7, 1.3, 2.5, 3.0


def ratio(lp: Array, lo: Array) -> Array:
    return np.exp(np.clip(lp - lo, -20, 20))


def ppo(lp: Array, lo: Array, a: Array, _: Array) -> Array:
    r = ratio(lp, lo)
    return np.minimum(r * a, np.clip(r, 1 - EPS, 1 + EPS) * a)


def dual_clip(lp: Array, lo: Array, a: Array, at: Array) -> Array:
    plain = ppo(lp, lo, a, at)
    return np.where(a < 0, np.maximum(plain, DUAL * a), plain)


def gipo(lp: Array, lo: Array, a: Array, at: Array) -> Array:
    return ratio(lp, lo) * a * np.exp(-0.5 * (np.log(ratio(at, lo)) / SIGMA) ** 2)


def sapo(lp: Array, lo: Array, a: Array, _: Array) -> Array:
    tau = np.where(a > 0, TAU_POS, TAU_NEG)
    with np.errstate(over="ignore"):
        return a * (4 / tau) / (1 + np.exp(-tau * (ratio(lp, lo) - 1)))


def cispo(lp: Array, lo: Array, a: Array, at: Array) -> Array:
    return np.clip(ratio(at, lo), 1 - EPS, 1 + EPS) * a * lp


def gspo(lp: Array, lo: Array, a: Array, _: Array) -> Array:
    """Two sequences: the even and the odd tokens. The sequence's ratio is the geometric mean of its tokens' ratios."""
    d = np.clip(lp - lo, -20, 20)
    means = np.where(np.arange(len(d)) % 2 == 0, d[::2].mean(), d[1::2].mean() if len(d) > 1 else 0.0)
    r = np.exp(means)
    return np.minimum(r * a, np.clip(r, 1 - EPS, 1 + EPS) * a)


TABLE: dict[str, Formula] = {"ppo": ppo, "ppo, dual clip": dual_clip, "gipo": gipo, "sapo": sapo, "cispo": cispo, "gspo": gspo}

# Advantages and d of four tokens. Differences want distance from the kinks at r = 1 +- eps, r = 3 and d = +- 20.
EDGES: dict[str, tuple[list[float], list[float]]] = {
    "on policy": ([1.0, -1.0, 0.5, -2.0], [0.0, 0.0, 0.0, 0.0]),
    "inside the clip range": ([1.0, -1.0, 0.5, -2.0], [0.1, 0.1, -0.1, -0.1]),
    "above the clip range": ([1.0, -1.0, 0.5, -2.0], [0.5, 0.5, 0.7, 0.7]),
    "below the clip range": ([1.0, -1.0, 0.5, -2.0], [-0.5, -0.5, -0.7, -0.7]),
    "beyond dual clip": ([1.0, -1.0, 0.5, -2.0], [1.5, 1.5, 2.0, 2.0]),
    "no advantage": ([0.0, 0.0, 0.0, 0.0], [0.0, 0.5, -0.5, 3.0]),
    "far off policy": ([1.0, -1.0, 0.5, -2.0], [6.0, -6.0, -9.0, 3.0]),
    "past the clamp": ([1.0, -1.0, 0.5, -2.0], [25.0, 30.0, -25.0, -30.0]),
}


def ours(name: str, lp: Array, lo: Array, a: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, gradients with respect to lp) of the code, float32."""
    leaf = torch.tensor(lp, dtype=torch.float32).requires_grad_()
    values = policy_objective(
        leaf,
        torch.tensor(lo, dtype=torch.float32),
        torch.tensor(a, dtype=torch.float32),
        clip_mode=name.split(",")[0],
        clip_eps=EPS,
        gipo_sigma=SIGMA,
        sapo_tau_pos=TAU_POS,
        sapo_tau_neg=TAU_NEG,
        dual_clip=DUAL if "dual" in name else None,
        sequence_ids=torch.arange(len(lp)) % 2,
    )
    values.sum().backward()
    assert leaf.grad is not None
    return values.detach(), leaf.grad


def differences(formula: Callable[[Array], Array], at: Array, step: float = 1e-6) -> Array:
    """d sum(formula) / d lp by central differences, float64."""
    gradient = np.zeros(len(at))
    for index in range(len(at)):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (formula(up) - formula(down)).sum() / (2 * step)
    return gradient


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", TABLE)
def test_objective(name: str, edge: str) -> None:
    """rtol 1e-4: d is a float32 difference of logprobs near -30, off by 2e-6, and r = exp(d) as much relatively."""
    advantages, d = (np.array(values) for values in EDGES[edge])
    lo = np.full(4, -1.5) - np.maximum(d, 0)  # all logprobs negative
    lp = lo + d
    formula = TABLE[name]
    values, gradient = ours(name, lp, lo, advantages)
    expected = formula(lp, lo, advantages, lp)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-4, atol=1e-6)
    expected_gradient = differences(lambda at: formula(at, lo, advantages, lp), lp)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-3, atol=1e-3 * max(1e-3, np.abs(expected).max()))


@pytest.mark.parametrize("d", [-1e4, -1e3, -88.8, -20.1, -20.0, 0.0, 20.0, 20.1, 88.8, 1e3, 1e4])
@pytest.mark.parametrize("name", TABLE)
def test_any_distance_gives_finite_values_and_gradients(name: str, d: float) -> None:
    """Values still those of the formula; the clamp, not an overflow, decides."""
    advantages = np.array([1.0, -1.0, 0.0, 1e3])
    lo = np.full(4, -1.0 - max(d, 0.0))
    values, gradient = ours(name, lo + d, lo, advantages)
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    np.testing.assert_allclose(values.numpy(), TABLE[name](lo + d, lo, advantages, lo + d), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("d", [-1e4, -25.0, -3.0, -0.1, 0.0, 1e-3, 0.1, 3.0, 25.0, 1e4])
def test_k3(d: float) -> None:
    """r - 1 - d, never negative, against the policy that sampled (r = new / old) and the start model (r = start / new)."""
    clamped = np.clip(d, -20, 20)
    expected = np.expm1(clamped) - clamped
    slope = 0.0 if abs(d) > 20 else np.expm1(d)
    lp, other = torch.tensor([-1.0 - max(0.0, -d)], requires_grad=True), torch.tensor([-1.0 - max(0.0, -d) - d])
    config, ids, zero = AlgorithmConfig(), torch.zeros(1, dtype=torch.long), torch.zeros(1)
    against_old = token_losses(lp, other, zero, ids, config).k3
    start_of = lp.detach() + d
    against_start = token_losses(lp, other, zero, ids, config, reference_logprobs=start_of).ref_k3
    for value, sign in ((against_old, 1.0), (against_start, -1.0), (k3_kl(lp, other), 1.0)):
        (gradient,) = torch.autograd.grad(value.sum(), lp)
        assert value.item() >= 0
        assert value.item() == pytest.approx(expected, rel=2e-3, abs=1e-6)
        assert gradient.item() == pytest.approx(sign * slope, rel=2e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("d", "expected"), [(0.0, 1.0), (-1.0, np.exp(-1)), (np.log(1.9), 1.9), (1.0, 2.0), (1e4, 2.0), (-1e4, np.exp(-20))]
)
def test_truncated_weight(d: float, expected: float) -> None:
    """min(exp(lp_prox - lo), cap)."""
    weight, is_capped = truncated_weights(torch.tensor([-1.0]), torch.tensor([-1.0 - d]), cap=2.0)
    assert weight.item() == pytest.approx(expected, rel=1e-4)
    assert is_capped.item() == float(np.exp(min(d, 20.0)) > 2.0)


RETURNS: dict[str, list[float]] = {
    "a win among losses": [0.0, 0.0, 1.0, 0.0],
    "all different": [0.5, -1.0, 3.0, 0.25, 2.0],
    "large and close": [1e6, 1e6 + 1, 1e6 - 1],
    "two": [1.0, 0.0],
}
NO_SIGNAL: dict[str, list[float]] = {"all equal": [0.7] * 5, "one episode": [3.0], "differ by less than eps": [1.0, 1.0 + 1e-10]}


@pytest.mark.parametrize("case", RETURNS)
def test_group_advantages(case: str) -> None:
    """(R - mean) / (std + eps) with the population std; without the division; and leave-one-out."""
    returns = RETURNS[case]
    count = len(returns)
    mean = sum(returns) / count
    std = (sum((value - mean) ** 2 for value in returns) / count) ** 0.5
    np.testing.assert_allclose(group_advantages(returns, 1e-8), [(value - mean) / (std + 1e-8) for value in returns], rtol=1e-6)
    np.testing.assert_allclose(group_advantages(returns, norm="none"), [value - mean for value in returns], rtol=1e-6)
    others = [(sum(returns) - value) / (count - 1) for value in returns]
    np.testing.assert_allclose(rloo_advantages(returns), [value - other for value, other in zip(returns, others, strict=True)], rtol=1e-6)


@pytest.mark.parametrize("case", NO_SIGNAL)
def test_groups_without_signal_have_advantages_of_zero(case: str) -> None:
    for norm in ("std", "none"):
        assert not np.any(group_advantages(NO_SIGNAL[case], 1e-8, norm=norm))
    np.testing.assert_allclose(rloo_advantages(NO_SIGNAL[case]), 0, atol=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("per", ["token", "turn"])
def test_monte_carlo_returns(gamma: float, per: str) -> None:
    """G_i = sum over later trained tokens j of gamma^(distance) r_j; distance in trained tokens, or in turns."""
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 1])
    turns = np.array([-1, 0, 0, -1, -1, 1, 1, 1, -1, 2])
    rewards = np.array([0, 0, 1.0, 0, 0, 0, 0, -0.5, 0, 2.0])
    trained = np.flatnonzero(mask)
    expected = np.zeros(len(mask))
    for position, i in enumerate(trained):
        for later, j in enumerate(trained[position:]):
            distance = later if per == "token" else turns[j] - turns[i]
            expected[i] += gamma**distance * rewards[j]
    got = monte_carlo_returns(rewards, mask, gamma, response_indices=turns if per == "turn" else None)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
