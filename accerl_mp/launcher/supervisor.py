"""The supervisor: starts inference, ingest, stats and rollout, starts them again when they die, and ends everything.

Forked by trainer rank 0 before it imports anything heavy. Standard library only, one thread: the kernel's parent-death
signal is tied to the thread that started a child.
"""

import contextlib
import faulthandler
import logging
import os
import select
import shlex
import signal
import sys
import time
from pathlib import Path

from accerl_mp import log
from accerl_mp.config import Config
from accerl_mp.launcher import children
from accerl_mp.launcher.causes import describe, first_failure, last_lines, note, without_disk
from accerl_mp.launcher.children import Child
from accerl_mp.launcher.claim import LAUNCH_PID
from accerl_mp.launcher.environment import gpu_plan
from accerl_mp.launcher.leaving import End, end_by_ranks, none_was_cut_short, ranks_of, still_there, who_has_left, who_was_signalled
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.roles import Role, build_roles, table_names
from accerl_mp.launcher.status_line import StatusLine
from accerl_mp.launcher.sweep import lock, note_foreign, sweep
from accerl_mp.launcher.watchdog import Stall, Watchdog, dump_and_kill
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import EXIT_GAME_HUNG, NOT_TRIED_AGAIN, PeerLost
from accerl_mp.transport.health import FAILURE_FILE, PARENT_PID, STATES, Health, HealthRow, HealthTable, is_alive
from accerl_mp.transport.shared_files import descendants

BY_HAND = "ACCERL_BY_HAND"
"""Environment variable: names of processes that a person starts, separated by commas. They are not started again either."""

_TURN_S = 0.2
_LOCK_S = 5.0
_AT_ONCE_S = 5.0
"""A process that dies this early, or before it reached `running`, died at once."""
_MAX_DEATHS_AT_ONCE = 3
_MAX_BACK_OFF_S = 10.0
_ORPHAN_SCAN_S = 5.0
_FOREIGN_S = 1.0
"""So often while vLLM starts: it makes its shared memory long before it is ready."""
_RANKS_LEAVE_S = 25.0
_SAID_AFTER_S = 2.0
_FAST_STOP_S = 3.0

_log = logging.getLogger(__name__)


