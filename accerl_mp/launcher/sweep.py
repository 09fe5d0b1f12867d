"""What a run leaves outside its folder, and removing it. Standard library only."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import TextIO

from accerl_mp.topology import RunPaths


def leftovers(paths: RunPaths) -> list[Path]:
    """Files and folders of this run in /dev/shm and the temporary folder."""
    shared = sorted(paths.board.parent.glob(f"accerl-{paths.run_id}-*"))
    return shared + ([paths.sockets] if paths.sockets.exists() else [])


def sweep(paths: RunPaths) -> list[Path]:
    """Remove them; returns what there was. Only while no process of the run lives."""
    found = leftovers(paths)
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def lock(paths: RunPaths) -> TextIO | None:
    """Take the run folder's lock, which a run's supervisor holds as long as it lives; None: somebody has it."""
    file = (paths.run_dir / "lock").open("a")
    # The supervisor's children must not inherit it; Python's descriptors are closed on exec.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    os.utime(file.fileno())
    return file
