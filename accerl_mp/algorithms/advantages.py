"""Advantages from rewards: Monte-Carlo returns of an episode, or relative to the episodes of a group. NumPy only."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike


def monte_carlo_returns(
    token_rewards: ArrayLike, loss_mask: ArrayLike, gamma: float, *, response_indices: ArrayLike | None = None
) -> np.ndarray:
    """Reward-to-go of each trained token, [T]; 0 where `loss_mask` is 0.

    G_t = r_t + gamma * G_next, where next is the next *trained* token. With `response_indices` ([T], the
    number of the turn) gamma applies only from one turn to the next, so that a long reply isn't discounted more than
    a short one.

    Example: rewards [0, 1, 0, 2] at mask [1, 1, 0, 1] with gamma 0.5 give [1, 2, 0, 2].
    """
    rewards, mask = _as_floats(token_rewards), np.asarray(loss_mask).astype(bool)
    turns = None if response_indices is None else np.asarray(response_indices)
    returns = np.zeros(len(rewards))
    following, next_turn = 0.0, None
    for index in np.flatnonzero(mask)[::-1].tolist():
        turn = index if turns is None else int(turns[index])
        discount = 1.0 if turn == next_turn else gamma
        following = float(rewards[index]) + discount * following
        returns[index] = following
        next_turn = turn
    return returns.astype(rewards.dtype)


def group_advantages(returns: ArrayLike, eps: float = 1e-8, *, norm: Literal["std", "none"] = "std") -> np.ndarray:
    """(R - mean) / (std + eps) over the episodes of one group, [G], with the population std.

    All 0 where the std is not above `eps` (equal returns, one episode): such a group says nothing. `norm="none"`
    doesn't divide.
    """
    values = _as_floats(returns)
    if len(values) < 2:
        return np.zeros_like(values)
    exact = values.astype(np.float64)
    centred = exact - exact.mean()
    std = float(exact.std())
    if std <= eps:
        return np.zeros_like(values)
    return (centred / (std + eps) if norm == "std" else centred).astype(values.dtype)


def rloo_advantages(returns: ArrayLike) -> np.ndarray:
    """Each return less the mean of the *others*, [G] (leave one out). All 0 for a group of one."""
    values = _as_floats(returns)
    if len(values) < 2:
        return np.zeros_like(values)
    exact = values.astype(np.float64)
    others = (exact.sum() - exact) / (len(exact) - 1)
    return (exact - others).astype(values.dtype)


def has_signal(returns: ArrayLike, eps: float = 1e-8) -> bool:
    """Whether a group's returns differ: without that its advantages are 0 and there is nothing to train."""
    values = _as_floats(returns)
    return len(values) > 1 and float(values.std(dtype=np.float64)) > eps


def _as_floats(values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)
