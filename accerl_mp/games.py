"""Which game files a run plays, in which order. Looks at names only: playing them is rollout's."""

import fnmatch
import json
import logging
import os
import random
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.files import read_text, write_atomically

_MOST_FILES, _MOST_OTHERS, _MOST_PER_GAME = 2_000_000, 100_000, 10
"""Files that are looked at: at all; where no game is among them; for each game, beside which lie its .json and what it was made from."""


_log = logging.getLogger(__name__)


class GamesError(ValueError):
    """A folder that is not searched to its end. Says why."""


def list_games(config: Config) -> list[Path]:
    """Training games, shuffled by `--seed`, then limited. A game's id is its place in this list."""
    games = find_games(config.games.tw_game_dir, config.games.tw_game_pattern)
    random.Random(config.run.seed).shuffle(games)
    return games[: config.games.tw_game_limit]


def list_eval_games(config: Config) -> list[Path]:
    """Held-out games, sorted; none without `--eval-game-dir`."""
    if not config.metrics.eval_game_dir:
        return []
    return find_games(config.metrics.eval_game_dir, config.games.tw_game_pattern)


def note_games(note: Path, config: Config) -> None:
    """Write down a start's games (`RunPaths.games`): a game's id is its place in its list, whatever is deleted later. OSError: no room."""
    lists = {"train": list_games(config), "eval": list_eval_games(config)}
    write_atomically(note, json.dumps({kind: list(map(str, games)) for kind, games in lists.items()}) + "\n")


def games_of_run(note: Path, config: Config) -> tuple[list[Path], list[Path]]:
    """(training games, held-out games) by id, as the start began. Without the note, or with a damaged one, as the folders are now.

    GamesError as `find_games`.
    """
    try:
        noted = json.loads(read_text(note))
        lists = noted["train"], noted["eval"]
        if all(isinstance(games, list) and all(isinstance(game, str) for game in games) for games in lists):
            return [Path(game) for game in lists[0]], [Path(game) for game in lists[1]]
        reason = "it is no list of games"
    except FileNotFoundError:  # a role that is started by hand, tests
        return list_games(config), list_eval_games(config)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    _log.warning("%s cannot be read (%s): games are listed anew, their numbers may have changed", note, reason)
    return list_games(config), list_eval_games(config)


def find_games(folder: str, pattern: str) -> list[Path]:
    """Game files in `folder` and below, sorted by path; what cannot be read is passed over.

    GamesError where so much else lies there that the folder can hardly be meant: `/` has millions of files.
    """
    found: set[Path] = set()
    num_looked_at = 0
    for root, folders, files in os.walk(folder):
        num_looked_at += len(folders) + len(files)
        found.update(path for path in _matching(Path(root), files, pattern) if os.path.isfile(path))
        if num_looked_at > min(_MOST_FILES, _MOST_OTHERS + _MOST_PER_GAME * len(found)):
            raise GamesError(f"over {num_looked_at:,} files and folders, {len(found)} games among them so far: name the games' own folder")
    return sorted(found)


def _matching(folder: Path, files: list[str], pattern: str) -> Iterator[Path]:
    """In this folder; a pattern may go on into folders below. `**` at its beginning says nothing: every folder is looked into."""
    parts = list(dropwhile("**".__eq__, Path(pattern).parts))
    if len(parts) > 1:
        yield from folder.glob("/".join(parts))
    elif parts:
        yield from (folder / name for name in fnmatch.filter(files, parts[0]))


def without_json(games: list[Path]) -> list[Path]:
    """Games whose `.json` is not beside them: TextWorld then knows no commands, score or end."""
    return [game for game in games if not game.with_suffix(".json").is_file()]
