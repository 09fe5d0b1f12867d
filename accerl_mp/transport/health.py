"""The health table: what every process of a run does, and the one way to wait.

One file in /dev/shm with a row per process. A row's words are written by its process, except those marked
"supervisor". Times are `time.monotonic()`, which processes of one machine share. Standard library only.
"""

import itertools
import logging
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from accerl_mp.transport.board import Board, make_file, map_file
from accerl_mp.transport.errors import Closed, DeadlineExpired, PeerLost

STATES = ("none", "starting", "running", "stopping", "ended", "failed")
FAILURE_FILE = "failure.txt"
"""In the run folder, written by the supervisor before it sets the board's `failed`."""

PARENT_PID = "ACCERL_PARENT_PID"
"""Environment variable: who started this process and takes it along when it dies. Unset when started by hand."""

_FIRST_WARNING_S = 30.0
_MAGIC = 0x6163636568_0002
_ROW_BYTES = 1024
_HEADER = ("magic", "num_rows", "held_since", "held_total", "holder")
_WORDS = (
    *("pid", "state", "beat", "tick", "num_ticks", "changed"),
    *("exit_code", "num_restarts", "reached"),  # reached: collectives that a trainer rank has begun
    *("wait_sequence", "wait_since", "signalled"),  # signalled: when SIGTERM or SIGINT reached it, in whole s
    *("plays", "died_playing", "was_killed"),  # group id + 1 whose env step is made; of the last end: in whose, by somebody else's hand
)
_FLOATS = {"beat", "tick", "changed", "wait_since", "held_since", "held_total"}
_TEXTS = {"name": (128, 32), "what": (160, 256), "flag": (416, 64), "error": (480, 544)}  # offset and bytes in a row

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealthRow:
    """One process as the table shows it."""

    name: str
    pid: int
    """0: never started."""
    state: str
    beat_age_s: float
    """Since its heartbeat thread ran: alive."""
    tick_age_s: float
    """Since its loop moved."""
    num_ticks: int
    waits_for: str
    """Empty: it does not wait."""
    waits_s: float
    flag: str
    """The flag that limits the wait."""
    error: str
    changed: float
    """When it entered this state."""
    exit_code: int
    """Of its last end (supervisor)."""
    num_restarts: int
    """Supervisor."""


