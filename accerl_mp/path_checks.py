"""What is wrong with the files and folders that flags name: each a sentence with its flag and value. `checks.py` asks."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from accerl_mp.cli import option_of
from accerl_mp.config import TEXTWORLD, Config
from accerl_mp.games import GamesError, find_games, without_json

_LONGEST_NAME = 255
"""Bytes of a file's name; Linux refuses to look at longer ones."""
_LONGEST_PATH = 3072
"""Bytes; Linux takes 4096, and a run makes files in files' folders of it."""
_PATHS = ("model_path", "chat_template", "tw_game_dir", "eval_game_dir", "log_dir", "checkpoint_dir", "resume", "replay_samples")


def said_by(rule: Callable[[Config], Iterator[str]], config: Config) -> Iterator[str]:
    """What a rule finds; a path that the system refuses to look at (a name too long, a folder that is shut) is its flag's problem."""
    try:
        yield from rule(config)
    except OSError as error:
        what = error.filename or "it"
        yield f"{_flag_of(error.filename, config)}: {what} cannot be looked at ({error.strerror or error}); name another one"


def _flag_of(path: str | None, config: Config) -> str:
    """With its value, as it is said everywhere."""
    values = config.to_flat()
    given = [name for name in _PATHS if values[name] and str(path).startswith(str(Path(values[name])))]
    name = max(given, key=lambda name: len(values[name]), default=None)
    return f"{option_of(name)} {values[name]}" if name else "a file of this run"


def game_folder(option: str, folder: str, config: Config) -> Iterator[str]:
    pattern = config.games.tw_game_pattern
    if is_bad := not_a_pattern(pattern):
        yield f"--tw-game-pattern {pattern!r}: it must be a pattern of files inside {option}, such as *.z8"
    if not os.path.isdir(folder):
        yield f"{option} {folder}: no such folder"
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        yield f"{option} {folder} cannot be read: this user may not"
        return
    if is_bad:
        return
    try:
        games = find_games(folder, pattern)
    except GamesError as error:
        yield f"{option} {folder}: {error}"
        return
    if not games:
        yield f"{option} {folder}: no file matches --tw-game-pattern {pattern!r}: there is nothing to play"
    if strange := [game for game in games if _is_no_utf8(str(game))]:
        names = f"{len(strange)} games have names that are no UTF-8 ({str(strange[0])!r} first)"
        yield f"{option} {folder}: {names}: no message could carry them; rename them"
    if config.games.env == TEXTWORLD and (lonely := without_json(games)):
        names = ", ".join(game.name for game in lonely[:3]) + (", ..." if len(lonely) > 3 else "")
        yield f"{option} {folder}: {len(lonely)} games have no .json beside them ({names}): TextWorld would give no commands, score or end"


def _is_no_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


def not_a_pattern(pattern: str) -> bool:
    """Python's glob raises at these, no file has such a name, or it leaves the folder."""
    parts = Path(pattern).parts
    is_bad = [part == ".." or (part != "**" and "**" in part) or len(os.fsencode(part)) > _LONGEST_NAME for part in parts]
    return not parts or Path(pattern).is_absolute() or any(is_bad)


def cannot_be_made(option: str, folder: Path) -> Iterator[str]:
    """What keeps a folder from being made: the first of its parents that exists is a file, or may not be written."""
    real = Path(os.path.realpath(folder))
    parent = next(path for path in [folder, *real.parents] if os.path.lexists(path))
    missing = real.parts[len(Path(os.path.realpath(parent)).parts) :]
    if os.path.islink(parent) and not os.path.exists(parent):
        yield f"{option} {folder}: {parent} is a link that leads nowhere; name another folder"
    elif not os.path.isdir(parent):
        yield f"{option} {folder}: {parent} is a file; name another folder"
    elif not os.access(parent, os.W_OK | os.X_OK) or os.path.realpath(parent).startswith("/proc"):
        yield f"{option} {folder}: {parent} is not writable; name another folder"
    elif any(len(os.fsencode(part)) > _LONGEST_NAME for part in missing) or len(os.fsencode(real)) > _LONGEST_PATH:
        yield f"{option} {folder}: its name is too long; name another folder"
