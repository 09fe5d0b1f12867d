"""What lies in a run folder where something else belongs: said before anything starts, since a FIFO holds who opens it for ever.

Standard library only.
"""

import stat
from collections.abc import Iterator
from pathlib import Path

from accerl_mp.topology import RunPaths

_FOLDERS = ("logs", "resume", "episodes", "eval", "checkpoints", "samples", "tokenizer")
_FILES = ("lock", "command.txt", "versions.json", "stop", "ended", "status.json", "metrics.jsonl", "strikes.json", "failure.txt")
_MORE_FILES = (".failure.txt", "shared.txt", "books.json", "tty", "debugger.pid", "args.json", "claim.json", "games.json", "reached.json")
_FILES_OF_RESUME = ("current", "announced", "start.json")


def misplaced(paths: RunPaths) -> Iterator[str]:
    """A sentence for each entry of the folder, of its logs and of its `resume`, that is not what a run has there."""
    for folder, files, folders in (
        (paths.run_dir, (*_FILES, *_MORE_FILES), _FOLDERS),
        (paths.run_dir / "logs", (), ()),
        (paths.resume, _FILES_OF_RESUME, ()),
    ):
        for entry in _entries(folder):
            if wrong := _wrong(entry, is_file=entry.name in files or entry.suffix == ".log", is_folder=entry.name in folders):
                yield f"--log-dir {paths.run_dir}: {entry} {wrong}; move it away, or name another folder"


def _entries(folder: Path) -> list[Path]:
    """None where this user may not look: `checks` says so."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _wrong(entry: Path, *, is_file: bool, is_folder: bool) -> str:
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link that leads nowhere, or it has gone
        return "is a link that leads nowhere" if entry.is_symlink() and (is_file or is_folder) else ""
    if stat.S_ISDIR(mode):
        return "is a folder, where a file belongs" if is_file else ""
    if not stat.S_ISREG(mode):
        return "is no regular file (a FIFO, socket or device)"
    return "is a file, where a folder belongs" if is_folder else ""