class HealthTable:
    """All rows. The supervisor creates and unlinks it, everybody else attaches."""

    def __init__(self, memory: mmap.mmap, path: Path | None) -> None:
        self._memory = memory
        self._ints = memoryview(memory).cast("q")
        self._doubles = memoryview(memory).cast("d")
        self.path = path

    @classmethod
    def create(cls, path: Path, names: list[str]) -> "HealthTable":
        """Make the file with a row per name. It appears under its name only once it is complete."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        make_file(temporary, _ROW_BYTES * (1 + len(names)))
        table = cls(map_file(temporary), path)
        table._fill(names)
        temporary.rename(path)
        return table

    @classmethod
    def attach(cls, path: Path) -> "HealthTable":
        """Open the table of a running run; FileNotFoundError if there is none, ValueError if it is another's."""
        memory = map_file(path)
        if len(memory) < _ROW_BYTES or len(memory) % _ROW_BYTES or (table := cls(memory, path))._header("magic") != _MAGIC:
            raise ValueError(f"{path} is no health table of this version")
        return table

    @classmethod
    def detached(cls, names: list[str]) -> "HealthTable":
        """A table of this process alone, for tests and tools."""
        table = cls(mmap.mmap(-1, _ROW_BYTES * (1 + len(names))), None)
        table._fill(names)
        return table

    @property
    def names(self) -> list[str]:
        return [self.text(row, "name") for row in range(self.num_rows)]

    @property
    def num_rows(self) -> int:
        return int(self._header("num_rows"))

    def row_of(self, name: str) -> int:
        """KeyError if the run has no such process."""
        for row in range(self.num_rows):
            if self.text(row, "name") == name:
                return row
        raise KeyError(f"no process {name!r} in {self.path}: {', '.join(self.names)}")

    def snapshot(self) -> list[HealthRow]:
        """A copy of every row, in the order of creation."""
        return [self.read(row) for row in range(self.num_rows)]

    def read(self, row: int) -> HealthRow:
        now = time.monotonic()
        what, flag, since = self._read_wait(row)
        return HealthRow(
            name=self.text(row, "name"),
            pid=int(self.word(row, "pid")),
            state=STATES[int(self.word(row, "state"))],
            beat_age_s=now - self.word(row, "beat"),
            tick_age_s=now - self.word(row, "tick"),
            num_ticks=int(self.word(row, "num_ticks")),
            waits_for=what,
            waits_s=now - since if what else 0.0,
            flag=flag,
            error=self.text(row, "error"),
            changed=self.word(row, "changed"),
            exit_code=int(self.word(row, "exit_code")),
            num_restarts=int(self.word(row, "num_restarts")),
        )

    def word(self, row: int, name: str) -> float:
        return self._get(self._word_at(row, name), name)

    def set_word(self, row: int, name: str, value: float) -> None:
        self._set(self._word_at(row, name), name, value)

    def text(self, row: int, name: str) -> str:
        offset, size = self._text_at(row, name)
        return self._memory[offset : offset + size].split(b"\0", 1)[0].decode(errors="replace")

    def set_text(self, row: int, name: str, text: str) -> None:
        """Cut to what fits."""
        offset, size = self._text_at(row, name)
        self._memory[offset : offset + size] = text.encode(errors="replace")[: size - 1].ljust(size, b"\0")

    def write_wait(self, row: int, what: str, flag: str, since: float) -> None:
        """Show what the row's process waits for; an empty `what` clears it."""
        sequence = int(self.word(row, "wait_sequence")) | 1
        self.set_word(row, "wait_sequence", sequence)  # odd: readers look again
        self.set_text(row, "what", what)
        self.set_text(row, "flag", flag)
        self.set_word(row, "wait_since", since)
        self.set_word(row, "wait_sequence", sequence + 1)

    def clock(self) -> float:
        """`time.monotonic()` without the time that a debugger held the terminal: deadlines stop meanwhile."""
        now, since = time.monotonic(), self._header("held_since")
        return now - self._header("held_total") - (now - since if since else 0.0)

    def hold(self, pid: int) -> None:
        """A debugger in `pid` has the terminal: stop everybody's deadlines. One holder at a time."""
        self._set_header("holder", pid)
        self._set_header("held_since", time.monotonic())

    def let_go(self) -> None:
        """Undo `hold`; the supervisor calls it too, if the holder died."""
        since = self._header("held_since")
        self._set_header("held_since", 0.0)
        if since:
            self._set_header("held_total", self._header("held_total") + time.monotonic() - since)
        self._set_header("holder", 0)

    @property
    def holder(self) -> int:
        """Pid of the process whose debugger has the terminal; 0: none."""
        return int(self._header("holder"))

    def dump_stacks(self, names: list[str]) -> None:
        """Make these processes write all their stacks to their logs. Only processes of the table survive SIGUSR1."""
        for row in range(self.num_rows):
            pid = int(self.word(row, "pid"))
            if pid and self.text(row, "name") in names and pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    def close(self) -> None:
        self._ints.release()
        self._doubles.release()
        self._memory.close()

    def unlink(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _fill(self, names: list[str]) -> None:
        self._set_header("num_rows", len(names))
        for row, name in enumerate(names):
            self.set_text(row, "name", name)
        self._set_header("magic", _MAGIC)

    def _read_wait(self, row: int) -> tuple[str, str, float]:
        for _ in range(100):
            before = self.word(row, "wait_sequence")
            wait = self.text(row, "what"), self.text(row, "flag"), self.word(row, "wait_since")
            if before % 2 == 0 and before == self.word(row, "wait_sequence"):
                return wait
        return "", "", 0.0  # its writer died in the middle

    def _header(self, name: str) -> float:
        return self._get(_HEADER.index(name), name)

    def _set_header(self, name: str, value: float) -> None:
        self._set(_HEADER.index(name), name, value)

    def _get(self, index: int, name: str) -> float:
        return self._doubles[index] if name in _FLOATS else self._ints[index]

    def _set(self, index: int, name: str, value: float) -> None:
        if name in _FLOATS:
            self._doubles[index] = value
        else:
            self._ints[index] = int(value)

    def _word_at(self, row: int, name: str) -> int:
        return (row + 1) * _ROW_BYTES // struct.calcsize("q") + _WORDS.index(name)

    def _text_at(self, row: int, name: str) -> tuple[int, int]:
        offset, size = _TEXTS[name]
        return (row + 1) * _ROW_BYTES + offset, size


class Health:
    """A process's own row, its stop request, and its waits. Threads and coroutines of the process share it."""

    def __init__(self, name: str, *, table: HealthTable, board: Board, run_dir: Path | None = None) -> None:
        self.name = name
        self.table, self.board, self._run_dir = table, board, run_dir
        self._row = table.row_of(name)
        self._waits: dict[int, Wait] = {}
        self._shown: Wait | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop_requested = False
        self.lost: PeerLost | None = None
        """Set by the heartbeat thread when the supervisor is gone."""

    @classmethod
    def detached(cls, name: str = "test/0", board: Board | None = None) -> "Health":
        """Without a shared table, for tests and tools."""
        return cls(name, table=HealthTable.detached([name]), board=board or Board.detached())

    @property
    def should_stop(self) -> bool:
        """SIGTERM has come, or the run ends: leave at the next good moment."""
        return self._stop_requested or self.board.get("stop") == 1 or self.board.get("failed") == 1 or self.lost is not None

    def request_stop(self) -> None:
        """This process shall end (safe in a signal handler)."""
        self._stop_requested = True

    def set_state(self, state: str) -> None:
        """One of starting running stopping ended failed."""
        self.table.set_word(self._row, "state", STATES.index(state))
        self.table.set_word(self._row, "changed", time.monotonic())

    def tick(self) -> None:
        """The process's loop has moved."""
        self.table.set_word(self._row, "tick", time.monotonic())
        self.table.set_word(self._row, "num_ticks", self.table.word(self._row, "num_ticks") + 1)

    def beat(self) -> None:
        """The process is alive (heartbeat thread)."""
        self.table.set_word(self._row, "beat", time.monotonic())

    def note_played(self, group_id: int) -> None:
        """An env step of this group begins; -1: it is over. Ingest hears of a process that ends in between."""
        self.table.set_word(self._row, "plays", group_id + 1)

    def enter(self) -> None:
        """Take the row over: pid, state `starting`, no error and no wait of a predecessor."""
        self.table.set_text(self._row, "error", "")
        self.table.write_wait(self._row, "", "", 0.0)
        self.set_state("starting")
        self.beat()
        self.tick()
        self.table.set_word(self._row, "pid", os.getpid())

    def fail(self, error: BaseException) -> None:
        """Leave the reason of this process's end for the supervisor's report."""
        self.table.set_text(self._row, "error", f"{type(error).__name__}: {error}")
        self.set_state("failed")

    def check(self) -> None:
        """Raises PeerLost if the run has failed, Closed if it ends. For long work that does not wait."""
        if self.lost is not None:
            raise self.lost
        if self.board.get("failed") == 1:
            raise PeerLost.load(self._run_dir / FAILURE_FILE) if self._run_dir else PeerLost("a process of the run", None, "")
        if self.should_stop:
            raise Closed(f"{self.name} was asked to stop")

    @contextmanager
    def waiting(self, what: str, timeout_s: float, flag: str = "", peer: str = "") -> Iterator["Wait"]:
        """Name a wait: the table shows it until the block ends. Call `check()` each time round the loop.

        waits for      whatever the block polls; `timeout_s` 0: no limit
        unblocked by   the block's own condition
        at the end     `check()` raises Closed
        a dead peer    `check()` raises PeerLost once the supervisor gives up on it; at the deadline the stacks of `peer`
                       ("ingest/0", "inference"; default: the processes that `what` names, else all) are written to their logs
        """
        wait = Wait(self, what, timeout_s=timeout_s, flag=flag, peer=peer)
        number = next(self._numbers)
        with self._lock:
            self._waits[number] = wait
            self._show_wait()
        try:
            yield wait
        finally:
            with self._lock:
                del self._waits[number]
                self._show_wait()

    def _show_wait(self) -> None:
        """The oldest wait is the one to look at."""
        oldest = next(iter(self._waits.values()), None)
        if oldest is not self._shown:
            shown = ("", "", 0.0) if oldest is None else (oldest.what, oldest.flag, oldest.since)
            self.table.write_wait(self._row, *shown)
        self._shown = oldest


class Wait:
    """One named wait; made by `Health.waiting`."""

    def __init__(self, health: Health, what: str, *, timeout_s: float, flag: str, peer: str) -> None:
        self.what, self.timeout_s, self.flag = what, timeout_s, flag
        self.since = time.monotonic()
        self._health, self._peer = health, peer
        self._start = health.table.clock()
        self._warn_at_s = _FIRST_WARNING_S

    @property
    def waited_s(self) -> float:
        """Without the time that a debugger held the terminal."""
        return self._health.table.clock() - self._start

    @property
    def remaining_s(self) -> float:
        """Until the deadline; infinite without one."""
        return self.timeout_s - self.waited_s if self.timeout_s > 0 else float("inf")

    def check(self) -> None:
        """Raises Closed if the run ends, PeerLost if it has failed, DeadlineExpired at the deadline; warns at 30 s and doubling."""
        if threading.current_thread() is threading.main_thread():
            self._health.tick()  # a loop that looks round while it waits is moving; a side thread says nothing about it
        self._health.check()
        self.warn()
        if self.remaining_s <= 0:
            self._health.table.dump_stacks(self._peers() or self._health.table.names)
            raise DeadlineExpired(self._health.name, self.what, self.waited_s, self.flag)

    def warn(self) -> None:
        """Of `check` only the words."""
        waited = self.waited_s
        if waited >= self._warn_at_s:
            self._warn_at_s *= 2
            # Starting takes minutes with a large model: who waits for that has nothing to warn of yet.
            level = logging.INFO if self._awaits_a_start() else logging.WARNING
            _log.log(level, "has waited %.0f s for %s%s", waited, self.what, f" ({self.flag})" if self.flag else "")

    def _awaits_a_start(self) -> bool:
        peers = self._peers()
        return any(row.state in ("none", "starting") for row in self._health.table.snapshot() if row.name in peers)

    def _peers(self) -> list[str]:
        names = self._health.table.names
        return [name for name in names if (name.startswith(self._peer) if self._peer else name in self.what)]


def is_alive(pid: int) -> bool:
    """False for zombies too: under a container's pid 1 a dead process can stay one."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
