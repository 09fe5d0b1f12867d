"""Make small TextWorld games: DIR/train, DIR/heldout and DIR/manifest.json, the same for the same seed.

    python -m accerl_mp.tools.make_games --out DIR --num-train 24 --num-heldout 20 --seed 1 --processes 2

A game is one to three rooms, a few things and a quest of one to three commands (take, open, put, unlock, ...).
Both splits have the same kinds and draw names from the same house; no two games have the same world or the same
quest, within a split or across. Nothing in a game loses at once: a player loses by running out of turns.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import textworld
from textworld.generator import compile_game, make_grammar, make_quest, make_world
from textworld.generator.chaining import QuestGenerationError
from textworld.generator.game import Game, GameOptions

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
            game = _generate(recipe, options)
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


class NoQuestError(RuntimeError):
    """No quest of this kind and length was found."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.recipe = recipe


def _options(recipe: Recipe, folder: str) -> GameOptions:
    options = GameOptions()
    options.seeds = recipe.seeds()
    options.nb_rooms = recipe.num_rooms
    options.nb_objects = 3 + recipe.num_rooms
    options.quest_length = recipe.num_commands
    options.grammar.theme = "house"
    options.path = str(Path(folder) / f"{recipe.split}-{recipe.index:04d}.z8")
    options.force_recompile = True
    rules = options.kb.rules.get_matching(f"{recipe.kind}.*")
    options.chaining.rules_per_depth = [rules]
    options.chaining.backward = True
    options.chaining.create_variables = True
    options.chaining.rng = options.rngs["quest"]
    options.chaining.restricted_types = {"r", "d"}
    return options


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
        world_key=_hash(sorted(facts)),
        quest_key=_hash(commands),
        recipe=recipe,
    )


def _hash(lines: list[str]) -> str:
    return hashlib.blake2s("\n".join(lines).encode(), digest_size=8).hexdigest()


def make_all(recipes: list[Recipe], out: Path, num_processes: int) -> list[MadeGame]:
    """Make every game; doubles are made again with other seeds until none is left.

    Results are taken in the order of `recipes`, so the games don't depend on the number of processes.
    """
    made: dict[tuple[str, int], MadeGame] = {}
    seen: set[str] = set()
    started = time.monotonic()
    with _pool(num_processes) as pool:
        todo = recipes
        while todo:
            doubles = []
            for game in pool.map(make_game, todo, [str(out / recipe.split) for recipe in todo]):
                keys = {game.world_key, game.quest_key}
                if keys & seen:
                    doubles.append(_next_attempt(game.recipe))
                    continue
                seen |= keys
                made[game.recipe.split, game.recipe.index] = game
                _progress(len(made), len(recipes), time.monotonic() - started)
            todo = doubles
    return [made[recipe.split, recipe.index] for recipe in recipes]


def _pool(num_processes: int) -> ProcessPoolExecutor:
    # Sets of names come out in hash order: a fixed hash seed makes the same games in every process. It must be in
    # the environment before a child's interpreter starts, hence spawn.
    os.environ["PYTHONHASHSEED"] = "0"
    return ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))


def _progress(num_made: int, num_games: int, seconds: float) -> None:
    if num_made % 10 == 0 or num_made == num_games:
        print(f"made {num_made} of {num_games} games in {seconds:.0f} s", file=sys.stderr, flush=True)


def make_splits(out: Path, *, num_train: int, num_heldout: int, seed: int, num_processes: int) -> list[MadeGame]:
    """Write both splits and the manifest; returns the manifest's rows."""
    recipes = plan_split("train", num_train, seed) + plan_split("heldout", num_heldout, seed)
    for split in ("train", "heldout"):
        (out / split).mkdir(parents=True, exist_ok=True)
    games = make_all(recipes, out, num_processes)
    manifest = {
        "textworld": textworld.__version__,
        "seed": seed,
        "num_train": num_train,
        "num_heldout": num_heldout,
        "games": [asdict(game) for game in games],
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return games


def is_made(out: Path, *, num_train: int, num_heldout: int, seed: int) -> bool:
    """True where these very games are there already."""
    manifest_file = out / "manifest.json"
    if not manifest_file.is_file():
        return False
    manifest = json.loads(manifest_file.read_text())
    wanted = {"num_train": num_train, "num_heldout": num_heldout, "seed": seed, "textworld": textworld.__version__}
    same = all(manifest.get(name) == value for name, value in wanted.items())
    files = [out / game["file"] for game in manifest["games"]]
    return same and all(file.is_file() and file.with_suffix(".json").is_file() for file in files)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=24, help="training games")
    parser.add_argument("--num-heldout", type=int, default=20, help="held-out games")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same games")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes that make games")
    args = parser.parse_args(argv)
    counts = {"num_train": args.num_train, "num_heldout": args.num_heldout, "seed": args.seed}
    if is_made(args.out, **counts):
        print(f"{args.out}: these games are there already", file=sys.stderr)
        return 0
    games = make_splits(args.out, **counts, num_processes=args.processes)
    print(f"{args.out}: {args.num_train} training and {args.num_heldout} held-out games, {len(games)} in all", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
