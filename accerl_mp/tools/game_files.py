"""What a game is, read from the `.json` beside it: for tables by kind and length, and to tell whether two games are the same.

Works on every game that TextWorld made, those of the FTWP archive too. Files of another task have no such `.json`.
"""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accerl_mp.games import find_games


@dataclass(frozen=True, slots=True)
class GameFacts:
    kind: str
    num_commands: int
    """Of the shortest known way to win; 0: not known."""
    content_key: str
    """The same for games with the same things in the same places and the same way to win, whatever their files are called."""


def read_facts(path: Path) -> GameFacts:
    """ValueError: no `.json` of TextWorld's beside it."""
    try:
        game = json.loads(path.with_suffix(".json").read_text())
        names = {key: info["name"] or key for key, info in game["infos"]}
        facts = [_fact(fact, names) for fact in game["world"]]
        commands = list(game["metadata"].get("walkthrough") or _quest_commands(game))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its .json is not one of TextWorld's ({type(error).__name__}: {error})") from error
    key = hash_lines([*sorted(facts), *commands])
    return GameFacts(kind=_kind(path, game["metadata"]), num_commands=len(commands), content_key=key)


def hash_lines(lines: list[str]) -> str:
    return hashlib.blake2s("\n".join(lines).encode(), digest_size=8).hexdigest()


def overlaps(folders: list[Path], pattern: str) -> tuple[dict[str, int], list[tuple[Path, Path]]]:
    """How many games each folder has, and all pairs of the same content, within a folder or across."""
    counts, seen, pairs = {}, defaultdict(list), []
    for folder in folders:
        games = find_games(str(folder), pattern)
        counts[str(folder)] = len(games)
        for game in games:
            key = read_facts(game).content_key
            pairs += [(other, game) for other in seen[key]]
            seen[key].append(game)
    return counts, pairs


def _fact(fact: dict[str, Any], names: dict[str, str]) -> str:
    return " ".join([fact["name"], *(names.get(argument["name"], argument["name"]) for argument in fact["arguments"])])


def _quest_commands(game: dict[str, Any]) -> list[str]:
    return [command for quest in game["quests"] for command in quest.get("commands") or ()]


def _kind(path: Path, metadata: dict[str, Any]) -> str:
    """From the manifest of `make_games`, what a challenge says of itself, or how TextWorld named it (tw-cooking-...)."""
    if listed := _manifest(path.parent.parent).get(f"{path.parent.name}/{path.name}"):
        return listed
    named = re.match(r"tw-([a-z_]+)", str(metadata.get("uuid") or path.stem))
    return str(metadata.get("desc") or (named.group(1) if named else "textworld")).lower()


@cache
def _manifest(folder: Path) -> dict[str, str]:
    file = folder / "manifest.json"
    if not file.is_file():
        return {}
    return {row["file"]: row["kind"] for row in json.loads(file.read_text()).get("games", [])}
