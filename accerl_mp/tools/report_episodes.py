"""Transcripts of `episodes/` as the report's viewer takes them, and which of them go into it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Transcript = Mapping[str, Any]
T = TypeVar("T")

SCALARS = (
    *("kind", "episode_id", "group_id", "game", "seed", "won", "lost", "truncated", "score", "max_score", "episode_return"),
    *("reward", "advantage", "outcome", "group_rewards", "oldest_version", "newest_version", "num_tokens", "num_trained"),
    *("num_turns", "num_invalid", "system", "last_observation"),
)


def chosen(names: Sequence[str], most: int) -> list[str]:
    """At most `most` transcripts by their file names, spread evenly over the run; half of them evaluations, where there are as many."""
    train = [name for name in names if name.startswith("train-")]
    others = [name for name in names if not name.startswith("train-")]
    picked = spread(train, max(most - len(others), (most + 1) // 2))
    return picked + spread(others, most - len(picked))


def fitting(sizes_bytes: Mapping[str, int], most: int, most_bytes: int) -> list[str]:
    """As `chosen`, fewer where their files are larger than `most_bytes` together: a page of hundreds of MiB opens nowhere. One at least."""
    names = list(sizes_bytes)
    picked = chosen(names, most)
    while len(picked) > 1 and (total := sum(sizes_bytes[name] for name in picked)) > most_bytes:
        picked = chosen(names, max(1, min(len(picked) - 1, len(picked) * most_bytes // total)))
    return picked


def spread(items: Sequence[T], most: int) -> list[T]:
    """`most` of them at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return list(items[-1:])[:most]
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def as_data(name: str, transcript: Transcript) -> dict[str, Any]:
    """What the viewer needs. Tokens are columns: a list a field, an entry a token; null: not recorded, or not trained."""
    trained = _trained(transcript)
    turns = [_turn(turn, trained.get(number)) for number, turn in enumerate(transcript.get("turns", []))]
    steps = [row.get("step") for row in transcript.get("trained", [])]
    return {name: transcript.get(name) for name in SCALARS} | {"file": name, "steps": steps, "turns": turns}


def _turn(turn: Mapping[str, Any], trained: Sequence[float] | None) -> dict[str, Any]:
    tokens = turn.get("tokens", [])
    return {
        "reply": turn.get("reply"),
        "command": turn.get("command"),
        "reward": turn.get("reward"),
        "finish": turn.get("finish_reason"),
        # Older runs recorded the message alone, not the tokens that it became.
        "prompt": turn.get("prompt_tokens", [turn.get("message", "")]),
        "promptIds": turn.get("prompt_ids"),
        "tokens": tokens,
        "ids": turn.get("ids"),
        "logprobs": turn.get("logprobs"),
        "versions": turn.get("versions"),
        "advantages": turn.get("advantages"),
        "trainer": list(trained) if trained is not None and len(trained) == len(tokens) else None,
    }


def _trained(transcript: Transcript) -> dict[int, list[float]]:
    """Trainer-side logprobs by turn, of the first time that each turn was trained."""
    found: dict[int, list[float]] = {}
    for row in transcript.get("trained", []):
        new: dict[int, list[float]] = {}
        for turn, logprob in zip(row.get("turns", []), row.get("logprobs", []), strict=False):
            new.setdefault(turn, []).append(logprob)
        found = new | found
    return found
