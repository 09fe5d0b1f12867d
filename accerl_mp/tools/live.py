"""What a running run shows in shared memory: processes, board words, rings. Read only, and over as soon as the run is."""

import os
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from accerl_mp.launcher.claim import is_preparing
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import WORDS, Board
from accerl_mp.transport.health import HealthRow, HealthTable, is_alive
from accerl_mp.transport.ring import SharedRing
from accerl_mp.transport.ring_memory import RingError

SILENT_S = 10.0
"""A process whose heartbeat thread has not run for so long is shown as silent."""


@dataclass(frozen=True)
class ProcessView:
    """One process, now."""

    name: str
    pid: int
    state: str
    """As in the health table, or `dead` (its pid is gone) or `silent` (alive, without a heartbeat)."""
    waits_for: str
    waits_s: float
    tick_age_s: float
    """Since its loop moved."""
    num_restarts: int
    error: str

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class RingOfRank:
    rank: int
    num_live: int
    num_unused: int
    """Of those, not trained yet."""
    num_wanted: int
    """Unused samples that the rank waits to see; 0: it does not wait."""
    capacity: int
    fill: float
    """0 to 1, of slots or of bytes, whichever is fuller."""


@dataclass(frozen=True)
class Live:
    """One look. Without anything where the run is over, was never started, or was killed and swept."""

    processes: list[ProcessView] = field(default_factory=list)
    board: dict[str, int] = field(default_factory=dict)
    rings: list[RingOfRank] = field(default_factory=list)
    holder: str = ""
    """The process whose debugger has the terminal: all deadlines stand still."""
    is_launched: bool = False
    """launch.sh's torchrun lives: without a supervisor yet, the run starts (again)."""

    @property
    def has_weights(self) -> bool:
        """vLLM has had its first push of this start: before it, nothing is played."""
        return self.board.get("policy_version", -1) >= 0

    @property
    def is_running(self) -> bool:
        """A table that a killed run left behind has no living supervisor."""
        return any(process.role == "supervisor" and process.state != "dead" for process in self.processes)


def look(paths: RunPaths) -> Live:
    """Everything anew at each call: a run that starts again makes new files under the same names."""
    try:
        processes, holder = _processes(paths)
        with closing(Board.attach(paths.board)) as board:
            words = {name: board.get(name) for name in WORDS}
    except (FileNotFoundError, ValueError):  # ValueError: a file that is empty, or of another version
        return Live(is_launched=is_launched(paths))
    live = Live(processes, words, _rings(paths), holder)
    return live if live.is_running else replace(live, is_launched=is_launched(paths))


def is_launched(paths: RunPaths) -> bool:
    """Whether the process lives that starts the run's ranks (by its command's words), or the one that has just made the folder ready."""
    folder = os.fsencode(paths.run_dir.resolve())
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if b"accerl_mp.launcher.torchrun" in words and folder in words:
            return True
    return is_preparing(paths)


def prepares_here() -> bool:
    """Whether launch.sh, called where this process was, looks at flags or makes the demo's games: the run's folder is not known before."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if b"accerl_mp.launcher.prepare" in (folder / "cmdline").read_bytes().split(b"\0") and (folder / "cwd").samefile("."):
                return True
    return False


def _processes(paths: RunPaths) -> tuple[list[ProcessView], str]:
    with closing(HealthTable.attach(paths.health)) as table:
        views = [_view(row) for row in table.snapshot()]
        return views, next((view.name for view in views if view.pid and view.pid == table.holder), "")


def _view(row: HealthRow) -> ProcessView:
    state = _state(row.state, row.pid, row.beat_age_s)
    return ProcessView(row.name, row.pid, state, row.waits_for, row.waits_s, row.tick_age_s, row.num_restarts, row.error)


def _state(state: str, pid: int, beat_age_s: float) -> str:
    if state not in ("starting", "running", "stopping"):
        return state
    if pid and not is_alive(pid):
        return "dead"
    return "silent" if state == "running" and beat_age_s > SILENT_S else state


def _rings(paths: RunPaths) -> list[RingOfRank]:
    found: list[RingOfRank] = []
    try:
        while (path := paths.ring(len(found))).exists():
            with SharedRing.watch(path) as ring:
                found.append(RingOfRank(len(found), ring.num_live, ring.num_unused, ring.num_wanted, ring.capacity, ring.fill))
    except (FileNotFoundError, RingError):  # swept between two looks
        return found
    return found
