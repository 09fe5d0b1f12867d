"""Finds processes that live but stand still: no heartbeat (stopped, or stuck outside of Python), or a loop that does not move.

Standard library only; the supervisor looks once a turn.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.transport.health import HealthRow, HealthTable

_HANG_FLAG, _STEP_FLAG = "--hang-timeout-s", "--step-timeout-s"
_UNSEEN_S = 5.0
"""A heartbeat that is late by this much is noted in the supervisor's log."""
_LONGEST_TURN_S = 1.0
"""What a turn of the supervisor counts at most: if it took longer, the machine was starved or suspended, and everybody with it."""


@dataclass(frozen=True)
class Stall:
    """A process that stands still."""

    name: str
    pid: int
    mark: str
    """"heartbeat" or "loop"."""
    silent_s: float
    flag: str
    waits_for: str = ""
    is_stopped: bool = False
    """By SIGSTOP or Ctrl+Z."""
    is_behind: bool = False
    """A trainer rank that has begun fewer collectives than another one, which waits for it in there."""

    def __str__(self) -> str:
        how = "has had no heartbeat" if self.mark == "heartbeat" else "has not moved"
        why = ", it is stopped (SIGSTOP)" if self.is_stopped else f" while it waited for {self.waits_for}" if self.waits_for else ""
        if self.is_behind:
            why += ", and has not begun the collective in which another rank waits for it"
        return f"{how} for {self.silent_s:.0f} s{why} ({self.flag}); its stacks, if it could write them, are in its log"


@dataclass(slots=True)
class _Seen:
    """The last value of a mark, and when on the watchdog's clock it was new."""

    value: tuple[int, str, float]
    at: float


class Watchdog:
    """Its clock counts the supervisor's own turns, each up to a second, and stands while a debugger has the terminal.

    So neither a laptop's lid, nor a frozen container, nor a machine that gives nobody a turn makes it call a process stuck.
    `note` gets what should be in the log but is no reason to act.
    """

    def __init__(self, table: HealthTable, config: Config, note: Callable[[str], None], *, now: float | None = None) -> None:
        self._table, self._note = table, note
        metrics = config.metrics
        # A step of a game has a limit of its own, which ends the process and names the game.
        self._hang_s = metrics.hang_timeout_s
        self._rollout_s = max(self._hang_s, 2 * config.games.env_step_timeout_s) if self._hang_s else 0.0
        self._step_s = metrics.step_timeout_s
        self._last = time.monotonic() if now is None else now
        self._clock = 0.0
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._late: set[str] = set()

    def look(self, now: float) -> list[Stall]:
        """Every process that stands still, the one that has done so longest first."""
        turn_s, self._last = now - self._last, now
        if not self._table.holder:
            self._clock += min(turn_s, _LONGEST_TURN_S)
        found = []
        for index in range(self._table.num_rows):
            row = self._table.read(index)
            if row.pid and row.name != "supervisor/0":
                found += self._look_at(index, row)
        return sorted(found, key=lambda stall: -stall.silent_s)

    def blame(self, stalls: list[Stall]) -> Stall:
        """Of trainer ranks of which some stand still (`stalls`, not empty) the one that keeps the others waiting.

        That is one without a heartbeat; else one that is behind: in a step the ranks say nothing, and the one that waits in a collective
        may have stood still for longer than the one that never came to it; else one that waits for nobody.
        """
        if silent := [stall for stall in stalls if stall.mark == "heartbeat"]:
            return silent[0]
        rows = {index: row for index in range(self._table.num_rows) if (row := self._table.read(index)).name.startswith("trainer/")}
        reached = {row.name: self._table.word(index, "reached") for index, row in rows.items() if row.pid}
        behind = [row for row in rows.values() if reached.get(row.name) == min(reached.values())]
        if len(behind) == len(reached):
            return next((stall for stall in stalls if not stall.waits_for), stalls[0])
        row = next((row for row in behind if row.name in {stall.name for stall in stalls}), behind[0])
        silent_s = self._silent_s(row, "loop", row.num_ticks)
        return Stall(row.name, row.pid, "loop", silent_s, _STEP_FLAG, row.waits_for, is_behind=True)

    def _look_at(self, index: int, row: HealthRow) -> list[Stall]:
        is_rank, state = row.name.startswith("trainer/"), row.state
        loop_s = self._step_s if is_rank else self._rollout_s if row.name.startswith("rollout/") else self._hang_s
        beat_silent_s = self._silent_s(row, "heartbeat", self._table.word(index, "beat"))
        loop_silent_s = self._silent_s(row, "loop", row.num_ticks)
        self._note_late(row, beat_silent_s)
        if state == "running" and self._hang_s and beat_silent_s > self._hang_s:
            return self._stall(row, "heartbeat", beat_silent_s, _HANG_FLAG)
        # A rank that starts is watched too (it waits in named waits, which move); a role that starts has `start_timeout_s`.
        is_watched = state == "running" or (is_rank and state == "starting")
        if is_watched and loop_s and loop_silent_s > loop_s:
            return self._stall(row, "loop", loop_silent_s, _STEP_FLAG if is_rank else _HANG_FLAG)
        return []

    def _silent_s(self, row: HealthRow, mark: str, value: float) -> float:
        seen = self._seen.get((row.name, mark))
        current = (row.pid, row.state, value)  # another state is another life of the mark: nobody ticks while it starts
        if seen is None or seen.value != current:
            self._seen[row.name, mark] = _Seen(current, self._clock)
            return 0.0
        return self._clock - seen.at

    def _stall(self, row: HealthRow, mark: str, silent_s: float, flag: str) -> list[Stall]:
        letter = process_state(row.pid)
        if letter == "t":  # gdb or strace has it
            return []
        return [Stall(row.name, row.pid, mark, silent_s, flag, row.waits_for, is_stopped=letter == "T")]

    def _note_late(self, row: HealthRow, silent_s: float) -> None:
        if silent_s <= _UNSEEN_S:
            self._late.discard(row.name)
        elif row.name not in self._late and row.state == "running":
            self._late.add(row.name)
            self._note(f"{row.name} has had no heartbeat for {silent_s:.0f} s")


def dump_and_kill(table: HealthTable, stall: Stall, names: list[str], pause_s: float) -> None:
    """The stacks of `names` into their logs, then an end to the one that stands still."""
    table.dump_stacks(names)
    time.sleep(pause_s)  # they are written by then
    try:
        os.kill(stall.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def process_state(pid: int) -> str:
    """The kernel's letter: R, S, D, Z, T (stopped), t (traced); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
