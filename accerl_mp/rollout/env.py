"""The games: a small `Env` protocol, and TextWorld's implementation of it.

The only module of the rollout process that knows TextWorld: another task is another file with the same protocol (`--env`).
"""

import importlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import textworld
from textworld.envs import JerichoEnv, TWInform7
from textworld.generator.game import Game

from accerl_mp.config import TEXTWORLD

MAX_SEED = 2**31 - 1
"""The interpreter keeps its seed in a C int; 0 and -1 would mean the clock, so seeds start at 1."""

_HEADER_BYTES = 64
_STORY_VERSIONS = {1: 2, 2: 2, 3: 2, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8}
"""Versions of the Z-machine, and the unit of the length in their header."""
_BROKEN = (OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError, RuntimeError, NameError, ArithmeticError, EOFError)
"""What TextWorld raises about nonsense in a game's files (its own errors are NameErrors and RuntimeErrors)."""
_GAMES_KEPT = 8
"""Of those read last, about 1 MiB each: the episodes of a group play the same game."""
_STATUS_LINE = re.compile(r"\n>\s[^\n]*\Z")
_BANNER_LINE = re.compile(r"[\s$\\/|_>]+")


class EnvError(RuntimeError):
    """A game that cannot be played: names its file and what is wrong with it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"game {self.path}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a game shows after a reset or a step."""

    objective: str
    text: str
    """The game's answer, without banner, status line and empty lines."""
    inventory: str
    commands: tuple[str, ...]
    """Admissible commands, sorted."""
    score: float
    max_score: float
    won: bool = False
    lost: bool = False
    policy_commands: tuple[str, ...] = ()
    """The commands that win from here; only where the environment was asked for them."""

    @property
    def done(self) -> bool:
        return self.won or self.lost


class Env(Protocol):
    """One game, opened from its file: `SomeEnv(path)`. `reset` may be called at any time, also after the end.

    Whatever goes wrong with a game should be raised as EnvError: the game gets a strike and the run goes on.
    """

    path: str

    def reset(self, seed: int) -> Observation: ...

    def step(self, command: str) -> Observation: ...

    def close(self) -> None: ...


@runtime_checkable
class ReusableEnv(Env, Protocol):
    """One that can be taken for another game when its own is over."""

    def go_to_game(self, path: str) -> None:
        """Become an environment of the game at `path`, which the next `reset` starts; of its own path: with its files as they are now."""


class TextWorldEnv:
    """A `.z8` game with its `.json` beside it. Starting takes 6 ms (the first of a process 200 ms), a reset 3 ms, a step 2 ms."""

    def __init__(self, path: str | Path, *, policy_commands: bool = False) -> None:
        infos = textworld.EnvInfos(
            feedback=True, objective=True, inventory=True, admissible_commands=True, score=True, max_score=True, won=True, lost=True
        )
        infos.policy_commands = policy_commands
        self._interpreter = _Interpreter(infos)
        self._env = TWInform7(self._interpreter)  # what textworld.start() makes
        self.go_to_game(path)

    def go_to_game(self, path: str | Path) -> None:
        """Go over to another game, which `reset` starts: no library to load, and files that were read lately are not read again."""
        self.path = str(path)
        story, game = _read_game(self.path)
        with _naming(self.path):
            self._interpreter.give(story, game)
            self._env.load(self.path)

    def reset(self, seed: int) -> Observation:
        """Start the game over. The same seed gives the same game, whatever was played before."""
        with _naming(self.path):
            self._env.seed(seed % (MAX_SEED - 1) + 1)
            return _observation(self._env.reset())

    def step(self, command: str) -> Observation:
        """Send an admissible command."""
        with _naming(self.path):
            state, _, _ = self._env.step(command)
            return _observation(state)

    def close(self) -> None:
        self._env.close()


class _Interpreter(JerichoEnv):
    """TextWorld's own, for one game after the other.

    Its `load` would start the new game beside the old one's memory (0.4 MiB lost a call, jericho 3.3); here the next reset, which
    frees that first, starts it.
    """

    def give(self, story: bytes, game: Game) -> None:
        """What the next `load` takes instead of reading it. TextWorld's wrappers look for `_game` too."""
        self._story, self._game = story, game

    def load(self, z_file: str) -> None:
        frotz = self._jericho
        if frotz is None:
            super().load(z_file)
            return
        self.gamefile = os.path.abspath(z_file)
        frotz.story_file = os.fsencode(self.gamefile)
        frotz._cache = {self.gamefile: (self._story, frotz.bindings, frotz.act_gen)}  # no generated game has bindings of its own
        self._reset = False


