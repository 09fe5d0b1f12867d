"""The entry of every process: arguments, title, log, signals, heartbeat, and its one place that catches everything.

# accerl_mp/rollout/__main__.py
run_process("rollout", main)            # python -m accerl_mp.rollout --run-dir DIR --index 3
"""

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import setproctitle

from accerl_mp import debugging, log
from accerl_mp.config import Config
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import Closed, PeerLost
from accerl_mp.transport.health import PARENT_PID, Health, HealthTable, is_alive
from accerl_mp.transport.shared_files import named_after, remove

SPAWNER = "ACCERL_SPAWNED_BY"
"""Environment variable: pid of the process that spawns others with multiprocessing."""

_ATTACH_TIMEOUT_S = 60.0
_NO_TABLE_S = 3.0
"""A supervisor that begins after a stop was asked for makes its table within this time, or there is none: its rank left first."""
_BEAT_S = 1.0
_GRACE_S = {"failed": 10.0, "stop": 25.0, "starting": 0.5}
"""How long a process may go on after the run has failed or was asked to stop: its main thread may be stuck in a collective.

One that is still starting has nothing to save, and imports (or vLLM) can hold its main thread for longer than anybody waits."""
_CAUSE_S = 0.5
_EXIT_S = 60.0
"""Longer than rank 0 waits for the supervisor on its way out."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_log = logging.getLogger(__name__)


@dataclass
class Process:
    """What a role's `main` gets."""

    role: str
    index: int
    paths: RunPaths
    config: Config
    health: Health
    board: Board
    stacks: TextIO = sys.stderr
    """The log again, for faulthandler, which needs a file of its own."""
    reached: Callable[[], int] | None = None
    """Of a trainer rank: how many collectives it has begun. Asked by the heartbeat, since a rank that stands in one cannot say."""

    @property
    def name(self) -> str:
        """Example: "rollout/3"."""
        return f"{self.role}/{self.index}"


