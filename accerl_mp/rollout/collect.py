"""A group: episodes of one game, played side by side, their advantages, and the samples that they give."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accerl_mp.algorithms.advantages import group_advantages, has_signal, monte_carlo_returns, rloo_advantages
from accerl_mp.config import AlgorithmConfig, Config
from accerl_mp.rollout.env import game_name
from accerl_mp.rollout.episode import Episode, Player, Turn
from accerl_mp.rollout.tasks import cancel
from accerl_mp.samples import UNTRAINED, RLSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """A group as ingest deals it."""

    group_id: int
    episode_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    game_id: int
    game_path: str
    kind: Literal["train", "eval"]
    eval_id: int = -1

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Deal":
        return cls(
            group_id=message["group_id"],
            episode_ids=tuple(message["episode_ids"]),
            seeds=tuple(message["seeds"]),
            game_id=message["game_id"],
            game_path=message["game_path"],
            kind=message["kind"],
            eval_id=message["eval_id"],
        )


@dataclass(slots=True, kw_only=True)
class Group:
    """A played group, ready to be sent."""

    deal: Deal
    episodes: list[Episode]
    outcome: Literal["samples", "zero_std", "rejected"]
    """samples: to be trained; zero_std: all rewards alike, no signal; rejected: nothing in it can be trained.
    An evaluation's group has no samples and counts as "samples" all the same."""
    samples: list[RLSample]
    rewards: np.ndarray
    """[G], what entered the group statistics."""
    advantages: np.ndarray
    """[G]; zeros with ppo, whose advantages are a token's."""
    records: list[dict[str, Any]]
    """An EpisodeRecord an episode."""


async def play_group(player: Player, deal: Deal, slots: asyncio.Semaphore, on_end: Callable[[], None] = lambda: None) -> list[Episode]:
    """Play all episodes of a group, each as soon as one of the process's slots is free. The first that fails ends the others.

    `on_end` is called as each one ends.
    """
    config = player.config
    temperature = config.metrics.eval_temperature if deal.kind == "eval" else config.inference.infer_temperature

    async def play(episode_id: int, seed: int) -> Episode:
        async with slots:
            episode = await player.play(
                path=deal.game_path, episode_id=episode_id, seed=seed, temperature=temperature, is_seeded=deal.kind == "eval"
            )
        on_end()
        return episode

    running = [asyncio.ensure_future(play(*numbers)) for numbers in zip(deal.episode_ids, deal.seeds, strict=True)]
    try:
        return await asyncio.gather(*running)
    finally:
        await cancel(running)


def build_group(deal: Deal, episodes: list[Episode], config: Config, *, worker: int) -> Group:
    """Rewards and advantages over the whole group, truncated episodes included; then samples of those that train."""
    algorithm = config.algorithm
    rewards = np.array([group_reward(episode, config) for episode in episodes], dtype=np.float64)
    advantages = _group_advantages(rewards, algorithm)
    outcome, samples = "samples", []
    if deal.kind == "train":
        if algorithm.rl_algorithm != "ppo" and not algorithm.keep_zero_std_groups and not has_signal(rewards, algorithm.grpo_adv_eps):
            outcome = "zero_std"
        else:
            samples = _build_samples(deal, episodes, config, rewards, advantages)
            outcome = "samples" if samples else "rejected"
    records = [_record(deal, episode, reward, worker) for episode, reward in zip(episodes, rewards.tolist(), strict=True)]
    return Group(deal=deal, episodes=episodes, outcome=outcome, samples=samples, rewards=rewards, advantages=advantages, records=records)


def group_reward(episode: Episode, config: Config) -> float:
    """What of an episode enters the group statistics: its return, less the penalty of each invalid reply (ppo has it in the return)."""
    if config.algorithm.rl_algorithm == "ppo":
        return episode.episode_return
    return episode.episode_return - config.games.tw_invalid_action_penalty * episode.num_invalid


def _group_advantages(rewards: np.ndarray, algorithm: AlgorithmConfig) -> np.ndarray:
    match algorithm.rl_algorithm:
        case "ppo":
            return np.zeros_like(rewards)
        case "rloo":
            return rloo_advantages(rewards)
        case "grpo":
            return group_advantages(rewards, algorithm.grpo_adv_eps, norm=algorithm.grpo_norm)


def _build_samples(deal: Deal, episodes: list[Episode], config: Config, rewards: np.ndarray, advantages: np.ndarray) -> list[RLSample]:
    samples: list[RLSample] = []
    for episode, reward, advantage in zip(episodes, rewards.tolist(), advantages.tolist(), strict=True):
        if episode.truncated and config.games.truncated == "mask":
            continue
        scalars = _scalars(deal, episode, config, reward=reward, advantage=advantage)
        samples += build_samples(episode, config, scalars)
    return samples


