"""One episode, played by one coroutine: message, reply, command, env step, until the game ends or the episode is cut."""

import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from accerl_mp.algorithms.rewards import step_reward
from accerl_mp.config import Config
from accerl_mp.rollout.actions import normalise, parse_action
from accerl_mp.rollout.env import Env, EnvPool, Observation
from accerl_mp.rollout.history import History, open_history
from accerl_mp.rollout.prompt import invalid_message, turn_message
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat
from accerl_mp.timing import Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model sampled for one turn; the arrays have an entry a token."""

    ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32, nats, of the distribution that was sampled from."""
    versions: np.ndarray
    """int32, policy version of each token."""
    finish_reason: Literal["stop", "length", "abort"]
    salt_version: int = -1
    """Version whose prefix cache the reply used; the episode's next request names it."""

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == "abort"


class Generates(Protocol):
    """Where replies come from: inference, or a script in tests."""

    async def generate(
        self, *, episode_id: int, prompt: list[int], max_tokens: int, temperature: float, salt_version: int, seed: int | None = None
    ) -> Reply: ...


@dataclass(slots=True, kw_only=True)
class Turn:
    """One reply of the model and what became of it."""

    message: str
    new_ids: list[int]
    """Ids that the turn's sample gets before the reply."""
    reply: Reply
    text: str
    """The reply without control tokens."""
    command: str | None = None
    """What was executed; None for an invalid or an aborted reply."""
    reward: float = 0.0

    @property
    def is_trained(self) -> bool:
        return len(self.reply.ids) > 0 and not self.reply.is_aborted

    def as_record(self) -> dict[str, Any]:
        """What every file of episodes says of a turn."""
        return {
            "message": self.message,
            "reply": self.text,
            "command": self.command,
            "reward": self.reward,
            "finish_reason": self.reply.finish_reason,
        }


@dataclass(slots=True, kw_only=True)
class Episode:
    """A played episode."""

    episode_id: int
    seed: int
    observation: Observation
    """The newest."""
    is_seeded: bool = False
    """Its replies are drawn by its seed too."""
    turns: list[Turn] = field(default_factory=list)
    truncated: bool = False
    """Cut by the turn limit or the window; never a loss."""
    num_env_steps: int = 0
    num_invalid: int = 0
    seconds: float = 0.0

    @property
    def won(self) -> bool:
        return self.observation.won

    @property
    def lost(self) -> bool:
        return self.observation.lost

    @property
    def episode_return(self) -> float:
        """Sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.new_ids) + len(turn.reply.ids) for turn in self.turns)

    @property
    def num_trained(self) -> int:
        return sum(len(turn.reply.ids) for turn in self.turns if turn.is_trained)

    def as_record(self) -> dict[str, Any]:
        """What every file of episodes says of how one went, its turns aside."""
        return {
            "won": self.won,
            "lost": self.lost,
            "truncated": self.truncated,
            "score": self.observation.score,
            "max_score": self.observation.max_score,
            "num_turns": len(self.turns),
            "num_env_steps": self.num_env_steps,
            "num_invalid": self.num_invalid,
            "episode_return": self.episode_return,
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
        }


def reply_seed(episode_seed: int, turn: int, number: int = 0) -> int:
    """By what a seeded episode's reply is drawn: of 32 bits, another one for each turn, and for each of several replies to one prompt."""
    return zlib.crc32(f"{episode_seed} {turn} {number}".encode())


Guard = Callable[[str], AbstractContextManager[Any]]
"""Watches an env step of the game at this path: one that hangs ends the process."""


