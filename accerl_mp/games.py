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


def note_games(note: Path, config: Config, train: list[Path] | None = None) -> None:
    """Write down a start's games (`RunPaths.games`): a game's id is its place in its list, whatever is deleted later. OSError: no room.

    train: the list that another start has begun with (`games_kept`); None: as the folder is now
    """
    lists = {"train": list_games(config) if train is None else train, "eval": list_eval_games(config)}
    write_atomically(note, json.dumps({kind: list(map(str, games)) for kind, games in lists.items()}) + "\n")


def games_of_run(note: Path, config: Config) -> tuple[list[Path], list[Path]]:
    """(training games, held-out games) by id, as the start began. Without the note, or with a damaged one, as the folders are now.

    GamesError as `find_games`.
    """
    try:
        return _noted(note)
    except FileNotFoundError:  # a role that is started by hand, tests
        return list_games(config), list_eval_games(config)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    _log.warning("%s cannot be read (%s): games are listed anew, their numbers may have changed", note, reason)
    return list_games(config), list_eval_games(config)


def games_kept(note: Path, before: Config, config: Config) -> tuple[list[Path], list[Path]] | None:
    """(training games by id, those of them that are gone) of a run that goes on, some of whose games may have been deleted meanwhile.

    None where more than that has happened: none is left, there are others too, or other flags choose them. Their folder may have
    moved. GamesError as `find_games`.

    note, before: the list and the settings of the start that it was written for
    """
    if _choice(before) != _choice(config):
        return None
    try:
        noted, folder = _noted(note)[0], Path(config.games.tw_game_dir)
        listed = [folder / game.relative_to(before.games.tw_game_dir) for game in noted]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    there = set(find_games(config.games.tw_game_dir, config.games.tw_game_pattern))
    gone = [game for game in listed if game not in there]
    # Beyond a limit there were others all along.
    has_others = config.games.tw_game_limit is None and not there <= set(listed)
    return None if has_others or len(gone) == len(listed) else (listed, gone)


def _choice(config: Config) -> tuple[object, ...]:
    return config.games.tw_game_pattern, config.games.tw_game_limit, config.run.seed


def _noted(note: Path) -> tuple[list[Path], list[Path]]:
    """(training games, held-out games); OSError, ValueError, LookupError, TypeError or RecursionError where that cannot be read."""
    noted = json.loads(read_text(note))
    lists = noted["train"], noted["eval"]
    if not all(isinstance(games, list) and all(isinstance(game, str) for game in games) for games in lists):
        raise ValueError("it is no list of games")
    return [Path(game) for game in lists[0]], [Path(game) for game in lists[1]]


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
