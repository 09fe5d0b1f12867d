"""Make TextWorld games: a folder a split and DIR/manifest.json, the same for the same seed. No two games have the same content.

    python -m accerl_mp.tools.make_games --out DIR --num-train 24 --num-heldout 20 --seed 1
    python -m accerl_mp.tools.make_games --out DIR --kind cooking --size medium --split train=100 --split valid=20 --split test=20
    python -m accerl_mp.tools.make_games --check DIR        are there games of the same content in DIR/train, DIR/test, ...?

The default kind, `quest`, is the demo's: one to three rooms, a few things and a quest of one to three commands (take,
open, put, unlock, ...). All splits have the same kinds and draw names from the same house; no two games have the same
world or the same quest. Nothing in a game loses at once: a player loses by running out of turns.
"""

import argparse
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np
import textworld
from textworld.generator import compile_game, make_grammar, make_quest, make_world
from textworld.generator.chaining import QuestGenerationError
from textworld.generator.game import Game, GameOptions
from textworld.generator.inform7.world2inform7 import CouldNotCompileGameError

from accerl_mp.bounds import out_of_bounds
from accerl_mp.checks import cannot_be_made, not_a_pattern
from accerl_mp.config import ConfigError
from accerl_mp.tools import challenges
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.game_files import hash_lines, make_room, overlaps, read_facts, read_manifest
from accerl_mp.tools.processes import open_pool
from accerl_mp.tools.terminal import Terminal, counted

QUEST = "quest"
KINDS = ("take", "open", "put", "unlock", "insert", "eat", "drop", "close", "lock")
"""Last command of the quest; those before it (going somewhere among them) are whatever leads there."""
MAX_ROOMS, MAX_COMMANDS = 3, 3
MAX_ATTEMPTS = 60
TRIES_PER_LENGTH = 10
"""Some kinds have no quest of a given length in some worlds: after so many tries the quest gets a command shorter."""


@dataclass(frozen=True)
class Recipe:
    """What one game is made from. `attempt` is the only thing that a retry changes."""

    split: str
    index: int
    seed: int
    kind: str
    num_rooms: int
    num_commands: int
    attempt: int = 0
    settings: dict[str, Any] | None = None
    """Of one of TextWorld's own kinds; None for a quest."""

    def seeds(self) -> dict[str, int]:
        entropy = [self.seed, self.index, self.attempt, *self.split.encode()]
        values = np.random.SeedSequence(entropy).generate_state(4)
        return {name: int(value % 65535) for name, value in zip(("map", "objects", "quest", "grammar"), values, strict=True)}


@dataclass(frozen=True)
class MadeGame:
    """One row of the manifest."""

    file: str
    kind: str
    num_rooms: int
    num_things: int
    commands: list[str]
    objective: str
    world_key: str
    """Hash of every fact of the start with the things' names."""
    quest_key: str
    """Hash of the objective and its commands."""
    recipe: Recipe = field(repr=False)

    @property
    def keys(self) -> set[str]:
        """What no other game may have: a quest's world or commands. Other kinds repeat commands: both together."""
        return {self.world_key, self.quest_key} if self.recipe.settings is None else {self.world_key + self.quest_key}


def plan_challenges(kind: str, settings: dict[str, Any], split: str, num_games: int, seed: int) -> list[Recipe]:
    """Games of one of TextWorld's own kinds, alike but for their seeds."""
    return [Recipe(split, index, seed, kind, 0, 0, settings=settings) for index in range(num_games)]


def plan_split(split: str, num_games: int, seed: int) -> list[Recipe]:
    """Kinds, sizes and lengths in turn, so that every split of 20 games or more has all of them."""
    recipes = []
    for index in range(num_games):
        kind = KINDS[index % len(KINDS)]
        cycle = index // len(KINDS)
        num_rooms = 1 + (index + cycle) % MAX_ROOMS
        num_commands = 1 + (index + 2 * cycle) % MAX_COMMANDS
        recipes.append(Recipe(split, index, seed, kind, num_rooms, num_commands))
    return recipes


