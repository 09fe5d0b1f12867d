"""Saved states of a run on disk: which there are, whether one is whole, and what a start goes on from. No torch.

    <log-dir>/resume/
        current                              name of the newest state, moved last
        step-000040-version-000005/          one state
            state.json                       numbers, ledger, settings, and size and checksum of every other file
            rank-0.msgpack, rank-1.msgpack   what each rank alone knows: its ring, its random numbers
            .metadata, __0_0.distcp, ...     model and optimizer, sharded (torch.distributed.checkpoint)
        announced                            highest policy version that this folder ever announced
        start.json                           what the present start goes on from (written by the launcher)

A state is written in a folder of another name and renamed: one that is there under its name was whole. It may still be
damaged later, so its files are compared with its state.json before anything starts from it.
"""

import hashlib
import json
import logging
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accerl_mp.config import Config
from accerl_mp.files import write_over
from accerl_mp.games import list_games

FORMAT = 1
STATE_FILE, CURRENT, ANNOUNCED, START = "state.json", "current", "announced", "start.json"
_NAME = re.compile(r"step-(\d+)-version-(\d+)")
_CHUNK_BYTES = 4 << 20
_ANNOUNCED_BYTES = 20
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
        try:
            content = json.loads((folder / STATE_FILE).read_text())
            known = content["format"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{folder}: its {STATE_FILE} cannot be read ({type(error).__name__}: {error})") from error
        if known != FORMAT:
            raise StateError(f"{folder}: format {known}, this build reads {FORMAT}")
        return cls(folder, content)

    def check_files(self) -> None:
        """StateError naming the first file that is missing or not as it was written. Reads everything."""
        for name, (size_bytes, crc) in self.content["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise StateError(f"{path} is missing")
            if path.stat().st_size != size_bytes:
                raise StateError(f"{path} has {path.stat().st_size} bytes, {size_bytes} were written")
            if checksum(path) != crc:
                raise StateError(f"{path} was changed after it was written (checksum)")

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
        """From the beginning, where nobody has said otherwise (a role started by hand, tests)."""
        path = resume_dir / START
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    @property
    def saved(self) -> SavedState | None:
        return SavedState.open(Path(self.state)) if self.state else None


def folder_name(step: int, version: int) -> str:
    return f"step-{step:06d}-version-{version:06d}"


def rank_file_name(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def states_in(resume_dir: Path) -> list[Path]:
    """Folders of the states, newest first: the one that `current` names, then by version and step (versions only ever grow)."""
    found = [path for path in resume_dir.glob("step-*") if _NAME.fullmatch(path.name)]
    pointer = resume_dir / CURRENT
    current = pointer.read_text().strip() if pointer.is_file() else ""
    return sorted(found, key=lambda path: (path.name == current, *_order(path.name)), reverse=True)


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
    """Highest version that was ever announced; -1: none."""
    path = resume_dir / ANNOUNCED
    return int(path.read_text()) if path.is_file() else -1


def announce(resume_dir: Path, version: int) -> None:
    """Before a push of that version begins.

    Written over in place: a full disk has room for that. One that refuses all the same costs the note, not the run.
    """
    try:
        resume_dir.mkdir(parents=True, exist_ok=True)
        write_over(resume_dir / ANNOUNCED, f"{version}", _ANNOUNCED_BYTES)
    except OSError as error:
        _log.warning("cannot note version %d: %s; a later start could use its number again", version, error)


def identity(config: Config) -> dict[str, str]:
    """{flag: what must be the same for a state to make sense}. Episodes, groups and games are numbered by these settings."""
    algorithm, games = config.algorithm, config.games
    model_config = Path(config.model.model_path) / "config.json"
    model = _digest(model_config.read_bytes()) if model_config.is_file() else "?"
    names = [path.name for path in list_games(config)] if Path(games.tw_game_dir or ".").is_dir() and games.tw_game_dir else []
    return {
        "--model-path": f"{config.model.model_path} (config.json {model})",
        "--train-mode": config.model.train_mode,
        "--rl-algorithm": algorithm.rl_algorithm,
        "--grpo-group-size": "1" if algorithm.rl_algorithm == "ppo" else str(algorithm.grpo_group_size),
        "--tw-game-dir": f"{games.tw_game_dir} ({len(names)} games {_digest(chr(10).join(names).encode())})",
        "--history-mode": games.history_mode,
        "--seed": str(config.run.seed),
    }


def disagreements(state: SavedState, config: Config) -> list[str]:
    """Settings in which a state and this start differ although they must not, one sentence each."""
    saved, now = state.content["identity"], identity(config)
    return [
        f"{flag} {now[flag]} differs from the saved state's {saved[flag]} ({state.folder}): "
        "its episodes and weights would mean something else"
        for flag in now
        if _essence(saved.get(flag, "")) != _essence(now[flag])
    ]


def noted_strikes(path: Path) -> dict[str, Any] | None:
    """What ingest holds against games and groups (`RunPaths.strikes`)."""
    return json.loads(path.read_text()) if path.exists() else None


def low_water(next_number: int, done: set[int], *, first: int) -> tuple[int, list[int]]:
    """(L, done numbers above it): every group below L is done. `first`: all below it are known to be."""
    low = first
    while low in done:
        low += 1
    return min(low, next_number), sorted(number for number in done if number > low)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


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
