"""Reading a run folder, of a run that goes on or of one that is over. Nothing here writes, and a missing part is no error."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accerl_mp.files import open_file, read_text
from accerl_mp.recovery import Start, StateError
from accerl_mp.stats.status_file import read_status
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE

DEFAULT_RUNS = Path("runs/TextWorld_FSDP")
PHASE_NAMES = {"work": "no work"}
"""Phases of `Time/<role>/<phase>` whose name alone could be taken for its opposite, as they are shown."""

Row = dict[str, Any]


class NoRunError(ValueError):
    """The folder that was named holds no run; says what it is instead."""


def find_run(folder: Path | None) -> Path:
    """The run folder that is meant: `folder` itself, or the newest run in it (default: runs/TextWorld_FSDP)."""
    where = folder or DEFAULT_RUNS
    if _is_run(where):
        return where
    runs = [path for path in where.iterdir() if _is_run(path)] if where.is_dir() else []
    if not runs and folder is None:
        raise NoRunError(f"there is no run in {where} yet: bash launch.sh starts one; or give a run folder")
    if not runs:
        raise NoRunError(f"{where}: {'holds no run (no args.json)' if where.is_dir() else 'is no folder'}; give a run folder")
    return max(runs, key=lambda path: (path / "args.json").stat().st_mtime)


def _is_run(folder: Path) -> bool:
    return (folder / "args.json").is_file()


@dataclass(frozen=True)
class Restart:
    """A process that died and was started again."""

    time: str
    """Of day, as in the supervisor's log."""
    text: str


class RunFolder:
    """The files of one run. Whole documents are read at each call; metrics only from where the last call ended."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.paths = run_dir, RunPaths(run_dir)
        self._rows: list[Row] = []
        self._read_to = 0

    def begins_at(self) -> tuple[int, int]:
        """(optimizer step, round) that the newest start goes on from: 0, 0 for one from the beginning, or whose notes are damaged."""
        try:
            saved = Start.load(self.paths.resume).saved
            return (saved.step, int(saved.content["trainer"]["round"])) if saved else (0, 0)
        except (StateError, LookupError, TypeError, ValueError):
            return 0, 0

    def flags(self) -> Row:
        """Every setting by its field name (`config.Config.to_flat`), also of another version of the package."""
        return _row(self.paths.args) or {}

    def status(self) -> Row:
        """status.json (`stats/status.py`); a damaged one counts for nothing, unsaid: `top` looks every second."""
        return read_status(self.run_dir, level=logging.DEBUG)

    def versions(self) -> Row:
        return _row(self.run_dir / "versions.json") or {}

    def command(self) -> str:
        return _text(self.run_dir / "command.txt").strip()

    def commands(self) -> list[str]:
        """One for each start of the run."""
        return [line for line in self.command().splitlines() if line.startswith("bash launch.sh")]

    def failure(self, *, since: float = 0.0) -> str:
        """Why the run failed; empty if it has not, or before `since` (`time.time()`)."""
        file = self.run_dir / FAILURE_FILE
        return str(PeerLost.load(file)) if file.exists() and file.stat().st_mtime >= since else ""

    def metrics(self) -> list[Row]:
        """Every line of metrics.jsonl so far, in the order written. A last line without its end is left for the next call."""
        try:
            with open_file(self.run_dir / "metrics.jsonl") as file:
                if file.seek(0, 2) < self._read_to:  # replaced: another run of the same folder
                    self._rows, self._read_to = [], 0
                file.seek(self._read_to)
                new, found, _ = file.read().rpartition(b"\n")
        except OSError:
            return self._rows
        if found:
            self._read_to += len(new) + 1
            self._rows += [row for line in new.split(b"\n") if isinstance(row := _parsed(line.decode(errors="replace")), dict)]
        return self._rows

    def series(self, tag: str) -> list[tuple[int, float]]:
        """(optimizer step, value) of a tag, in the order written; call `metrics()` first."""
        return [(row["step"], row[tag]) for row in self._rows if tag in row and "step" in row]

    def evaluations(self) -> list[Row]:
        """`eval/step-*.json` (`ingest/evaluation.py`), by step."""
        found = [_row(path) for path in sorted((self.run_dir / "eval").glob("step-*.json"))]
        return sorted((one for one in found if one and isinstance(one.get("step", 0), int)), key=lambda one: one.get("step", 0))

    def restarts(self) -> list[Restart]:
        """As the supervisor told them in its log."""
        lines = _text(self.paths.log("supervisor", 0)).splitlines()
        found = (re.match(r"(\d\d:\d\d:\d\d)\S* supervisor/0 WARNING? +(.*starts again.*)", line) for line in lines)
        return [Restart(match[1], match[2]) for match in found if match]

    def transcript_sizes(self) -> dict[str, int]:
        """Bytes of the files of `episodes/` (`rollout/records.py`), those of training and of evaluations each in order."""
        return {path.name: path.stat().st_size for path in sorted((self.run_dir / "episodes").glob("*.json"))}

    def transcript(self, name: str) -> Row | None:
        """With `"trained"`: the lines of the file beside it (`trainer/witness.py`). None while it is being written."""
        path = self.run_dir / "episodes" / name
        transcript, lines = _row(path), _text(path.with_suffix(".trained.jsonl")).splitlines()
        if transcript is None or not isinstance(transcript.get("turns", []), list):
            return None
        rows = [row for line in lines if isinstance(row := _parsed(line), dict)]
        return transcript | {"trained": [row for row in rows if all(isinstance(row.get(name, []), list) for name in ("turns", "logprobs"))]}


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""


def _row(path: Path) -> Row | None:
    found = _parsed(_text(path))
    return found if isinstance(found, dict) else None


def _parsed(text: str) -> Any:
    """None for what is no JSON: a file that is being written, or a line cut by a full disk."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