@dataclass(kw_only=True)
class Player:
    """Plays episodes, any number side by side: everything in here is used by one event loop."""

    config: Config
    tokenizer: Tokenizer
    chat: ChatFormat
    envs: EnvPool
    inference: Generates
    timer: Timer
    guard: Guard

    async def play(self, *, path: str, episode_id: int, seed: int, temperature: float, is_seeded: bool = False) -> Episode:
        """Play one game from reset to end.

        is_seeded      replies are drawn by `seed` and the number of the turn alone (an evaluation's are), else by the engine's generator
        waits for      a reply a turn; env steps hold up the whole process (2 ms)
        at the end     Closed comes out of the wait for a reply
        if a game breaks    EnvError
        """
        env = self._open_env(path)
        try:
            episode = await self._play(env, episode_id=episode_id, seed=seed, temperature=temperature, is_seeded=is_seeded)
        except BaseException:
            self.envs.discard(env)
            raise
        self.envs.release(env)
        return episode

    async def _play(self, env: Env, *, episode_id: int, seed: int, temperature: float, is_seeded: bool) -> Episode:
        started = time.monotonic()
        with self.timer.phase("env"), self.guard(env.path):
            observation = env.reset(seed)
        episode = Episode(episode_id=episode_id, seed=seed, observation=observation, is_seeded=is_seeded)
        history, message = self._open_history(), turn_message(observation)
        salt_version = -1
        while not episode.observation.done:
            turn = await self._reply(episode, history, message, temperature=temperature, salt_version=salt_version)
            if turn is None:
                episode.truncated = True
                break
            salt_version = turn.reply.salt_version
            message = self._act(env, episode, turn)
        episode.seconds = time.monotonic() - started
        return episode

    async def _reply(self, episode: Episode, history: History, message: str, *, temperature: float, salt_version: int) -> Turn | None:
        """One turn's reply, added to the episode; None if no turn is left or the reply might not fit."""
        if len(episode.turns) >= self.config.games.tw_max_episode_steps:
            return None
        with self.timer.phase("encode"):
            prompt = history.next_prompt(message)
        if prompt is None:
            return None
        reply = await self.sample(episode, prompt.ids, temperature=temperature, salt_version=salt_version)
        ids = reply.ids.tolist()
        history.add_reply(ids)
        turn = Turn(message=message, new_ids=prompt.new_ids, reply=reply, text=self.tokenizer.decode(ids))
        episode.turns.append(turn)
        return turn

    async def sample(self, episode: Episode, prompt: list[int], *, temperature: float, salt_version: int, number: int = 0) -> Reply:
        """A reply to the prompt; `number` tells several replies to one prompt apart."""
        return await self.inference.generate(
            episode_id=episode.episode_id,
            prompt=prompt,
            max_tokens=self.config.inference.infer_max_tokens,
            temperature=temperature,
            salt_version=salt_version,
            seed=reply_seed(episode.seed, len(episode.turns), number) if episode.is_seeded and temperature > 0 else None,
        )

    def _act(self, env: Env, episode: Episode, turn: Turn) -> str:
        """Execute the turn's command, if it names one; returns the next turn's message."""
        before = episode.observation
        if turn.reply.is_aborted:
            return turn_message(before)
        turn.command = parse_action(turn.text, before.commands)
        if turn.command is None:
            episode.num_invalid += 1
            turn.reward = self._invalid_reward(turn)
            return invalid_message(normalise(turn.text) or turn.text, before)
        with self.timer.phase("env"), self.guard(env.path):
            episode.observation = env.step(turn.command)
        episode.num_env_steps += 1
        turn.reward = self._step_reward(before, episode.observation)
        return turn_message(episode.observation)

    def _step_reward(self, before: Observation, after: Observation) -> float:
        games = self.config.games
        return step_reward(
            before.score,
            after.score,
            won=after.won,
            lost=after.lost,
            step_penalty=games.tw_step_penalty,
            win_bonus=games.tw_win_bonus,
            lost_penalty=games.tw_lost_penalty,
        )

    def _invalid_reward(self, turn: Turn) -> float:
        """With ppo the penalty belongs to the turn; relative to a group it belongs to the episode (`collect.py`)."""
        is_ppo = self.config.algorithm.rl_algorithm == "ppo"
        return -self.config.games.tw_invalid_action_penalty if is_ppo and turn.is_trained else 0.0

    def _open_env(self, path: str) -> Env:
        with self.timer.phase("env"), self.guard(path):
            return self.envs.acquire(path)

    def _open_history(self) -> History:
        games = self.config.games
        return open_history(
            games.history_mode,
            self.tokenizer,
            self.chat,
            room=games.tw_history_token_window - self.config.inference.infer_max_tokens,
            num_turns=games.history_window_turns,
        )
