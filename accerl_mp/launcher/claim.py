"""Who runs in a run folder: launch.sh's note of itself, from when the folder is made ready until it has ended. Standard library only.

The supervisor's lock (`sweep.lock`) begins seconds later and is let go between two starts of the ranks. A second start that came in
between would end in the first one's rings; the note turns it away before it has touched anything. It is read and written under
the lock only, and counts while its process lives, so nothing is left to be removed.
"""

import json
import os
from pathlib import Path

from accerl_mp.files import read_text, write_atomically
from accerl_mp.launcher.sweep import lock
from accerl_mp.topology import RunPaths

LAUNCH_PID = "ACCERL_LAUNCH_PID"
"""Environment variable: pid of launch.sh; when it is gone, the run ends."""

_LOCK_S = 10.0

Process = tuple[int, int]
"""Pid, and when it began (clock ticks since boot): another process of that pid is another."""


def taken_by_another(paths: RunPaths) -> str:
    """What keeps this launch.sh from running in the folder, with what to do; empty: nothing. Without the lock: a first look."""
    launch, prepare = _noted(paths, "launch"), _noted(paths, "prepare")
    if launch is None or launch[0] == _own_launch():
        return ""
    living = next((process for process in (launch, prepare) if process is not None and _lives(process)), None)
    if living is None:
        return ""
    return (
        f"--log-dir {paths.run_dir}: another run has this folder (launch.sh, pid {living[0]}); name another folder, "
        f"or end that run first: Ctrl+C where it runs, or kill -TERM {living[0]}"
    )


def claim(paths: RunPaths, *, is_preparing: bool) -> str:
    """Take the folder for this launch.sh (without one, for this process), which lets go by ending. Returns what keeps it from that.

    OSError where there is no room for the note.
    waits for      the folder's lock, at most 10 s: a supervisor that is about to end, or another start that looks
    """
    held = None if taken_by_another(paths) else lock(paths, patience_s=_LOCK_S)
    if held is None:
        ends = "a run goes on in this folder, or is about to end; name another folder, or wait until it has ended"
        return taken_by_another(paths) or f"--log-dir {paths.run_dir}: {ends}"
    with held:
        if taken := taken_by_another(paths):
            return taken
        own = _process(os.getpid())
        launch = _process(_own_launch()) or own
        if is_preparing or _noted(paths, "launch") != launch:  # a restart finds its own note, and the disk full, perhaps
            write_atomically(paths.claim, json.dumps({"launch": launch, "prepare": own if is_preparing else None}) + "\n")
    return ""


def is_preparing(paths: RunPaths) -> bool:
    """Whether the process lives that has made this folder ready: the ranks come next."""
    prepare = _noted(paths, "prepare")
    return prepare is not None and _lives(prepare)


def _own_launch() -> int:
    launch = os.environ.get(LAUNCH_PID, "")
    return int(launch) if launch.isdecimal() else os.getpid()


def _noted(paths: RunPaths, which: str) -> Process | None:
    """None: there is no note, or a damaged one."""
    try:
        pid, began = json.loads(read_text(paths.claim))[which]
        return (pid, began) if type(pid) is type(began) is int and pid > 0 else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _lives(process: Process) -> bool:
    return _process(process[0]) == process


def _process(pid: int) -> Process | None:
    """None: it has ended, though its parent may not have asked for its exit code yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # another user may not look (hidepid), or no process can have that number
        return None
    return None if fields[0] in (b"Z", b"X") else (pid, int(fields[19]))
