"""Games played by the engine's own best commands, with mistakes: what a warm start learns from.

    python -m accerl_mp.tools.walks --games DIR/manifest.json --out walks.jsonl.gz --walks-per-game 8 --seed 1 --processes 2

TextWorld knows the best next command after any move, so a walk that errs shows how to go on from there as well. One walk a line.
"""

import argparse
import gzip
import json
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.bounds import out_of_bounds
from accerl_mp.checks import cannot_be_made
from accerl_mp.config import ConfigError
from accerl_mp.rollout.env import EnvError, Observation, TextWorldEnv, game_name
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.game_files import MANIFEST, read_manifest
from accerl_mp.tools.processes import open_pool
from accerl_mp.tools.terminal import Terminal

MAX_TURNS = 10
INVALID_SHARE = 0.05
"""Of the replies: they are no command, and are followed by the notice that says so."""
MISTAKE_SHARE = 0.6
"""Of the other replies: another admissible command instead of the best one."""
DAWDLING = ("look", "inventory")
"""Commands that cost a turn and change nothing."""

ReplyKind = Literal["best", "mistake", "invalid"]


@dataclass(frozen=True)
class Player:
    """How the walker errs."""

    mistake_share: float = MISTAKE_SHARE
    mistakes: Literal["any", "dawdle"] = "any"
    """any: an admissible command at random; dawdle: a look around or into the pockets."""


@dataclass(frozen=True)
class WalkTurn:
    """What the game showed, and what was replied to it."""

    text: str
    inventory: str
    commands: list[str]
    reply: str
    kind: ReplyKind


@dataclass(frozen=True)
class Walk:
    """One game played once."""

    game: str
    names: list[str]
    """Names of the rooms and things of the game."""
    objective: str
    turns: list[WalkTurn] = field(default_factory=list)
    won: bool = False

    @classmethod
    def from_json(cls, line: str) -> "Walk":
        values = json.loads(line)
        return cls(**(values | {"turns": [WalkTurn(**turn) for turn in values["turns"]]}))

    def observations(self, shuffle: random.Random | None = None) -> list[Observation]:
        """The observation of each turn; `shuffle` puts the commands of half of them in another order."""
        return [self._observation(turn, shuffle) for turn in self.turns]

    def _observation(self, turn: WalkTurn, shuffle: random.Random | None) -> Observation:
        commands = list(turn.commands)
        if shuffle is not None and shuffle.random() < 0.5:
            shuffle.shuffle(commands)
        return Observation(
            objective=self.objective, text=turn.text, inventory=turn.inventory, commands=tuple(commands), score=0.0, max_score=1.0
        )


def play_walks(path: Path, num_walks: int, seed: int, player: Player) -> list[Walk]:
    """Play one game several times. A walk ends when it is won, lost for good or MAX_TURNS long."""
    env = TextWorldEnv(path, policy_commands=True)
    try:
        names = thing_names(path)
    except (ValueError, LookupError, TypeError) as error:
        raise EnvError(str(path), f"its .json does not name its things ({type(error).__name__}: {error})") from error
    walks = []
    for number in range(num_walks):
        rng = random.Random(f"{seed}-{path.name}-{number}")
        walks.append(_play(env, names, player, rng))
    env.close()
    return walks


def thing_names(path: Path) -> list[str]:
    """Names of rooms, doors and things, from the game's .json."""
    infos = json.loads(path.with_suffix(".json").read_text())["infos"]
    return [info["name"] for _, info in infos if info["name"]]


def _play(env: TextWorldEnv, names: list[str], player: Player, rng: random.Random) -> Walk:
    observation = env.reset(rng.randrange(1, 2**31))
    objective = observation.objective
    turns: list[WalkTurn] = []
    while not observation.done and observation.policy_commands and len(turns) < MAX_TURNS:
        reply, kind = _choose(observation, names, player, rng)
        turns.append(WalkTurn(observation.text, observation.inventory, list(observation.commands), reply, kind))
        if kind != "invalid":
            observation = env.step(reply)
    return Walk(game_name(env.path), names, objective, turns, observation.won)


def _choose(observation: Observation, names: list[str], player: Player, rng: random.Random) -> tuple[str, ReplyKind]:
    draw = rng.random()
    if draw < INVALID_SHARE:
        return _invalid_reply(observation, names, rng), "invalid"
    if draw < INVALID_SHARE + (1 - INVALID_SHARE) * player.mistake_share:
        commands = observation.commands
        if player.mistakes == "dawdle":
            commands = [command for command in commands if command.split()[0] in DAWDLING]
        return rng.choice(commands), "mistake"
    return observation.policy_commands[0], "best"


def _invalid_reply(observation: Observation, names: list[str], rng: random.Random) -> str:
    """Something like a command that is not in the list: other things in its place, or its beginning alone."""
    words = rng.choice(observation.commands).split()
    for _ in range(10):
        verb, *rest = words
        reply = " ".join(rng.choice(([verb, rng.choice(names)], [verb], [verb, verb, *rest], [*rest, verb])))
        if reply not in observation.commands:
            return reply
    return "nothing"