def build_samples(episode: Episode, config: Config, scalars: dict[str, Any]) -> list[RLSample]:
    """One sample of the whole episode, or one a turn (`--history-mode window`); none where nothing was trained."""
    token_advantages = _token_advantages(episode, config, scalars["advantage"])
    numbered = list(enumerate(episode.turns))
    while numbered and not numbered[-1][1].is_trained:  # nothing after the last trained token says anything
        numbered.pop()
    parts = [numbered] if config.games.history_mode == "transcript" else [[turn] for turn in numbered]
    return [_sample(part, token_advantages, scalars) for part in parts if any(turn.is_trained for _, turn in part)]


def _token_advantages(episode: Episode, config: Config, advantage: float) -> dict[int, np.ndarray]:
    """Advantages of each trained turn's tokens, by the number of the turn."""
    trained = {number: turn for number, turn in enumerate(episode.turns) if turn.is_trained}
    if config.algorithm.rl_algorithm != "ppo":
        return {number: np.full(len(turn.reply.ids), advantage, np.float32) for number, turn in trained.items()}
    # Over the trained tokens of the whole episode, also where each turn becomes a sample of its own.
    lengths = [len(turn.reply.ids) for turn in trained.values()]
    rewards = np.zeros(sum(lengths))
    last_tokens = np.cumsum(lengths, dtype=np.int64) - 1
    rewards[last_tokens] = [turn.reward for turn in trained.values()]
    turns = np.repeat(list(trained), lengths) if config.algorithm.gamma_per == "turn" else None
    returns = monte_carlo_returns(rewards, np.ones(len(rewards)), config.games.tw_gamma, response_indices=turns)
    return dict(zip(trained, np.split(returns, last_tokens[:-1] + 1), strict=True)) if trained else {}


def _sample(part: list[tuple[int, Turn]], token_advantages: dict[int, np.ndarray], scalars: dict[str, Any]) -> RLSample:
    """The turns of `part`, one behind the other. Index of a logprob: its token's own."""
    num_tokens = sum(len(turn.new_ids) + len(turn.reply.ids) for _, turn in part)
    sample = _untrained(num_tokens, scalars)
    response_ids, versions, start = [], [], 0
    for number, turn in part:
        reply = turn.reply
        begin, stop = start + len(turn.new_ids), start + len(turn.new_ids) + len(reply.ids)
        sample.input_ids[start:begin] = turn.new_ids
        sample.input_ids[begin:stop] = reply.ids
        start = stop
        if not turn.is_trained:
            continue
        sample.labels[begin:stop] = reply.ids
        sample.old_logprobs[begin:stop] = reply.logprobs
        sample.token_rewards[stop - 1] = turn.reward
        sample.token_advantages[begin:stop] = token_advantages[number]
        sample.response_indices[begin:stop] = number
        response_ids.append(reply.ids)
        versions.append(reply.versions)
    sample.response_ids = np.concatenate(response_ids).astype(np.int32)
    sample.output_versions = np.concatenate(versions).astype(np.int32)
    return sample.validate()


def _untrained(num_tokens: int, scalars: dict[str, Any]) -> RLSample:
    return RLSample(
        input_ids=np.zeros(num_tokens, np.int32),
        attention_mask=np.ones(num_tokens, np.uint8),
        labels=np.full(num_tokens, UNTRAINED, np.int32),
        old_logprobs=np.zeros(num_tokens, np.float32),
        token_rewards=np.zeros(num_tokens, np.float32),
        token_advantages=np.zeros(num_tokens, np.float32),
        response_indices=np.full(num_tokens, -1, np.int32),
        response_ids=np.zeros(0, np.int32),
        output_versions=np.zeros(0, np.int32),
        **scalars,
    )


def _scalars(deal: Deal, episode: Episode, config: Config, *, reward: float, advantage: float) -> dict[str, Any]:
    return {
        "algorithm": config.algorithm.rl_algorithm,
        "advantage": advantage,
        "reward": reward,
        "episode_return": episode.episode_return,
        "group_id": deal.group_id,
        "game_id": deal.game_id,
        "episode_id": episode.episode_id,
        "truncated": episode.truncated,
        "won": episode.won,
        "num_turns": len(episode.turns),
    }


def _record(deal: Deal, episode: Episode, reward: float, worker: int) -> dict[str, Any]:
    versions = [turn.reply.versions for turn in episode.turns if turn.is_trained]
    return {
        "episode_id": episode.episode_id,
        "group_id": deal.group_id,
        "game_id": deal.game_id,
        "game": game_name(deal.game_path),
        "kind": deal.kind,
        "worker": worker,
        **episode.as_record(),
        "reward": reward,
        "num_trained": episode.num_trained,
        "oldest_version": int(min((v.min() for v in versions), default=-1)),
        "newest_version": int(max((v.max() for v in versions), default=-1)),
    }