class EnvPool:
    """Open environments that are reused from episode to episode, at most `capacity` at a time.

    A ReusableEnv goes over to another game; where there is none, a new one is opened. Only idle ones are closed,
    the one that was used longest ago first; more than `capacity` are open only while more are being played.
    """

    def __init__(self, capacity: int, open_env: Callable[[str], Env] = TextWorldEnv) -> None:
        self._capacity, self._open_env = capacity, open_env
        self._idle: OrderedDict[int, Env] = OrderedDict()  # by id, oldest first
        self._num_played = 0

    def __len__(self) -> int:
        return len(self._idle) + self._num_played

    def acquire(self, path: str) -> Env:
        """An environment of this game, not reset."""
        env = self._take_idle(path)
        if env is None:
            self._close_idle_above(self._capacity - 1)
            env = self._open_env(path)
        self._num_played += 1
        return env

    def _take_idle(self, path: str) -> Env | None:
        """One of this game, else the one that was used longest ago, with another game; closed if that fails.

        One of this game is told to go to it too: its files may be others by now, or gone, and an interpreter without its story ends
        the process.
        """
        of_the_game = (key for key, env in self._idle.items() if env.path == path)
        of_any = (key for key, env in self._idle.items() if isinstance(env, ReusableEnv))
        key = next(chain(of_the_game, of_any), None)
        if key is None:
            return None
        env = self._idle.pop(key)
        try:
            if isinstance(env, ReusableEnv):
                env.go_to_game(path)
        except BaseException:
            env.close()
            raise
        return env

    def release(self, env: Env) -> None:
        """Give one back, in whatever state."""
        self._num_played -= 1
        self._idle[id(env)] = env
        self._close_idle_above(self._capacity)

    def discard(self, env: Env) -> None:
        """Give back one that failed: it is closed, not reused."""
        self._num_played -= 1
        env.close()

    def close(self) -> None:
        self._close_idle_above(0)

    def _close_idle_above(self, limit: int) -> None:
        while self._idle and len(self) > limit:
            self._idle.popitem(last=False)[1].close()


def find_env(name: str) -> Callable[[str], Env]:
    """The class that `--env` names: `textworld`, or `module:Class` of any module that Python finds. ValueError says what is wrong.

    Example: `find_env("accerl_mp.rollout.guessing:GuessingEnv")`.
    """
    if name == TEXTWORLD:
        return TextWorldEnv
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ValueError(f"{name!r} is neither {TEXTWORLD!r} nor module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise ValueError(f"module {module_name} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"module {module_name} has no {class_name}") from error
    if missing := [method for method in ("reset", "step", "close") if not callable(getattr(found, method, None))]:
        raise ValueError(f"{name} has no {', '.join(missing)}: it does not follow the Env protocol of accerl_mp/rollout/env.py")
    return found


def game_name(path: str | Path) -> str:
    """A game's name in records: its file's name without the ending."""
    return os.path.splitext(os.path.basename(path))[0]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Whatever TextWorld raises about a damaged game is an EnvError that names it."""
    try:
        yield
    except _BROKEN as error:
        raise EnvError(path, f"{type(error).__name__}: {error}") from error


def _read_game(path: str) -> tuple[bytes, Game]:
    """The story and what its `.json` says, as the files are now. A game is never changed, so all environments share it."""
    story, infos = Path(path), Path(path).with_suffix(".json")
    if not infos.is_file():
        raise EnvError(path, "no .json beside it: without it there are no admissible commands")
    try:
        stamps = [(status.st_mtime_ns, status.st_size, status.st_ino) for status in (story.stat(), infos.stat())]
    except OSError as error:
        raise EnvError(path, f"cannot be read: {error.strerror}") from error
    return _read_files(path, *stamps)


@lru_cache(maxsize=_GAMES_KEPT)
def _read_files(path: str, *_stamps: tuple[int, int, int]) -> tuple[bytes, Game]:
    try:
        story = Path(path).read_bytes()
    except OSError as error:
        raise EnvError(path, f"cannot be read: {error.strerror}") from error
    _check_story(path, story)
    with _naming(path):
        return story, Game.load(str(Path(path).with_suffix(".json")))


def _check_story(path: str, story: bytes) -> None:
    """The interpreter calls `exit(1)` on a file that is no story, and would take the process along without a word."""
    if len(story) < _HEADER_BYTES or story[0] not in _STORY_VERSIONS:
        raise EnvError(path, "no Z-machine story")
    size_bytes = int.from_bytes(story[0x1A:0x1C], "big") * _STORY_VERSIONS[story[0]]
    checksum = int.from_bytes(story[0x1C:0x1E], "big")
    body = np.frombuffer(story, np.uint8)[_HEADER_BYTES:size_bytes]
    if len(story) < size_bytes or (size_bytes and int(body.sum(dtype=np.uint64)) % 65536 != checksum):
        raise EnvError(path, f"damaged: {len(story)} bytes do not match the story's own length {size_bytes} and checksum {checksum}")


def _observation(state: textworld.GameState) -> Observation:
    objective = " ".join((state.get("objective") or "").split())
    return Observation(
        objective=objective,
        text=_clean(state.get("feedback") or "", state.get("objective") or ""),
        inventory=" ".join((state.get("inventory") or "").split()),
        commands=tuple(state.get("admissible_commands") or ()),
        score=_number(state.get("score")),
        max_score=_number(state.get("max_score")),
        won=bool(state.get("won")),
        lost=bool(state.get("lost")),
        policy_commands=tuple(state.get("policy_commands") or ()),
    )


def _clean(feedback: str, objective: str) -> str:
    """The game's text alone: the first observation begins with a banner of 40 lines and the objective, each ends with a status line."""
    text = _STATUS_LINE.sub("", feedback)
    if objective and objective in text:
        text = text.split(objective, 1)[1]
    lines = (" ".join(line.split()) for line in text.split("\n") if not _BANNER_LINE.fullmatch(line))
    return "\n".join(line for line in lines if line)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
