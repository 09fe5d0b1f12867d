"""What a played group leaves beside its samples: metrics, and every N-th episode as a readable file."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.rollout.collect import Group
from accerl_mp.rollout.episode import Episode, Turn
from accerl_mp.rollout.prompt import SYSTEM
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.transport.channels import Value


def group_values(group: Group, algorithm: str) -> dict[str, Value]:
    """The tags of one training group (`stats/tags.py`)."""
    if algorithm != "ppo":
        return {"GRPO/AdvantageStd": float(group.advantages.std())}
    rewards = [sample.token_rewards[sample.response_indices >= 0] for sample in group.samples]
    advantages = [sample.token_advantages[sample.response_indices >= 0] for sample in group.samples]
    if not advantages:
        return {}
    stds = np.array([values.std() for values in advantages])
    return {
        "PPO/RolloutTokenRewardMean": _triple(np.concatenate(rewards)),
        "PPO/RolloutRawAdvantageMean": _triple(np.concatenate(advantages)),
        "PPO/RolloutRawAdvantageStd": _triple(stds),
    }


def write_transcripts(folder: Path, group: Group, tokenizer: Tokenizer, every: int) -> None:
    """Every N-th episode (0: none) as `train-<episode>.json`, or `eval-<evaluation>-<number>.json`."""
    deal = group.deal
    for index, (episode, record) in enumerate(zip(group.episodes, group.records, strict=True)):
        # Episode ids of evaluations are large: count through the held-out games instead.
        number = episode.episode_id if deal.kind == "train" else deal.game_id * len(group.episodes) + index
        if every <= 0 or number % every:
            continue
        folder.mkdir(exist_ok=True)
        name = f"train-{number:07d}.json" if deal.kind == "train" else f"eval-{deal.eval_id:03d}-{number:04d}.json"
        (folder / name).write_text(json.dumps(_transcript(episode, record, tokenizer), indent=1) + "\n")


def _transcript(episode: Episode, record: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    turns = [_turn(turn, tokenizer) for turn in episode.turns]
    return record | {"seed": episode.seed, "system": SYSTEM, "turns": turns, "last_observation": episode.observation.text}


def _turn(turn: Turn, tokenizer: Tokenizer) -> dict[str, Any]:
    reply = turn.reply
    return {
        "message": turn.message,
        "reply": turn.text,
        "command": turn.command,
        "reward": turn.reward,
        "finish_reason": reply.finish_reason,
        "tokens": [tokenizer.text_of(token_id) for token_id in reply.ids.tolist()],
        "logprobs": [round(value, 4) for value in reply.logprobs.tolist()],
        "versions": reply.versions.tolist(),
    }


def _triple(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.sum()), float(len(values)), float(values.max())
