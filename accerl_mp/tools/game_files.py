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

from accerl_mp.config import ConfigError
from accerl_mp.games import find_games

MANIFEST = "manifest.json"
_CHALLENGE = re.compile(r"tw-(cooking|coin[_-]collector|treasure[_-]hunter|simple)(?![a-z])")
"""Any other game is called `tw-` and random letters."""


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
    """From the manifest of `make_games`, else from how TextWorld's own challenges and the FTWP archive name their games."""
    if listed := _manifest(path.parent.parent).get(f"{path.parent.name}/{path.name}"):
        return listed
    named = _CHALLENGE.match(str(metadata.get("uuid") or "")) or _CHALLENGE.match(path.stem)
    return named[1].replace("_", "-") if named else "textworld"


@cache
def _manifest(folder: Path) -> dict[str, str]:
    return {row["file"]: row["kind"] for row in (read_manifest(folder) or {"games": []})["games"]}


def read_manifest(out: Path) -> dict[str, Any] | None:
    """None: there is none, or it was cut by a full disk."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        return manifest if isinstance(manifest["games"], list) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def make_room(out: Path, wanted: dict[str, Any]) -> None:
    """Games are found by their folder: others beside the new ones would be played too. ConfigError: others are there.

    What an interrupted call left is removed: games by our names, but no manifest.
    """
    manifest = read_manifest(out)
    if manifest is not None and any(manifest.get(name) != value for name, value in wanted.items()):
        raise ConfigError([f"--out {out} holds games that were made otherwise (manifest.json): name another folder, or remove it"])
    found = [path for path in out.glob("*/*") if path.is_file()]
    ours = [path for path in found if re.fullmatch(rf"{re.escape(path.parent.name)}-\d{{4,}}\.\w+", path.name)]
    if foreign := [path for path in found if path.suffix == ".z8" and path not in ours]:
        raise ConfigError([f"--out {out} holds other games ({foreign[0].relative_to(out)}): they would be played too; name another folder"])
    for path in ours:
        path.unlink()
