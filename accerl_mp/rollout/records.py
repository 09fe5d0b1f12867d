"""What a played group leaves beside its samples: metrics, and every N-th episode as a readable file.

A transcript is an EpisodeRecord (`collect.py`) and:
    seed, system, last_observation
    outcome, advantage, group_rewards    of its group; null for an evaluation, which has no advantages
    turns    message, reply, command, reward, finish_reason, and by token
        prompt_ids, prompt_tokens        what the turn's sample gets before the reply
        ids, tokens, logprobs, versions  of the reply
        advantages                       as in the sample; null where the turn is in none (no signal, aborted, an evaluation)
What the trainer's weights made of the same tokens is in the file beside it (`trainer/witness.py`).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.rollout.collect import Group
from accerl_mp.rollout.episode import Turn
from accerl_mp.rollout.prompt import SYSTEM
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.samples import RLSample
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


def write_transcripts(folder: Path, group: Group, tokenizer: Tokenizer, every: int) -> list[dict[str, Any]]:
    """Every N-th episode (0: none) as `train-<episode>.json`, or `eval-<evaluation>-<number>.json`; returns what was written."""
    deal, written = group.deal, []
    for index, episode in enumerate(group.episodes):
        # Episode ids of evaluations are large: count through the held-out games instead.
        number = episode.episode_id if deal.kind == "train" else deal.game_id * len(group.episodes) + index
        if every <= 0 or number % every:
            continue
        folder.mkdir(exist_ok=True)
        name = f"train-{number:07d}.json" if deal.kind == "train" else f"eval-{deal.eval_id:03d}-{number:04d}.json"
        written.append(_transcript(group, index, tokenizer))
        (folder / name).write_text(_readable(written[-1]) + "\n")
    return written


def transcript_as_markdown(transcript: Mapping[str, Any]) -> str:
    """For TensorBoard's Text tab. What a game or a model wrote is indented, so that none of it counts as Markdown."""
    outcome = "won" if transcript["won"] else "lost" if transcript["lost"] else "cut"
    score = f"score {transcript['score']:g} of {transcript['max_score']:g}, return {transcript['episode_return']:g}"
    versions = f"versions {transcript['oldest_version']} to {transcript['newest_version']}"
    parts = [f"episode {transcript['episode_id']}, {versions}: {outcome}, {score}"]
    for number, turn in enumerate(transcript["turns"], start=1):
        command = "no command" if turn["command"] is None else "executed"
        parts += [_code(turn["message"]), f"**turn {number}** ({command}, reward {turn['reward']:g})", _code(f"> {turn['reply']}")]
    return "\n\n".join([*parts, _code(transcript["last_observation"])])


def _readable(content: dict[str, Any]) -> str:
    """JSON with a line a field: lists of tokens and numbers stand in one. (A raw line break is never inside of a string.)"""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", lambda match: "[" + re.sub(r"\n\s*", " ", match[1]) + "]", text)


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _transcript(group: Group, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    episode, is_trained = group.episodes[index], group.deal.kind == "train"
    advantages = _advantages([sample for sample in group.samples if sample.episode_id == episode.episode_id])
    return group.records[index] | {
        "seed": episode.seed,
        "outcome": group.outcome if is_trained else None,
        "advantage": round(float(group.advantages[index]), 4) if is_trained else None,
        "group_rewards": group.rewards.tolist() if is_trained else None,
        "system": SYSTEM,
        "turns": [_turn(turn, tokenizer, advantages.get(number)) for number, turn in enumerate(episode.turns)],
        "last_observation": episode.observation.text,
    }


def _advantages(samples: list[RLSample]) -> dict[int, list[float]]:
    """Token advantages of an episode's trained turns, by the number of the turn."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        trained = np.flatnonzero(sample.response_indices >= 0)
        for turn, advantage in zip(sample.response_indices[trained].tolist(), sample.token_advantages[trained].tolist(), strict=True):
            found.setdefault(turn, []).append(round(advantage, 4))
    return found


def _turn(turn: Turn, tokenizer: Tokenizer, advantages: list[float] | None) -> dict[str, Any]:
    reply = turn.reply
    return turn.as_record() | {
        "prompt_ids": list(turn.new_ids),
        "prompt_tokens": [tokenizer.text_of(token_id) for token_id in turn.new_ids],
        "ids": reply.ids.tolist(),
        "tokens": [tokenizer.text_of(token_id) for token_id in reply.ids.tolist()],
        "logprobs": [round(value, 4) for value in reply.logprobs.tolist()],
        "versions": reply.versions.tolist(),
        "advantages": advantages,
    }


def _triple(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.sum()), float(len(values)), float(values.max())
