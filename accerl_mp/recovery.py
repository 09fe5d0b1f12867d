"""Saved states of a run on disk: which there are, whether one is whole, and what a start goes on from. No torch.

    <log-dir>/resume/
        current                              name of the newest state, moved last
        step-000040-version-000005/          one state
            state.json                       numbers, ledger, settings, size and checksum of every other file, and its own checksum
            rank-0.msgpack, rank-1.msgpack   what each rank alone knows: its ring, its random numbers
            .metadata, __0_0.distcp, ...     model and optimizer, sharded (torch.distributed.checkpoint)
        announced                            highest policy version that this folder ever announced, and its checksum
        start.json                           what the present start goes on from (written by the launcher)

A state is written in a folder of another name and renamed: one that is there under its name was whole. It may still be
damaged later, so its files are compared with its state.json before anything starts from it. A damaged state or note is left
out, and said to be: only `start.json`, which every start writes anew, must be as it was written.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accerl_mp.config import Config
from accerl_mp.files import open_file, read_file, read_text, write_over
from accerl_mp.games import GamesError, games_kept, games_of_run, list_games
from accerl_mp.state_fields import LARGEST_VERSION, are_strikes, is_count, wrong_field
from accerl_mp.topology import RunPaths

FORMAT = 2
STATE_FILE, CURRENT, ANNOUNCED, START = "state.json", "current", "announced", "start.json"
_NAME = re.compile(r"step-(\d+)-version-(\d+)")
_ANNOUNCED = re.compile(r"([0-9]{1,10})(?: ([0-9a-f]{8}))?")
_MOST_DIGITS = 12
_MODEL_INDEX = ".metadata"
_CHECKSUM = "checksum"
_CHUNK_BYTES = 4 << 20
_ANNOUNCED_BYTES = 32
_START_BYTES = 4096

_log = logging.getLogger(__name__)


class StateError(RuntimeError):
    """A saved state that cannot be used. Says which and why."""


@dataclass(frozen=True)
class SavedState:
    """One state's folder and its state.json."""

    folder: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "SavedState":
        """StateError unless its state.json can be read."""
        content = _read_json(folder / STATE_FILE)
        if not isinstance(content, dict) or "format" not in content:
            raise StateError(f"{folder}: its {STATE_FILE} cannot be read: it is no saved state")
        if content["format"] != FORMAT:
            raise StateError(f"{folder}: format {content['format']}, this build reads {FORMAT}")
        if content.pop(_CHECKSUM, None) != _content_checksum(content):
            raise StateError(f"{folder}: its {STATE_FILE} was changed after it was written (checksum)")
        if wrong := wrong_field(content):
            raise StateError(f"{folder}: its {STATE_FILE} holds what no state does ({wrong})")
        return cls(folder, content)

    def check_files(self) -> None:
        """StateError naming the first file that is missing or not as it was written. Reads everything."""
        files = self.content["files"]
        if unnamed := [name for name in self._necessary if name not in files]:
            raise StateError(f"{self.folder}: {', '.join(unnamed)} was not written")
        for name, (size_bytes, crc) in files.items():
            try:
                _check_file(self.folder / name, size_bytes, crc)
            except OSError as error:
                raise StateError(f"{self.folder / name} cannot be read ({error})") from error

    @property
    def _necessary(self) -> list[str]:
        return [_MODEL_INDEX, *(rank_file_name(rank) for rank in range(self.num_ranks))]

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.content["step"]

    @property
    def version(self) -> int:
        """Policy version that was the trainer's."""
        return self.content["version"]

    @property
    def num_ranks(self) -> int:
        return self.content["num_ranks"]

    def rank_file(self, rank: int) -> Path:
        return self.folder / rank_file_name(rank)


@dataclass(frozen=True)
class Start:
    """What the present start of a run goes on from; every process of it reads the same."""

    state: str | None = None
    """Folder of the saved state; None: from the beginning."""
    first_version: int = 0
    """Policy version of the first push."""
    num_restarts: int = 0
    """Times that the trainer was started again (`--max-trainer-restarts`)."""

    def save(self, resume_dir: Path) -> None:
        """Over the one before: a trainer that is started again finds the disk full, perhaps. OSError where there is none and no room."""
        resume_dir.mkdir(parents=True, exist_ok=True)
        write_over(resume_dir / START, json.dumps(asdict(self), indent=2) + "\n", _START_BYTES)

    @classmethod
    def load(cls, resume_dir: Path) -> "Start":
        """From the beginning, where nobody has said otherwise (a role started by hand, tests). StateError where the note is damaged."""
        path = resume_dir / START
        if not path.exists():
            return cls()
        noted = _read_json(path)
        names = ("state", "first_version", "num_restarts")
        if (
            not isinstance(noted, dict)
            or not isinstance(noted.get("state", 0), str | None)
            or not (is_count(noted.get("first_version"), LARGEST_VERSION) and is_count(noted.get("num_restarts")))
        ):
            raise StateError(f"{path} says nothing about where this start begins")
        return cls(**{name: noted[name] for name in names})

    @property
    def saved(self) -> SavedState | None:
        return SavedState.open(Path(self.state)) if self.state else None