def run_process(
    role: str,
    main: Callable[[Process], None],
    argv: list[str] | None = None,
    *,
    leave: Callable[[int], NoReturn] = os._exit,
) -> NoReturn:
    """Run `main` as a process of the run in `--run-dir`, and exit: 0 at a normal end (return or Closed), 1 otherwise.

    waits for      the supervisor's health table and board, at most 60 s
    at the end     SIGTERM, SIGINT or the board make the next `wait.check()` raise Closed; who is still starting leaves within
                   2 s, whatever its main thread does, by `leave` (called with the exit code on the heartbeat's thread)
    a dead parent  takes this process along (SIGKILL); a dead supervisor ends it within 10 s
    """
    keep_freed_memory()
    try:
        process = _open(role, argv)
    except Closed as end:
        _log.info("ends: %s", end)
        leave(0)
    stop_beating = threading.Event()
    heart = threading.Thread(target=_beat, args=(process, stop_beating, leave), name="heartbeat", daemon=True)
    heart.start()
    code = _run(process, main)
    stop_beating.set()
    heart.join()
    # A library's thread may never end, and the interpreter waits for it.
    guard = threading.Timer(_EXIT_S, os._exit, [code])
    guard.daemon = True
    guard.start()
    logging.shutdown()
    sys.exit(code)


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's own end; what was printed is flushed, `atexit` does not run. For trainer ranks.

    Python 3.11 unwinds a thread that asks for the GIL while the interpreter ends. Out of gloo's C++ that is a call of terminate()
    (seen once in some hundred runs: SIGABRT just after a rank's last collective). What torch and CUDA would take away then goes here.
    """
    with contextlib.suppress(OSError):
        remove(named_after([os.getpid()]))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, which is no failure of the rank
            stream.flush()
    os._exit(code)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next sample instead of giving it back to the system.

    By default a block over 128 KiB is mapped and unmapped each time and the heap's end is cut, which costs a page fault a page:
    encoding a sample of 8,000 tokens (200 KB) took 106 us instead of 57, putting it into a ring 164 instead of 105.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends. Exits at once if `parent_pid` is gone already.

    Not inherited: each process calls it for itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_spawner() -> None:
    """As `die_with_parent`, in a process that `spawns` has announced: also where the parent died before this one had come so far.

    multiprocessing does not tell a spawned process whose child it is. Called by each for itself, it covers their own children too.
    """
    parent = os.environ.get(SPAWNER, "")
    die_with_parent(int(parent) if parent.isdecimal() else None)
    spawns()


def spawns() -> None:
    """From here on this process's children are spawned processes that call `die_with_spawner`."""
    os.environ[SPAWNER] = str(os.getpid())


def _open(role: str, argv: list[str] | None) -> Process:
    parser = argparse.ArgumentParser(f"accerl_mp.{role}")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    args = parser.parse_args(argv)
    if parent := os.environ.get(PARENT_PID):
        die_with_parent(int(parent))
    name, paths = f"{role}/{args.index}", RunPaths(args.run_dir)
    setproctitle.setproctitle(f"accerl {name}")
    config = Config.load(paths.args)
    log.setup(paths, role, args.index, config.metrics.log_level)
    stacks = _dump_stacks_on_usr1(paths.log(role, args.index))
    health = _attach(paths, name)
    row = health.table.row_of(name)
    health.table.set_word(row, "signalled", 0)

    def on_signal(_number: int, _frame: object) -> None:
        health.table.set_word(row, "signalled", int(health.table.clock()))  # of a rank: the supervisor makes it a stop of the run
        health.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    health.enter()
    debugging.install(name, args.run_dir, hold=health.table.hold, let_go=health.table.let_go)
    return Process(role, args.index, paths, config, health, health.board, stacks)


def _attach(paths: RunPaths, name: str) -> Health:
    """The supervisor makes both files before it starts a role, but trainer ranks start beside it.

    waits for      a table whose supervisor lives (a killed run leaves its own behind), at most 60 s
    at the end     DIR/stop: Closed, if no table comes within 3 s more
    """
    deadline, asked_since = time.monotonic() + _ATTACH_TIMEOUT_S, None
    while True:
        try:
            table = HealthTable.attach(paths.health)
        except FileNotFoundError:
            table = None
        if table is not None and not _has_lost_supervisor(table):
            # The board is made before the table, so this is the same run's.
            return Health(name, table=table, board=Board.attach(paths.board), run_dir=paths.run_dir)
        now = time.monotonic()
        if paths.stop.exists():
            asked_since = asked_since or now
            if now - asked_since > _NO_TABLE_S:
                raise Closed(f"{name} was asked to stop before it had begun")
        if now > deadline:
            raise PeerLost("supervisor/0", None, str(paths.log("supervisor", 0)), f"{paths.health} never appeared")
        time.sleep(0.05)


def _dump_stacks_on_usr1(log_file: Path) -> TextIO:
    """Returns the file that must stay open: faulthandler keeps its bare descriptor."""
    file = log_file.open("a")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return file


def _run(process: Process, main: Callable[[Process], None]) -> int:
    health = process.health
    try:
        health.check()  # asked to stop before it began
        debugging.call(process.name, main, process)
    except Closed as end:
        _log.info("ends: %s", end or "closed")
    except PeerLost as lost:
        # The cascade, not the cause: the supervisor reports that.
        _log.info("ends: %s", lost)
        health.set_state("ended")
        return 1
    except Exception as error:
        if lost := _cause(health):
            _log.info("ends: %s; then: %s: %s", lost, type(error).__name__, error, exc_info=True)
            health.set_state("ended")
            return 1
        if health.should_stop and _is_starting(process):
            # A peer that was starting too has left first: nothing was learned yet, so nothing is lost.
            _log.info("ends: it was asked to stop; then: %s: %s", type(error).__name__, error, exc_info=True)
            health.set_state("ended")
            return 0
        _log.exception("failed: %s: %s", type(error).__name__, error)
        health.fail(error)
        return 1
    health.set_state("ended")
    return 0


def _cause(health: Health) -> PeerLost | None:
    """An earlier failure that explains this process's error: a collective breaks a moment before the supervisor sees who died.

    waits for      the board's `failed`, at most half a second
    """
    deadline = time.monotonic() + _CAUSE_S
    while time.monotonic() < deadline:
        try:
            health.check()
        except PeerLost as lost:
            return lost
        except Closed:
            return None
        time.sleep(0.02)
    return None


def _beat(process: Process, stop: threading.Event, leave: Callable[[int], NoReturn]) -> None:
    """Show that this process lives, and end it if its main thread does not leave in time when the run is over."""
    health, over_since = process.health, None
    row = health.table.row_of(process.name)
    while not stop.wait(_BEAT_S):
        health.beat()
        if process.reached is not None:
            health.table.set_word(row, "reached", process.reached())
        # One that has asked everybody to leave may go first: it does not wait for what a person has started.
        if health.lost is None and not health.board.get("stop") and _has_lost_supervisor(health.table):
            health.lost = PeerLost("supervisor/0", None, str(process.paths.log("supervisor", 0)), "it died without a word")
        if (grace_s := _grace_s(process)) is None:
            continue
        now = health.table.clock()
        over_since = over_since or now
        if now - over_since <= grace_s:
            continue
        if grace_s == _GRACE_S["starting"]:
            _log.info("was asked to stop while it started: leaves")
            health.set_state("ended")
            leave(0)
        else:
            _log.warning("did not leave within %.0f s of the run's end: exits hard", grace_s)
            faulthandler.dump_traceback(process.stacks, all_threads=True)
            os._exit(1)


def _has_lost_supervisor(table: HealthTable) -> bool:
    if "supervisor/0" not in table.names:
        return False
    pid = int(table.word(table.row_of("supervisor/0"), "pid"))
    return pid != 0 and not is_alive(pid)


def _is_starting(process: Process) -> bool:
    table = process.health.table
    return table.read(table.row_of(process.name)).state == "starting"


def _grace_s(process: Process) -> float | None:
    health = process.health
    if health.lost is not None or health.board.get("failed"):
        return _GRACE_S["failed"]
    if health.should_stop and _is_starting(process):
        return _GRACE_S["starting"]
    return _GRACE_S["stop"] if health.board.get("stop") else None
