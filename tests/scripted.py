"""A policy in place of inference, for tests that play real games: replies come from a function of the prompt's text."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accerl_mp.config import Config
from accerl_mp.rollout.env import EnvPool
from accerl_mp.rollout.episode import Player, Reply
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat
from accerl_mp.timing import Timer

Policy = Callable[[int, int], str | Reply]
"""(episode_id, number of the turn) to a reply's text, or a whole reply."""


@dataclass
class Script:
    """Answers as `Generates` does. Logprobs -0.25, versions: number of the turn; every request is kept in `asked`."""

    tokenizer: Tokenizer
    policy: Policy
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, **request: Any) -> Reply:
        turn = sum(earlier["episode_id"] == request["episode_id"] for earlier in self.asked)
        self.asked.append(request)
        answer = self.policy(request["episode_id"], turn)
        return answer if isinstance(answer, Reply) else reply(self.tokenizer, answer, version=turn)


def reply(tokenizer: Tokenizer, text: str, *, version: int = 0, finish_reason: str = "stop") -> Reply:
    """`text` and the end-of-turn token of ChatML."""
    ids = np.array(tokenizer.encode(text + "<|im_end|>"), np.int32)
    return Reply(
        ids=ids,
        logprobs=np.full(len(ids), -0.25, np.float32),
        versions=np.full(len(ids), version, np.int32),
        finish_reason=finish_reason,  # type: ignore[arg-type]
        salt_version=7,
    )


def build_player(tokenizer: Tokenizer, policy: Policy, **flags: Any) -> Player:
    return Player(
        config=Config.from_flat({"infer_max_tokens": 16} | flags),
        tokenizer=tokenizer,
        chat=ChatFormat.probe(tokenizer),
        envs=EnvPool(4),
        inference=Script(tokenizer, policy),
        timer=Timer(),
        guard=lambda _path: nullcontext(),
    )
