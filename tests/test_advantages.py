"""Returns and group advantages against sums written out by hand in float64."""

import numpy as np
import pytest

from accerl_mp.algorithms.advantages import group_advantages, has_signal, monte_carlo_returns, rloo_advantages


def test_returns_sum_the_rewards_of_later_trained_tokens() -> None:
    returns = monte_carlo_returns([0, 1, 0, 2], [1, 1, 0, 1], 0.5)
    assert returns.tolist() == [1 * 0.5 + 2 * 0.25, 1 + 2 * 0.5, 0, 2]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_agree_with_the_double_sum(gamma: float) -> None:
    rng = np.random.default_rng(0)
    rewards, mask = rng.normal(size=40), rng.random(40) < 0.6
    trained = np.flatnonzero(mask)
    expected = np.zeros(40)
    for rank, index in enumerate(trained):
        expected[index] = sum(gamma**distance * rewards[later] for distance, later in enumerate(trained[rank:]))
    np.testing.assert_allclose(monte_carlo_returns(rewards, mask, gamma), expected, rtol=1e-12)


def test_a_reward_on_an_untrained_token_counts_for_nothing() -> None:
    assert monte_carlo_returns([5.0, 7.0, 1.0], [1, 0, 1], 1.0).tolist() == [6.0, 0.0, 1.0]


def test_gamma_per_turn_does_not_depend_on_the_length_of_replies() -> None:
    turns = np.array([-1, 0, 0, 0, -1, 1, -1, 2, 2])
    rewards = np.array([0, 0, 0, 1, 0, 2, 0, 0, 4], float)
    returns = monte_carlo_returns(rewards, turns >= 0, 0.5, response_indices=turns)
    assert returns.tolist() == [0, 3, 3, 3, 0, 4, 0, 4, 4]
    assert monte_carlo_returns(rewards, turns >= 0, 0.5)[1] == pytest.approx(1 * 0.25 + 2 * 0.125 + 4 * 0.5**5)


def test_returns_keep_the_dtype_of_float_rewards() -> None:
    assert monte_carlo_returns(np.ones(3, np.float32), [1, 1, 1], 1.0).dtype == np.float32
    assert monte_carlo_returns([1, 2, 3], [1, 1, 1], 1.0).dtype == np.float64
    assert monte_carlo_returns(np.zeros(0, np.float32), [], 1.0).shape == (0,)


def test_group_advantages_are_standardised_with_the_population_std() -> None:
    returns = np.array([0.0, 1.0, 1.0, 4.0])
    np.testing.assert_allclose(group_advantages(returns), (returns - 1.5) / (returns.std(ddof=0) + 1e-8))
    np.testing.assert_allclose(group_advantages(returns, norm="none"), returns - 1.5)
    assert abs(group_advantages(returns).mean()) < 1e-12


@pytest.mark.parametrize("returns", [[], [3.0], [2.0, 2.0, 2.0], [0.1 + 0.2, 0.3, 0.3]])
def test_a_group_without_differences_has_no_advantages(returns: list[float]) -> None:
    for advantages in (group_advantages(returns), group_advantages(returns, norm="none")):
        assert advantages.tolist() == [0.0] * len(returns)
    assert not has_signal(returns)


def test_the_threshold_of_a_group_without_differences_is_eps() -> None:
    assert has_signal([0.0, 1.0], 0.4)
    assert not has_signal([0.0, 1.0], 0.5)
    assert group_advantages([0.0, 1.0], 0.5).tolist() == [0.0, 0.0]


def test_leave_one_out_compares_each_return_with_the_mean_of_the_others() -> None:
    returns = [1.0, 2.0, 6.0]
    np.testing.assert_allclose(rloo_advantages(returns), [1 - 4, 2 - 3.5, 6 - 1.5])
    assert rloo_advantages([5.0]).tolist() == [0.0]
