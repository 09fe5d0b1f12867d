"""Each objective with each algorithm learns a bandit of two moves, and with the sign of its loss flipped unlearns it.

The real advantages, objectives, weights and loss; in place of a model a table of logits. A check takes a tenth of a second.
"""

from typing import Any

import numpy as np
import pytest
import torch

from accerl_mp.algorithms.advantages import group_advantages, monte_carlo_returns, rloo_advantages
from accerl_mp.algorithms.losses import OBJECTIVES, StepTotals, token_losses, token_weights, weighted_loss
from accerl_mp.config import AlgorithmConfig

NUM_GAMES, NUM_MOVES, NUM_ACTIONS, GROUP_SIZE = 3, 2, 4, 8
BEST = torch.tensor([[0, 3], [2, 1], [1, 1]])
"""[games, moves]: the action that is rewarded with 1."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual clip": {"dual_clip": 3.0},
    "sequence mean": {"loss_aggregation": "sequence"},
    "recomputed": {"recompute_old_logprobs": True},
}


def expected_reward(logits: torch.Tensor) -> float:
    """Mean probability of the best action; a quarter for a policy that knows nothing."""
    return torch.softmax(logits, -1).gather(-1, BEST[..., None]).mean().item()


def advantages_of(rewards: np.ndarray, algorithm: str) -> np.ndarray:
    """[games, group, moves] from rewards of the same shape."""
    if algorithm == "ppo":
        return np.array([[monte_carlo_returns(episode, np.ones(NUM_MOVES), 0.9) for episode in group] for group in rewards])
    estimate = rloo_advantages if algorithm == "rloo" else group_advantages
    return np.repeat([estimate(group.sum(-1)) for group in rewards], NUM_MOVES).reshape(rewards.shape)


def learn(config: AlgorithmConfig, *, sign: float = 1.0, rounds: int = 40, updates: int = 2) -> float:
    """Expected reward after `rounds` of sampling once and updating twice, so that the second update is off-policy."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(NUM_GAMES, NUM_MOVES, NUM_ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    num_tokens = NUM_GAMES * GROUP_SIZE * NUM_MOVES
    sequences = torch.arange(num_tokens) // NUM_MOVES
    lengths, totals = torch.full((num_tokens // NUM_MOVES,), NUM_MOVES), StepTotals(num_tokens, num_tokens / NUM_MOVES)
    weights = token_weights(lengths, sequences, totals, aggregation=config.loss_aggregation)

    def logprobs(actions: torch.Tensor) -> torch.Tensor:
        table = torch.log_softmax(logits, -1)[:, None].expand(-1, GROUP_SIZE, -1, -1)
        return table.gather(-1, actions[..., None]).flatten()

    for _ in range(rounds):
        rows = torch.softmax(logits.detach(), -1).view(-1, NUM_ACTIONS)
        drawn = torch.multinomial(rows, GROUP_SIZE, replacement=True, generator=generator)
        actions = drawn.view(NUM_GAMES, NUM_MOVES, GROUP_SIZE).transpose(1, 2)
        rewards = (actions == BEST[:, None]).numpy().astype(np.float64)
        advantages = torch.tensor(advantages_of(rewards, config.rl_algorithm), dtype=torch.float32).flatten()
        old = logprobs(actions).detach()
        for _ in range(updates):
            new = logprobs(actions)
            proximal = new.detach() if config.recompute_old_logprobs else None
            losses = token_losses(new, old, advantages, sequences, config, proximal_logprobs=proximal)
            optimizer.zero_grad()
            (sign * weighted_loss(losses, weights, kl_coef=config.old_new_kl_coef)).backward()
            optimizer.step()
    return expected_reward(logits.detach())


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
@pytest.mark.parametrize("clip_mode", list(OBJECTIVES))
def test_every_objective_learns_and_its_negative_does_not(clip_mode: str, algorithm: str) -> None:
    config = AlgorithmConfig(clip_mode=clip_mode, rl_algorithm=algorithm)  # type: ignore[arg-type]
    assert learn(config) > 0.6
    assert learn(config, sign=-1.0) < 0.25


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variant_learns_and_its_negative_does_not(name: str) -> None:
    config = AlgorithmConfig(**SETTINGS[name])
    assert learn(config) > 0.6
    assert learn(config, sign=-1.0) < 0.25


def test_a_penalty_alone_changes_nothing() -> None:
    """Without advantages k3 keeps the policy where it samples: at the start."""
    config = AlgorithmConfig(old_new_kl_coef=1.0)
    assert learn(config, rounds=0) == 0.25
    assert learn(AlgorithmConfig(old_new_kl_coef=1e3), rounds=10) < learn(AlgorithmConfig(), rounds=10)
