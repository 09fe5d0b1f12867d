"""The requests of one inference process: held until weights are there, submitted to vLLM all at once, labelled by version."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from accerl_mp.inference.versions import VersionLedger

if TYPE_CHECKING:  # this part of the process needs no vLLM, which takes seconds to import
    from accerl_mp.inference.engine import Engine
    from accerl_mp.inference.replies import Generation

_SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, however many pushes it lived through."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    salt_version: int
    """The version that the prefix cache was keyed by: an episode sends it along with its next turn."""


@dataclass(slots=True)
class FrontCounts:
    """What happened since `started`."""

    num_replies: int = 0
    num_tokens: int = 0
    num_tokens_max: int = 0
    num_errors: int = 0
    num_aborted: int = 0
    """Parts of replies that a drain cut short."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    reply_seconds: float = 0.0
    reply_seconds_max: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def add_reply(self, num_tokens: int, seconds: float) -> None:
        self.num_replies += 1
        self.num_tokens += num_tokens
        self.num_tokens_max = max(self.num_tokens_max, num_tokens)
        self.reply_seconds += seconds
        self.reply_seconds_max = max(self.reply_seconds_max, seconds)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class RequestFront:
    """Where requests wait, and what is known of those that run."""

    def __init__(self, engine: "Engine", *, run_id: str, salt_scope: str) -> None:
        self._engine = engine
        self._run_id, self._salt_scope = run_id, salt_scope
        self._keys = itertools.count()
        self._gate = asyncio.Event()
        self.ledger = VersionLedger()
        self.counts = FrontCounts()

    def hold(self) -> None:
        """New requests wait from now on."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    async def reply(
        self, prompt: Sequence[int] | np.ndarray, *, max_tokens: int, temperature: float, salt_version: int, seed: int | None = None
    ) -> Reply:
        """Sample a reply.

        seed           of this reply's own sampling, 32 bits; None: the engine's
        waits for      the first push, the end of a pause, then vLLM: all without a limit (the rollout's own deadline counts)
        after an abort (`--sync-mode drain`) what exists is kept and the rest is sampled from the new weights
        """
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while True:
            await self._gate.wait()
            salt_version = self._salt_version(salt_version)
            part_seed = None if seed is None else (seed + len(ids)) % _SEEDS  # the rest of a reply is not drawn as its beginning was
            part, part_versions = await self._run_part(
                [*prompt, *ids] if ids else prompt, max_tokens - len(ids), temperature, salt_version, part_seed
            )
            ids += part.ids
            logprobs += part.logprobs
            versions += part_versions
            if part.finish_reason != "abort":
                return Reply(ids, logprobs, versions, part.finish_reason, salt_version)
            self.counts.num_aborted += 1

    async def _run_part(
        self, ids: Sequence[int] | np.ndarray, max_tokens: int, temperature: float, salt_version: int, seed: int | None
    ) -> "tuple[Generation, list[int]]":
        key = str(next(self._keys))
        self.ledger.start(key)
        try:
            part = await self._engine.generate(
                key, ids, max_tokens=max_tokens, temperature=temperature, salt=f"{self._run_id}-{salt_version}", seed=seed
            )
            self.counts.num_prompt_tokens += len(ids)
            self.counts.num_cached_tokens += part.num_cached_tokens
            return part, self.ledger.finish(key, len(part.ids))
        finally:
            self.ledger.forget(key)

    def _salt_version(self, wanted: int) -> int:
        """An episode keeps the version that it began with, or every request takes the newest."""
        return wanted if wanted >= 0 and self._salt_scope == "episode" else self.ledger.version