def make_game(recipe: Recipe, folder: str) -> MadeGame:
    """Generate and compile one game; a kind without a quest in a world gets another world."""
    for _ in range(MAX_ATTEMPTS):
        try:
            options = _options(recipe, folder)
            game = _generate(recipe, options) if recipe.settings is None else _generate_challenge(recipe, options)
        except (QuestGenerationError, NoQuestError):
            recipe = _next_attempt(recipe)
            continue
        compile_game(game, options)
        Path(options.path).with_suffix(".ni").unlink(missing_ok=True)
        return _describe(game, recipe, Path(options.path))
    raise NoQuestError(recipe)


def _next_attempt(recipe: Recipe) -> Recipe:
    attempt = recipe.attempt + 1
    shorter = attempt % TRIES_PER_LENGTH == 0 and recipe.num_commands > 1
    return replace(recipe, attempt=attempt, num_commands=recipe.num_commands - shorter)


def _another(recipe: Recipe, num_made: int) -> Recipe:
    """The same game from other seeds, as it was a double. Some kinds have few different games."""
    if recipe.attempt >= MAX_ATTEMPTS:
        raise ValueError(f"{num_made} different games of kind {recipe.kind} were found, and no more in {MAX_ATTEMPTS} tries: ask for fewer")
    return _next_attempt(recipe)


