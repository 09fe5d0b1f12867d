"""Many episodes side by side with one engine, exactly as training plays them: `rollout.episode.Player` with its prompt and parser."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from accerl_mp.config import Config
from accerl_mp.rollout.actions import parse_action
from accerl_mp.rollout.env import EnvError, EnvPool, find_env, game_name
from accerl_mp.rollout.episode import Episode, Player, Reply, Turn
from accerl_mp.rollout.prompt import SYSTEM
from accerl_mp.rollout.tasks import cancel
from accerl_mp.timing import Timer
from accerl_mp.tools.local_engine import LocalEngine
from accerl_mp.tools.scores import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One episode to be played."""

    path: str
    number: int
    seed: int
    temperature: float


@dataclass(kw_only=True)
class BestOf(Player):
    """Samples several replies a turn and takes the first that names a command (the reference's `--num-samples`)."""

    num_samples: int = 1

    async def sample(self, episode: Episode, prompt: list[int], *, temperature: float, salt_version: int, number: int = 0) -> Reply:
        tries = [
            Player.sample(self, episode, prompt, temperature=temperature, salt_version=salt_version, number=number)
            for number in range(self.num_samples)
        ]
        replies = await asyncio.gather(*tries)
        commands = episode.observation.commands
        return next((reply for reply in replies if parse_action(self.tokenizer.decode(reply.ids.tolist()), commands)), replies[0])


def open_player(config: Config, engine: LocalEngine, *, num_open: int, num_samples: int = 1) -> BestOf:
    return BestOf(
        config=config,
        tokenizer=engine.tokenizer,
        chat=engine.chat,
        envs=EnvPool(num_open, find_env(config.games.env)),
        inference=engine,
        timer=Timer(),
        guard=lambda _path: nullcontext(),
        num_samples=num_samples,
    )


def plan_seats(games: Sequence[str], num_episodes: int, *, seed: int, temperature: float) -> list[Seat]:
    """Games in turn, until there are enough episodes; an episode's own seed follows from `seed` and its number."""
    return [
        Seat(path=games[number % len(games)], number=number, seed=seed * 1_000_003 + number + 1, temperature=temperature)
        for number in range(num_episodes)
    ]


async def play_seats(player: Player, seats: Sequence[Seat], *, num_open: int, on_end: Callable[[Record], None]) -> list[Record]:
    """Records in the order of `seats`. A game that breaks gives a record with `error` and nothing else; other errors end all."""
    slots = asyncio.Semaphore(num_open)

    async def play(seat: Seat) -> Record:
        async with slots:
            try:
                episode = await player.play(
                    path=seat.path, episode_id=seat.number, seed=seat.seed, temperature=seat.temperature, is_seeded=True
                )
            except EnvError as error:
                record: Record = {"game": game_name(seat.path), "path": seat.path, "episode": seat.number, "error": str(error)}
            else:
                record = describe(seat, episode)
        on_end(record)
        return record

    running = [asyncio.ensure_future(play(seat)) for seat in seats]
    try:
        return await asyncio.gather(*running)
    finally:
        await cancel(running)
        player.envs.close()


def describe(seat: Seat, episode: Episode) -> Record:
    """A line of episodes.jsonl: the names are those of a run's `episodes/`."""
    return {
        "game": game_name(seat.path),
        "path": seat.path,
        "episode": seat.number,
        "seed": seat.seed,
        "temperature": seat.temperature,
        **episode.as_record(),
        "system": SYSTEM,
        "turns": [_turn(turn) for turn in episode.turns],
        "last_observation": episode.observation.text,
    }


def _turn(turn: Turn) -> Record:
    return turn.as_record() | {
        "token_ids": turn.reply.ids.tolist(),
        "logprobs": [round(value, 5) for value in turn.reply.logprobs.tolist()],
    }


def without_logprobs(record: Record) -> Record:
    """The line without what only `--collect-logprobs` keeps."""
    dropped = ("token_ids", "logprobs")
    turns = [{name: value for name, value in turn.items() if name not in dropped} for turn in record.get("turns", [])]
    return record | ({"turns": turns} if "turns" in record else {})
