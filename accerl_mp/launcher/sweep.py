"""What a run leaves outside its folder, and removing it. Standard library only."""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

from accerl_mp.files import read_text, write_atomically
from accerl_mp.topology import RunPaths
from accerl_mp.transport.health import HealthTable
from accerl_mp.transport.shared_files import is_shared, may_be_removed, named_after, used_by

_FOREIGN = "shared.txt"
"""In the run folder: shared memory that libraries made under names of their own (vLLM: 160 MiB an engine)."""


def leftovers(paths: RunPaths) -> list[Path]:
    """Files and folders of this run in /dev/shm and the temporary folder."""
    return _split(paths)[0]


def _split(paths: RunPaths) -> tuple[list[Path], list[str]]:
    """What may be removed, and what a living process has named after itself."""
    shared = sorted(paths.board.parent.glob(f"accerl-{paths.run_id}-*"))
    foreign = {name: may_be_removed(name) for name in _foreign(paths)}
    gone = [Path(name) for name, may_go in foreign.items() if may_go]
    sockets = [paths.sockets] if paths.sockets.exists() else []
    return shared + gone + sockets, [name for name, may_go in foreign.items() if not may_go]


def sweep(paths: RunPaths) -> list[Path]:
    """Remove them; returns what there was. Only while no process of the run lives."""
    found, of_the_living = _split(paths)
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(PermissionError):  # another user's by now
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, it is a folder, or the disk is full
        if of_the_living:  # of a rank that hangs: for the next sweep
            write_atomically(paths.run_dir / _FOREIGN, "".join(f"{file}\n" for file in of_the_living))
        else:
            (paths.run_dir / _FOREIGN).unlink()
    return found


def note_foreign(paths: RunPaths, pids: list[int]) -> None:
    """Write down which shared memory these processes use beside the run's own, so that `sweep` finds it after a `kill -9`.

    OSError where the disk is full: the old list stays.
    """
    known = {file for file in _noted(paths) if os.path.isfile(file)}
    if (files := used_by(pids) | known) == known:
        return
    write_atomically(paths.run_dir / _FOREIGN, "".join(f"{file}\n" for file in sorted(files)))


def _foreign(paths: RunPaths) -> list[str]:
    names = dict.fromkeys(_noted(paths) + sorted(named_after(_pids(paths))))
    return [name for name in names if os.path.isfile(name)]


def _noted(paths: RunPaths) -> list[str]:
    """Of a damaged list only what can have been written."""
    record = paths.run_dir / _FOREIGN
    names = read_text(record, errors="replace").splitlines() if record.is_file() else []
    return [name for name in names if is_shared(name)]


def _pids(paths: RunPaths) -> list[int]:
    """Of the run's processes, trainer ranks among them, as its health table has them."""
    with contextlib.suppress(OSError, ValueError):  # gone, or of another version
        table = HealthTable.attach(paths.health)
        return [int(table.word(row, "pid")) for row in range(table.num_rows)]
    return []


def lock(paths: RunPaths, *, patience_s: float = 0.0) -> TextIO | None:
    """Take the run folder's lock, which a run's supervisor holds as long as it lives; None: somebody has it.

    waits for      who has it, at most `patience_s`: another start holds it for a moment, to see whose the folder is
    """
    deadline = time.monotonic() + patience_s
    file = (paths.run_dir / "lock").open("a")
    # The supervisor's children must not inherit it; Python's descriptors are closed on exec.
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                return None
            time.sleep(0.02)
        else:
            os.utime(file.fileno())
            return file