class NoQuestError(RuntimeError):
    """No quest of this kind and length was found."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.recipe = recipe


def _options(recipe: Recipe, folder: str) -> GameOptions:
    options = GameOptions()
    options.seeds = recipe.seeds()
    options.path = str(Path(folder) / f"{recipe.split}-{recipe.index:04d}.z8")
    options.force_recompile = True
    if recipe.settings is None:
        _quest_options(recipe, options)
    return options


def _quest_options(recipe: Recipe, options: GameOptions) -> None:
    options.nb_rooms = recipe.num_rooms
    options.nb_objects = 3 + recipe.num_rooms
    options.quest_length = recipe.num_commands
    options.grammar.theme = "house"
    rules = options.kb.rules.get_matching(f"{recipe.kind}.*")
    options.chaining.rules_per_depth = [rules]
    options.chaining.backward = True
    options.chaining.create_variables = True
    options.chaining.rng = options.rngs["quest"]
    options.chaining.restricted_types = {"r", "d"}


def _generate_challenge(recipe: Recipe, options: GameOptions) -> Game:
    game = challenges.build_game(recipe.kind, recipe.settings or {}, recipe.split, options)
    # TextWorld's own names hold no more than settings and seeds, which are in the manifest.
    game.metadata["uuid"] = f"tw-{recipe.kind}-{recipe.split}-{recipe.index:04d}"
    return game


def _generate(recipe: Recipe, options: GameOptions) -> Game:
    rngs = options.rngs
    world = make_world(options.nb_rooms, nb_objects=0, rngs=rngs)
    quests = make_quest(world, options)
    num_things = sum(entity.type not in {"r", "d", "I", "P"} for entity in world.entities)
    if num_things < options.nb_objects:
        world.populate(options.nb_objects - num_things, rng=rngs["objects"])
    game = Game(world, make_grammar(options.grammar, rng=rngs["grammar"]), quests)
    game.metadata["uuid"] = Path(options.path).stem
    if len(quests[0].commands) != recipe.num_commands:
        raise NoQuestError(recipe)
    return game


def _describe(game: Game, recipe: Recipe, path: Path) -> MadeGame:
    if recipe.settings is not None:
        return _describe_challenge(game, recipe, path)
    names = {key: info.name or key for key, info in game.infos.items()}
    facts = [" ".join([fact.name, *(names.get(variable.name, variable.name) for variable in fact.arguments)]) for fact in game.world.facts]
    commands = list(game.quests[0].commands)
    return MadeGame(
        file=f"{recipe.split}/{path.name}",
        kind=recipe.kind,
        num_rooms=recipe.num_rooms,
        num_things=len(game.world.objects),
        commands=commands,
        objective=game.objective,
        world_key=hash_lines(sorted(facts)),
        quest_key=hash_lines(commands),
        recipe=recipe,
    )


def _describe_challenge(game: Game, recipe: Recipe, path: Path) -> MadeGame:
    commands = list(game.metadata.get("walkthrough") or [])
    return MadeGame(
        file=f"{recipe.split}/{path.name}",
        kind=recipe.kind,
        num_rooms=len(game.world.rooms),
        num_things=len(game.world.objects),
        commands=commands,
        objective=game.objective,
        world_key=read_facts(path).content_key,
        quest_key=hash_lines(commands),
        recipe=recipe,
    )


def make_all(recipes: list[Recipe], out: Path, num_processes: int) -> list[MadeGame]:
    """Make every game; doubles are made again with other seeds until none is left.

    Results are taken in the order of `recipes`, so the games don't depend on the number of processes.
    """
    made: dict[tuple[str, int], MadeGame] = {}
    seen: set[str] = set()
    with _pool(num_processes) as pool, Terminal().progress("making games", len(recipes)) as advance:
        todo = recipes
        while todo:
            doubles = []
            for game in pool.map(make_game, todo, [str(out / recipe.split) for recipe in todo]):  # the rest is cancelled if one fails
                if game.keys & seen:
                    doubles.append(_another(game.recipe, len(made)))
                    continue
                seen |= game.keys
                made[game.recipe.split, game.recipe.index] = game
                advance()
            todo = doubles
    return [made[recipe.split, recipe.index] for recipe in recipes]


def _pool(num_processes: int) -> AbstractContextManager[ProcessPoolExecutor]:
    # Sets of names come out in hash order: a fixed hash seed makes the same games in every process. It must be in
    # the environment before a child's interpreter starts, hence spawn.
    os.environ["PYTHONHASHSEED"] = "0"
    return open_pool(num_processes)


def make_splits(out: Path, *, num_train: int, num_heldout: int, seed: int, num_processes: int) -> list[MadeGame]:
    """The demo's two splits of quests; returns the manifest's rows."""
    recipes = plan_split("train", num_train, seed) + plan_split("heldout", num_heldout, seed)
    return write_games(out, recipes, {"seed": seed, "num_train": num_train, "num_heldout": num_heldout}, num_processes)


def write_games(out: Path, recipes: list[Recipe], wanted: dict[str, Any], num_processes: int) -> list[MadeGame]:
    """Make all games and then the manifest, which says what was wanted. Returns its rows."""
    for split in dict.fromkeys(recipe.split for recipe in recipes):
        (out / split).mkdir(parents=True, exist_ok=True)
    games = make_all(recipes, out, num_processes)
    manifest = {"textworld": textworld.__version__, **wanted, "games": [asdict(game) for game in games]}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return games


def is_made(out: Path, **wanted: Any) -> bool:
    """True where these very games are there already."""
    manifest = read_manifest(out)
    if manifest is None or any(manifest.get(name) != value for name, value in {"textworld": textworld.__version__, **wanted}.items()):
        return False
    files = [out / game["file"] for game in manifest["games"]]
    return all(file.is_file() and file.with_suffix(".json").is_file() for file in files)


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("make_games", "--out DIR [FLAGS ...]", __doc__)
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--kind", choices=[QUEST, *challenges.SIZES], default=QUEST, help="what the games are like")
    parser.add_argument("--size", choices=["small", "medium", "large"], default="small", help="all kinds but quest")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting of the size, e.g. level=7")
    parser.add_argument("--split", action="append", default=[], metavar="NAME=N", help="a folder of N games; replaces the two below")
    parser.add_argument("--num-train", type=int, default=24, help="training games")
    parser.add_argument("--num-heldout", type=int, default=20, help="held-out games")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same games")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes that make games")
    parser.add_argument("--check", type=Path, nargs="+", metavar="DIR", help="compare games by content: these folders, or one's subfolders")
    parser.add_argument("--game-pattern", default="*.z8", help="--check: which files")
    return parser


def check_folders(folders: list[Path], pattern: str, terminal: Terminal) -> int:
    """Says which games have the same content; returns the exit code. ConfigError: folders that are none."""
    if problems := [f"--check {folder}: no such folder" for folder in folders if not folder.is_dir()]:
        raise ConfigError(problems)
    if not_a_pattern(pattern):
        raise ConfigError([f"--game-pattern {pattern!r}: it must be a pattern of files, such as *.z8"])
    if len(folders) == 1:
        folders = sorted(path for path in folders[0].iterdir() if path.is_dir()) or folders
    counts, pairs = overlaps(folders, pattern)
    for folder, count in counts.items():
        terminal.say(f"{folder}: {counted(count, 'game')}")
    for one, other in pairs[:20]:
        terminal.say(f"same content: {one} and {other}")
    terminal.say(f"{len(pairs)} pairs of games with the same content")
    return 1 if pairs or not sum(counts.values()) else 0


def _splits(args: argparse.Namespace, problems: list[str]) -> dict[str, int]:
    splits = {"train": args.num_train, "heldout": args.num_heldout} if not args.split else {}
    for text in args.split:
        name, _, number = text.partition("=")
        if not name.replace("-", "").replace("_", "").isalnum() or not number.isdecimal():
            problems.append(f"--split {text}: must be NAME=N")
        elif name in splits:
            problems.append(f"--split {text}: {name} is there twice")
        else:
            splits[name] = int(number)
    for name, count in zip(("num_train", "num_heldout"), (args.num_train, args.num_heldout), strict=True):
        if count < 0:
            problems.append(f"--{name.replace('_', '-')} must be at least 0, got {count}")
    if not problems and not sum(splits.values()):
        problems.append("no split has a game: there is nothing to make")
    return splits


def _plan(args: argparse.Namespace) -> tuple[list[Recipe], dict[str, Any]]:
    """Recipes, and what the manifest says of them; ConfigError with every problem at once."""
    problems = [*cannot_be_made("--out", args.out), *out_of_bounds("seed", args.seed, "--seed")]
    if args.processes < 1:
        problems.append(f"--processes must be at least 1, got {args.processes}")
    splits, settings = _splits(args, problems), None
    if args.kind != QUEST:
        try:
            settings = challenges.settings_of(args.kind, args.size, args.set)
        except ValueError as error:
            problems.append(str(error))
    elif args.set or args.size != "small":
        problems.append("--size and --set have no effect on --kind quest: leave them out")
    if problems:
        raise ConfigError(problems)
    if settings is None:
        recipes = [recipe for split, count in splits.items() for recipe in plan_split(split, count, args.seed)]
        return recipes, {"seed": args.seed, **{f"num_{split}": count for split, count in splits.items()}}
    recipes = [recipe for split, count in splits.items() for recipe in plan_challenges(args.kind, settings, split, count, args.seed)]
    return recipes, {"seed": args.seed, "kind": args.kind, "settings": settings, "splits": splits}


def _make(args: argparse.Namespace, terminal: Terminal) -> int:
    """ConfigError: flags that cannot work. ValueError: a kind that has no more different games."""
    recipes, wanted = _plan(args)
    if is_made(args.out, **wanted):
        terminal.say(f"{args.out}: these games are there already")
        return 0
    make_room(args.out, wanted)
    write_games(args.out, recipes, wanted, args.processes)
    counts = Counter(recipe.split for recipe in recipes)
    terminal.say(f"{args.out}: {', '.join(f'{count} {split}' for split, count in counts.items())}; no two games are the same")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    terminal = Terminal()
    if not args.out and not args.check:
        parser.error("--out is missing: where should the games go?")
    try:
        return check_folders(args.check, args.game_pattern, terminal) if args.check else _make(args, terminal)
    except ConfigError as error:
        terminal.say(f"make_games: this cannot be done:\n{error}")
        return 2
    except (ValueError, AssertionError, NoQuestError) as error:  # TextWorld asserts what its settings allow
        terminal.say(f"make_games: {error}")
        return 2
    except (OSError, RuntimeError) as error:  # a process of the pool that died is a RuntimeError, too
        *told, last = str(error).strip().splitlines() or [type(error).__name__]
        for line in told:  # a compiler says more than one
            terminal.say(f"    {line}")
        reason = f"a game could not be compiled (is the disk full?): {last}" if isinstance(error, CouldNotCompileGameError) else last
        terminal.say(f"make_games: {reason}; there is no manifest.json: the same command begins anew")
        return 1
    except KeyboardInterrupt:
        terminal.say("make_games: stopped; there is no manifest.json: the same command begins anew")
        return 130


if __name__ == "__main__":
    sys.exit(main())