def listed_games(manifest: Path, split: str, without: Path | None = None) -> list[Path]:
    """A split's games of a manifest, but those with a world or a quest that the manifest `without` lists too."""
    games = [game for game in json.loads(manifest.read_text())["games"] if game["file"].startswith(f"{split}/")]
    known = set()
    if without is not None:
        known = {game[key] for game in json.loads(without.read_text())["games"] for key in ("world_key", "quest_key")}
    return [manifest.parent / game["file"] for game in games if not known & {game["world_key"], game["quest_key"]}]


def play_all(
    games: list[Path], player: Player, *, num_walks: int, seed: int, num_processes: int, advance: Callable[[], None]
) -> Iterator[Walk]:
    """Walks of all games, in the games' order whatever the number of processes; `advance` counts games. EnvError: a broken one."""
    with open_pool(num_processes) as pool:
        same = [[value] * len(games) for value in (num_walks, seed, player)]
        for walks in pool.map(play_walks, games, *same, chunksize=4):
            yield from walks
            advance()


def save_walks(path: Path, walks: Iterable[Walk]) -> int:
    """Write a gzipped line each, whole or not at all; returns how many."""
    num_walks, temporary = 0, path.with_name(path.name + ".new")
    try:
        with gzip.open(temporary, "wt") as file:
            for walk in walks:
                file.write(json.dumps(asdict(walk)) + "\n")
                num_walks += 1
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return num_walks


def load_walks(path: Path) -> list[Walk]:
    """ValueError: a file that holds no walks."""
    try:
        with gzip.open(path, "rt") as file:
            if walks := [Walk.from_json(line) for line in file]:
                return walks
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: no file of accerl_mp.tools.walks, or damaged ({reason})") from error
    raise ValueError(f"{path}: there are no walks in it")


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("walks", "--games MANIFEST --out FILE [FLAGS ...]", __doc__)
    parser.add_argument("--games", type=Path, required=True, metavar="MANIFEST", help="manifest.json of accerl_mp.tools.make_games")
    parser.add_argument("--split", default="train", help="which of its games")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--without", type=Path, metavar="MANIFEST", help="manifest.json whose worlds and quests are left out")
    parser.add_argument("--walks-per-game", type=int, default=8, metavar="N", help="times each game is played")
    parser.add_argument("--mistake-share", type=float, default=MISTAKE_SHARE, help="share of commands that are not the best")
    parser.add_argument("--mistakes", default="any", choices=("any", "dawdle"), help="any other command, or only look and inventory")
    parser.add_argument("--seed", type=int, default=1, help="the same seed plays the same walks")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes that play")
    return parser


def games_of(args: argparse.Namespace) -> list[Path]:
    """Whose walks are wanted. ConfigError with every problem at once."""
    problems = [*cannot_be_made("--out", args.out.parent), *out_of_bounds("seed", args.seed, "--seed")]
    if args.out.is_dir():
        problems.append(f"--out {args.out} is a folder; name a file")
    for name in ("walks_per_game", "processes"):
        if getattr(args, name) < 1:
            problems.append(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.mistake_share <= 1:
        problems.append(f"--mistake-share must be in [0, 1], got {args.mistake_share}")
    named = {"--games": args.games, "--without": args.without}
    if lost := [option for option, manifest in named.items() if manifest and not is_manifest(manifest)]:
        raise ConfigError([*problems, *(f"{option} {named[option]}: no manifest of accerl_mp.tools.make_games" for option in lost)])
    games = listed_games(args.games, args.split, args.without)
    if not games:
        problems.append(f"--split {args.split}: {args.games} lists no such game")
    if missing := [game for game in games if not (game.is_file() and game.with_suffix(".json").is_file())]:
        problems.append(f"--games {args.games}: {len(missing)} of its games are not there, or without .json ({missing[0]})")
    if problems:
        raise ConfigError(problems)
    return games


def is_manifest(file: Path) -> bool:
    return file.name == MANIFEST and read_manifest(file.parent) is not None


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    terminal = Terminal()
    try:
        games = games_of(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        player = Player(args.mistake_share, args.mistakes)
        with terminal.progress("playing games", len(games)) as advance:
            walks = play_all(games, player, num_walks=args.walks_per_game, seed=args.seed, num_processes=args.processes, advance=advance)
            num_walks = save_walks(args.out, walks)
    except ConfigError as error:
        terminal.say(f"walks: this cannot be done:\n{error}")
        return 2
    except (OSError, RuntimeError) as error:  # a game that broke, a full disk, a process of the pool that died
        terminal.say(f"walks: {error}; nothing was written")
        return 1
    except KeyboardInterrupt:
        terminal.say("walks: stopped; nothing was written")
        return 130
    terminal.say(f"{args.out}: {num_walks} walks through {len(games)} games")
    return 0


if __name__ == "__main__":
    sys.exit(main())