def fork_supervisor(run_dir: Path, roles: list[Role] | None = None) -> int:
    """Returns the supervisor's pid in the caller; in the child it exits with the run's end. `roles`: instead of a run's own."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # torchrun signals rank 0's whole process group when another rank dies
    paths = RunPaths(run_dir)
    config = Config.load(paths.args)
    if roles is None:
        roles = build_roles(config, paths, gpu_plan(config))
    # After the fork, in the child alone: the one import beyond the standard library.
    from setproctitle import setproctitle

    setproctitle("accerl supervisor")
    sys.exit(Supervisor(paths, config, roles, parent_pid=parent_pid).run())


class Supervisor:
    """Owns every process of the run but the ranks, the health table, the board, and all that must be unlinked.

    waits for      the trainer's `finished`, DIR/stop, SIGTERM, or a failure that restarts cannot mend
    at the end     ends the roles in order, kills what they left behind, unlinks everything
    a dead parent  (rank 0) ends the run likewise; launch.sh's death counts as DIR/stop
    """

    def __init__(self, paths: RunPaths, config: Config, roles: list[Role], *, parent_pid: int) -> None:
        self._paths, self._config, self._parent_pid = paths, config, parent_pid
        self._roles = roles
        self._children = [Child(role, index) for role in roles for index in range(role.count)]
        self._restarts = dict.fromkeys((role.name for role in roles), 0)
        self._stop_asked = ""
        self._step_before = Reached.load(paths.reached).step_before
        self._orphans_until = self._foreign_due = 0.0
        launcher = os.environ.get(LAUNCH_PID)
        self._launcher_pid = int(launcher) if launcher else None

    def run(self) -> int:
        """Returns the exit code: 0 if the run finished or was stopped and what it has learned is saved, else 1."""
        children.become_subreaper(self._parent_pid)
        self._wakeup = children.wake_on_signals(self._on_signal)
        self._redirect()
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)  # it is in the health table, so it gets SIGUSR1
        log.setup(self._paths, "supervisor", 0, self._config.metrics.log_level)
        self._lock = lock(self._paths, patience_s=_LOCK_S)
        if self._lock is None:
            _log.error("another run has %s", self._paths.run_dir)
            return 1
        self._open()
        end = End("failed", PeerLost("supervisor/0", None, str(self._paths.log("supervisor", 0)), "see its log"))
        try:
            end = self._watch()
        finally:
            self._status_line.clear()
            self._end(end)
        return 1 if end.reason in ("failed", "orphaned") or not Reached.of(self._board).is_saved else 0

    def _redirect(self) -> None:
        """Away from torchrun's output: a bare traceback of the supervisor belongs in its log."""
        log.keep_terminal()
        path = self._paths.log("supervisor", 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _open(self) -> None:
        if left := sweep(self._paths):
            _log.info("removed what an earlier run of this folder left: %s", ", ".join(map(str, left)))
        self._paths.sockets.mkdir(mode=0o700)
        self._paths.ended.unlink(missing_ok=True)
        with without_disk("a failure may go without its name"):
            PeerLost.clear(self._paths.run_dir / FAILURE_FILE)
        with without_disk("the summary may count steps too few"):
            Reached(step_before=self._step_before).save(self._paths.reached)
        self._board = Board.create(self._paths.board)
        self._table = HealthTable.create(self._paths.health, table_names(self._config, self._roles))
        self._health = Health("supervisor/0", table=self._table, board=self._board)
        self._health.enter()
        self._status_line = StatusLine(self._table, self._board, begun=self._paths.begun())
        self._watchdog = Watchdog(self._table, self._config, note)
        _log.info("starts %s", ", ".join(f"{role.count} {role.name}" for role in reversed(self._roles)))
        for child in reversed(self._children):
            if child.name in os.environ.get(BY_HAND, "").split(","):
                module, folder = f"accerl_mp.{child.role.name}", shlex.quote(str(self._paths.run_dir))
                _log.info("%s is yours to start: python -m %s --run-dir %s --index %d", child.name, module, folder, child.index)
            else:
                self._start(child)
        self._health.set_state("running")

    def _watch(self) -> End:
        """One turn every 0.2 s, or at once on a signal, until the run is to end."""
        while True:
            for pid, exit_code in children.reap().items():
                self._orphans_until = time.monotonic() + _ORPHAN_SCAN_S
                if (child := self._child_of(pid)) and (end := self._on_death(child, exit_code)):
                    return end
            if end := self._look_around() or self._end_stuck():
                return end
            self._look_at_children()
            self._status_line.show()
            self._sleep()

    def _look_around(self) -> End | None:
        """Whether somebody outside the roles ends the run."""
        was_signalled = who_was_signalled(self._table)  # first: torchrun sends a signal after a death, which is seen below then
        ranks = ranks_of(self._table)
        if lost := first_failure(ranks, self._paths):
            return End("failed", lost)
        if os.getppid() != self._parent_pid:
            return End("orphaned", detail="trainer/0 is gone")
        if self._board.get("finished"):
            return End("finished")
        if self._paths.stop.exists():
            return End("stopped", detail="it was asked to stop")
        if self._launcher_pid is not None and not is_alive(self._launcher_pid):
            return End("stopped", detail="launch.sh is gone")
        if self._stop_asked:
            return End("stopped", detail=f"the supervisor got {self._stop_asked}")
        return end_by_ranks(self._table, self._paths, was_signalled=was_signalled, rank_0=self._parent_pid)

    def _look_at_children(self) -> None:
        """Starts that are due, state `starting` that lasts too long, orphans, a debugger that died."""
        now = time.monotonic()
        for child in self._children:
            if child.start_at is not None and now >= child.start_at:
                self._start(child)
            elif child.pid:
                self._look_at_start(child, now)
        if now < self._orphans_until:
            children.kill_orphans(self._pids(), trackers_too=False)
        if self._table.holder and not is_alive(self._table.holder):
            self._table.let_go()
        self._health.beat()
        self._health.tick()

    def _end_stuck(self) -> End | None:
        """Processes that live but stand still: a role's is killed, to be started again; a rank's ends the run."""
        stalls = self._watchdog.look(time.monotonic())
        if ranks := [stall for stall in stalls if stall.name.startswith("trainer/")]:
            guilty = self._watchdog.blame(ranks)
            dump_and_kill(self._table, guilty, [row.name for row in self._table.snapshot()], _TURN_S)
            return End("failed", self._lost(guilty.name, None, str(guilty)))
        for stall in stalls:
            if child := self._child_of(stall.pid):
                self._end_stuck_child(child, stall)
        return None

    def _end_stuck_child(self, child: Child, stall: Stall) -> None:
        _log.error("%s %s: ends it", child.name, stall)
        child.verdict = f"it {stall}"
        dump_and_kill(self._table, stall, [child.name], _TURN_S)

    def _look_at_start(self, child: Child, now: float) -> None:
        row = self._row(child)
        if child.was_running or child.verdict:  # or it is ended already, and a disk holds it
            return
        has_entered = row.pid == child.pid
        child.was_running = has_entered and row.state == "running"
        if child.was_running:
            with without_disk("a `kill -9` of everything would leave vLLM's shared memory behind"):
                note_foreign(self._paths, descendants())
        elif child.role.name == "inference" and now >= self._foreign_due:
            self._foreign_due = now + _FOREIGN_S
            with contextlib.suppress(OSError):  # said once it runs
                note_foreign(self._paths, [child.pid, *descendants(child.pid)])
        if (row.state == "starting" or not has_entered) and self._table.clock() - child.started > child.role.start_timeout_s:
            flag = f" ({child.role.start_flag})" if child.role.start_flag else ""
            child.verdict = f"it was not ready after {child.role.start_timeout_s:.0f} s{flag}"
            _log.error("%s is not ready after %.0f s%s: ends it", child.name, child.role.start_timeout_s, flag)
            if has_entered:  # before, the signal for its stacks would end it without a word
                self._table.dump_stacks([child.name])
                time.sleep(_TURN_S)  # they are written by then
            child.kill()

    def _start(self, child: Child) -> None:
        child.start(self._paths, terminal_fd=log.terminal_fd(), parent_variable=PARENT_PID, now=self._table.clock())
        _log.debug("started %s, pid %d", child.name, child.pid)

    def _on_death(self, child: Child, exit_code: int) -> End | None:
        """Plan its restart, or give up: died at once three times in a row, or the role's restarts are used up."""
        row = self._row(child)
        reached_running = child.was_running or (row.pid == child.pid and row.state == "running")
        at_once = not reached_running or self._table.clock() - child.started < _AT_ONCE_S
        self._bury(child, exit_code)
        child.num_deaths_at_once = child.num_deaths_at_once + 1 if at_once else 0
        index = self._table.row_of(child.name)
        lost = self._lost(child.name, exit_code, child.verdict or row.error or describe(exit_code))
        took_it_along = self._table.word(index, "died_playing") and not self._table.word(index, "was_killed")
        if exit_code == EXIT_GAME_HUNG or (took_it_along and not child.verdict):
            # Ingest counts it against the game, which it sets aside after three.
            child.num_deaths_at_once, child.start_at = 0, time.monotonic()
            _log.warning("%s, starts again (the game's fault: no restart is used up)", lost)
            return None
        if row.error.partition(":")[0] in NOT_TRIED_AGAIN:
            return End("failed", lost)
        used, most = self._restarts[child.role.name], self._config.metrics.max_restarts
        if child.num_deaths_at_once >= _MAX_DEATHS_AT_ONCE:
            lost.detail = f"it died at once {child.num_deaths_at_once} times in a row: {lost.detail}"
            return End("failed", lost)
        if used >= most:
            lost.detail = f"--max-restarts {most} is used up: {lost.detail}"
            return End("failed", lost)
        self._restarts[child.role.name] += 1
        self._table.set_word(index, "num_restarts", self._table.word(index, "num_restarts") + 1)
        back_off_s = min(_MAX_BACK_OFF_S, 0.5 * 2**child.num_deaths_at_once)
        child.start_at = time.monotonic() + back_off_s
        _log.warning("%s, starts again in %.1f s (restart %d of %d)", lost, back_off_s, used + 1, most)
        return None

    def _bury(self, child: Child, exit_code: int) -> None:
        """It has been reaped: its row is ours until its successor enters it, and no signal may go to its pid any more."""
        child.ended(exit_code)
        row = self._table.row_of(child.name)
        self._table.set_word(row, "exit_code", exit_code)
        self._table.set_word(row, "was_killed", int(child.was_killed(exit_code, was_signalled=self._table.word(row, "signalled") > 0)))
        self._table.set_word(row, "died_playing", self._table.word(row, "plays"))
        self._table.set_word(row, "plays", 0)
        self._table.set_word(row, "pid", 0)
        if self._table.read(row).state not in ("ended", "failed"):
            self._table.set_word(row, "state", STATES.index("failed" if exit_code else "ended"))
            self._table.set_word(row, "changed", time.monotonic())

    def _end(self, end: End) -> None:
        """Tell everybody, end the roles in order, kill what they left, wait for the ranks, unlink."""
        start = time.monotonic()
        self._health.set_state("stopping")
        for child in self._children:
            child.start_at = None
        if end.lost is not None:
            self._report(end.lost)
        elif end.reason in ("stopped", "orphaned"):
            _log.info("ends the run: %s", end.detail)
            if end.reason == "stopped":
                self._board.set("asked_to_end", 1)
                with without_disk("who looks for DIR/stop does not see that the run was asked to end"):
                    self._paths.stop.touch()
            self._board.set("stop", 1)
        fast = end.reason in ("failed", "orphaned")
        for role in self._roles:
            self._stop(role, timeout_s=min(role.stop_timeout_s, _FAST_STOP_S) if fast else role.stop_timeout_s)
        self._kill_orphans()
        has_left = end.reason in ("finished", "stopped") and self._wait_for_ranks()
        reached = Reached.of(self._board, step_before=self._step_before)
        with without_disk("the summary may count steps too few"):
            reached.save(self._paths.reached)
        if has_left and reached.is_saved:
            with without_disk("if torchrun was sent a signal, the run counts as broken off"):
                self._paths.ended.touch()
        if not fast:
            self._board.set("stop", 1)  # what a person has started got no signal
        sweep(self._paths)
        _log.info("%s; %s ended within %.1f s", end.reason, who_has_left(self._table), time.monotonic() - start)
        self._health.set_state("failed" if fast else "ended")

    def _report(self, lost: PeerLost) -> None:
        """The first failure, with its last log lines; what breaks because of it comes later and is not shown."""
        with without_disk("processes will not know why the run ends"):
            lost.save(self._paths.run_dir / FAILURE_FILE)
        self._board.set("failed", 1)
        _log.error("the run ends: %s", lost)
        for line in last_lines(Path(lost.log_file)):
            log.terminal_line(f"    {line}")

    def _stop(self, role: Role, *, timeout_s: float) -> None:
        """Ask all processes of a role, wait, kill the rest.

        waits for      their ends, at most `timeout_s`, then kills and waits 5 s more
        """
        alive = [child for child in self._children if child.role is role and child.pid]
        for child in alive:
            child.ask()
        if not self._wait_ended(alive, timeout_s):
            for child in alive:
                if child.pid:
                    level = logging.INFO if self._board.get("failed") else logging.WARNING
                    _log.log(level, "%s did not stop within %.0f s: killed", child.name, timeout_s)
                    child.kill()
            self._wait_ended(alive, 5.0)

    def _wait_ended(self, alive: list[Child], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            for pid, exit_code in children.reap().items():
                if child := self._child_of(pid):
                    self._bury(child, exit_code)
            if not any(child.pid for child in alive):
                return True
            if time.monotonic() > deadline:
                return False
            self._health.beat()
            self._sleep()

    def _kill_orphans(self) -> None:
        start = time.monotonic()
        while children.kill_orphans(self._pids(), trackers_too=time.monotonic() - start > 3.0):
            children.reap()
            if time.monotonic() - start > 6.0:
                _log.error("orphans are left that SIGKILL does not end")
                return
            time.sleep(0.05)
        children.reap()

    def _wait_for_ranks(self) -> bool:
        """The table must stay until they have left, since they wait with it. Whether none of them was cut short.

        waits for      all ranks, at most 25 s (10 s for one that never came to the table)
        a dead parent  (rank 0) ends the wait: torchrun takes the others along
        """
        start, say_after_s = time.monotonic(), _SAID_AFTER_S
        while names := still_there(self._table, rank_0=self._parent_pid, waited_s=(waited_s := time.monotonic() - start)):
            if os.getppid() != self._parent_pid:
                break
            if waited_s > _RANKS_LEAVE_S:
                _log.warning("%s did not leave within %.0f s", ", ".join(names), _RANKS_LEAVE_S)
                return False
            if waited_s > say_after_s:
                say_after_s = _RANKS_LEAVE_S
                _log.info("waits for %s to leave", ", ".join(names))
            self._health.beat()
            self._sleep()
        return none_was_cut_short(self._table)

    def _sleep(self) -> None:
        """Until a signal comes (a child died, SIGTERM), at most one turn."""
        if select.select([self._wakeup], [], [], _TURN_S)[0]:
            os.read(self._wakeup, 4096)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stop_asked = signal.Signals(number).name

    def _row(self, child: Child) -> HealthRow:
        return self._table.read(self._table.row_of(child.name))

    def _child_of(self, pid: int) -> Child | None:
        return next((child for child in self._children if child.pid == pid), None)

    def _pids(self) -> set[int]:
        return {child.pid for child in self._children if child.pid}

    def _lost(self, name: str, exit_code: int | None, detail: str) -> PeerLost:
        role, _, index = name.partition("/")
        return PeerLost(name, exit_code, str(self._paths.log(role, int(index))), detail)