def folder_name(step: int, version: int) -> str:
    return f"step-{step:06d}-version-{version:06d}"


def rank_file_name(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def states_in(resume_dir: Path) -> list[Path]:
    """Folders of the states, newest first: the one that `current` names, then by version and step (versions only ever grow)."""
    try:
        found = [path for path in resume_dir.glob("step-*") if _is_state_name(path.name)]
    except OSError:  # a path too long for any folder
        return []
    current = _note(resume_dir / CURRENT)
    return sorted(found, key=lambda path: (path.name == current, *_order(path.name)), reverse=True)


def newest_step(resume_dir: Path) -> int:
    """Optimizer step of the newest state, by its name; 0: there is none."""
    return next((_order(folder.name)[1] for folder in states_in(resume_dir)), 0)


def newest_whole(resume_dir: Path) -> tuple[SavedState | None, list[str]]:
    """(the newest state that is as it was written, what is wrong with each newer one)."""
    damaged = []
    for folder in states_in(resume_dir):
        try:
            state = SavedState.open(folder)
            state.check_files()
        except StateError as error:
            damaged.append(str(error))
        else:
            return state, damaged
    return None, damaged


def resume_dir_of(folder: Path) -> Path:
    """`--resume DIR` names a run folder, or the folder of states in it."""
    return folder if states_in(folder) else folder / "resume"


def start_from(state: SavedState | None, resume_dir: Path, *, num_restarts: int = 0) -> Start:
    """The start of a run in `resume_dir`'s folder. No version means two policies: it begins above all that were announced."""
    first = announced_in(resume_dir) + 1
    if state is None:
        return Start(None, first, num_restarts)
    return Start(str(state.folder), max(first, state.content["next_version"]), num_restarts)


def announced_in(resume_dir: Path) -> int:
    """Highest version that was ever announced; -1: none. Where the note is missing or damaged, the highest that a state has.

    A note without its checksum may be a part of one (or an older build's): it raises that number, it does not lower it.
    """
    version, is_whole = _announced(_note(resume_dir / ANNOUNCED) or "")
    if is_whole:
        return version
    return max((version, *(_order(folder.name)[0] for folder in states_in(resume_dir))))


def damaged_notes(resume_dir: Path) -> list[str]:
    """What is wrong with `current` and `announced`, a sentence each: a start goes by the states' names instead."""
    problems, states = [], {path.name for path in states_in(resume_dir)}
    if (current := _note(resume_dir / CURRENT)) is not None and current not in states:
        problems.append(f"{resume_dir / CURRENT} names no state that is there (the highest version counts)")
    if (announced := _note(resume_dir / ANNOUNCED)) is not None and not _announced(announced)[1]:
        next_version = announced_in(resume_dir) + 1
        problems.append(f"{resume_dir / ANNOUNCED} is no whole note (the next version is {next_version}, perhaps once more)")
    return problems


def announce(resume_dir: Path, version: int) -> None:
    """Before a push of that version begins.

    Written over in place: a full disk has room for that. One that refuses all the same costs the note, not the run.
    """
    try:
        resume_dir.mkdir(parents=True, exist_ok=True)
        write_over(resume_dir / ANNOUNCED, f"{version} {_version_checksum(version)}", _ANNOUNCED_BYTES)
    except OSError as error:
        _log.warning("cannot note version %d: %s; a later start could use its number again", version, error)


def identity(config: Config, games_note: Path | None = None, games: list[Path] | None = None) -> dict[str, str]:
    """{flag: what must be the same for a state to make sense}. Episodes, groups and games are numbered by these settings.

    games_note, games: the note of the run's list of its games, or that list; without either, as their folder is now
    """
    chosen = config.games
    model, names = "?", []
    with contextlib.suppress(OSError):
        model = _digest(read_file(Path(config.model.model_path) / "config.json"))
    with contextlib.suppress(OSError, GamesError):  # the checks say what is wrong with them
        if games is None:
            games = games_of_run(games_note, config)[0] if games_note else list_games(config) if chosen.tw_game_dir else []
        names = [path.name for path in games]
    return {
        "--model-path": f"{config.model.model_path} (config.json {model})",
        "--train-mode": config.model.train_mode,
        "--rl-algorithm": config.algorithm.rl_algorithm,
        "--grpo-group-size": str(config.group_size),
        "--tw-game-dir": f"{chosen.tw_game_dir} ({len(names)} games {_digest(os.fsencode(chr(10).join(names)))})",
        "--history-mode": chosen.history_mode,
        "--seed": str(config.run.seed),
    }


def games_of_state(state: SavedState, config: Config) -> tuple[list[Path], list[Path]] | None:
    """`games.games_kept` of the run that has saved a state; also None where it cannot be asked any more."""
    paths = RunPaths(state.folder.parent.parent)
    try:
        return games_kept(paths.games, Config.load(paths.args), config)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # a GamesError too: the checks say what is wrong
        return None


def disagreements(state: SavedState, config: Config, games: list[Path] | None = None) -> list[str]:
    """Settings in which a state and this start differ although they must not, one sentence each. `games`: instead of the folder's."""
    saved, now = state.content["identity"], identity(config, games=games)
    return [
        f"{flag} {now[flag]} differs from the saved state's {saved[flag]} ({state.folder}): "
        "its episodes and weights would mean something else"
        for flag in now
        if _essence(saved.get(flag, "")) != _essence(now[flag])
    ]


def noted_strikes(path: Path) -> dict[str, Any] | None:
    """What ingest holds against games and groups (`RunPaths.strikes`); None: there is no note, or a damaged one."""
    if not os.path.lexists(path):
        return None
    try:
        noted = _read_json(path)
    except StateError as error:
        _log.warning("%s: it is left out, games that were set aside are tried again", error)
        return None
    if not are_strikes(noted):
        _log.warning("%s holds no strikes: it is left out, games that were set aside are tried again", path)
        return None
    return {name: noted[name] for name in ("strikes", "set_aside")}


def low_water(next_number: int, done: set[int], *, first: int) -> tuple[int, list[int]]:
    """(L, done numbers above it): every group below L is done. `first`: all below it are known to be."""
    low = first
    while low in done:
        low += 1
    return min(low, next_number), sorted(number for number in done if number > low)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def state_text(content: dict[str, Any]) -> str:
    """state.json of this content: with its own checksum, so that a changed number is noticed as a changed tensor is."""
    return json.dumps(content | {_CHECKSUM: _content_checksum(content)}, indent=1) + "\n"


def _content_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _announced(noted: str) -> tuple[int, bool]:
    """(version, whether the note is whole) of the text of `announced`; -1: it names none."""
    match = _ANNOUNCED.fullmatch(noted)
    if match is None or not is_count(int(match[1]), LARGEST_VERSION):
        return -1, False
    version = int(match[1])
    if match[2] is None:
        return version, False
    return (version, True) if match[2] == _version_checksum(version) else (-1, False)


def _version_checksum(version: int) -> str:
    return f"{zlib.crc32(str(version).encode()):08x}"


def _check_file(path: Path, size_bytes: int, crc: int) -> None:
    if not path.is_file():
        raise StateError(f"{path} is missing")
    if path.stat().st_size != size_bytes:
        raise StateError(f"{path} has {path.stat().st_size} bytes, {size_bytes} were written")
    if checksum(path) != crc:
        raise StateError(f"{path} was changed after it was written (checksum)")


def _read_json(path: Path) -> Any:
    """StateError where it cannot be read; a nesting that Python does not follow is a RecursionError."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path.parent}: its {path.name} cannot be read ({type(error).__name__}: {error})") from error


def _note(path: Path) -> str | None:
    """A note's text, readable or not; None: there is none."""
    try:
        return read_text(path, errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError:
        return ""


def _is_state_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and len(match[1]) <= _MOST_DIGITS and is_count(int(match[2][:_MOST_DIGITS]), LARGEST_VERSION)


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[2]), int(match[1])


def _digest(data: bytes) -> str:
    return hashlib.blake2s(data, digest_size=5).hexdigest()


def _essence(text: str) -> str:
    """Of a path with a digest the digest: a folder may have moved."""
    head, bracket, rest = text.rpartition(" (")
    return rest if bracket and head else text
