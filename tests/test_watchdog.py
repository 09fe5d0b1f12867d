"""The watchdog's judgement on a table of its own, with a clock of the test's: what stands still, and what only seems to."""

import os
import subprocess
import threading
import time

import pytest

from accerl_mp.config import Config
from accerl_mp.launcher.watchdog import Stall, Watchdog, process_state
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import STATES, Health, HealthTable

NAMES = ["supervisor/0", "trainer/0", "trainer/1", "rollout/0", "inference/0", "ingest/0", "stats/0"]


class Scene:
    """Processes that beat and tick with every turn of the supervisor, unless a test says otherwise."""

    def __init__(self, **flags: float) -> None:
        self.table = HealthTable.detached(NAMES)
        self.notes: list[str] = []
        self.now = 100.0
        self.config = Config.from_flat({"hang_timeout_s": 10.0, "step_timeout_s": 40.0, "env_step_timeout_s": 8.0} | flags)
        self.watchdog = Watchdog(self.table, self.config, self.notes.append, now=self.now)
        self.ticks = 0
        for name in NAMES:
            self.set(name, "running", pid=os.getpid())

    def set(self, name: str, state: str, *, pid: int) -> None:
        row = self.table.row_of(name)
        self.table.set_word(row, "state", STATES.index(state))
        self.table.set_word(row, "pid", pid)

    def pass_time(
        self, seconds: float, *, turn_s: float = 0.2, no_beat: tuple[str, ...] = (), no_tick: tuple[str, ...] = ()
    ) -> list[Stall]:
        """The last look's stalls, or the first that is not empty."""
        for _ in range(round(seconds / turn_s)):
            self.now += turn_s
            self.ticks += 1
            for row, name in enumerate(NAMES):
                if name not in no_beat:
                    self.table.set_word(row, "beat", self.now)
                if name not in no_tick and name not in no_beat:
                    self.table.set_word(row, "num_ticks", self.ticks)
            if stalls := self.watchdog.look(self.now):
                return stalls
        return []


@pytest.mark.parametrize("name", ["rollout/0", "inference/0", "ingest/0", "stats/0", "trainer/1"])
def test_no_heartbeat_is_a_stall_after_the_limit_and_not_before(name: str) -> None:
    scene = Scene()
    assert scene.pass_time(9.5, no_beat=(name,)) == []
    [stall] = scene.pass_time(2, no_beat=(name,))
    assert (stall.name, stall.mark, stall.flag) == (name, "heartbeat", "--hang-timeout-s")
    assert 10 < stall.silent_s < 11
    assert scene.notes == [f"{name} has had no heartbeat for 5 s"]


@pytest.mark.parametrize(
    ("name", "limit_s"), [("ingest/0", 10), ("stats/0", 10), ("inference/0", 10), ("rollout/0", 16), ("trainer/0", 40)]
)
def test_a_loop_that_does_not_move_has_the_limit_of_its_role(name: str, limit_s: float) -> None:
    scene = Scene()
    assert scene.pass_time(limit_s - 0.5, no_tick=(name,)) == []
    [stall] = scene.pass_time(1.5, no_tick=(name,))
    assert (stall.name, stall.mark) == (name, "loop")


def test_a_push_on_a_side_thread_does_not_hide_a_stuck_rank() -> None:
    scene, is_over = Scene(), threading.Event()
    health = Health("trainer/0", table=scene.table, board=Board.detached())

    def push() -> None:
        with health.waiting("inference to receive a push", 60) as wait:
            while not is_over.wait(0.0005):
                wait.check()

    thread = threading.Thread(target=push)
    thread.start()
    try:
        stalls: list[Stall] = []
        for _ in range(300):
            stalls = stalls or scene.pass_time(0.2, no_tick=("trainer/0",))
            time.sleep(0.002)  # the thread gets its turns
    finally:
        is_over.set()
        thread.join(10)
    assert [(stall.name, stall.mark, stall.flag) for stall in stalls] == [("trainer/0", "loop", "--step-timeout-s")]


def test_a_loop_that_moves_again_in_time_starts_anew() -> None:
    scene = Scene()
    for _ in range(5):
        assert scene.pass_time(8, no_tick=("ingest/0",)) == []
        assert scene.pass_time(0.4) == []


def test_a_suspended_or_starved_machine_is_nobodys_fault() -> None:
    scene = Scene()
    assert scene.pass_time(3600, turn_s=3600, no_beat=tuple(NAMES)) == [], "the lid was closed: one turn of an hour"
    assert scene.pass_time(1) == []
    assert scene.pass_time(90, turn_s=15, no_beat=("ingest/0",)) == [], "six turns in 90 s: the supervisor got no time either"
    assert scene.pass_time(400, turn_s=15, no_beat=("ingest/0",)), "but what never comes back is found in the end"


def test_a_debugger_stops_the_clock() -> None:
    scene = Scene()
    scene.table.hold(os.getpid())
    assert scene.pass_time(100, no_beat=("rollout/0",)) == []
    scene.table.let_go()
    assert scene.pass_time(9, no_beat=("rollout/0",)) == []
    assert scene.pass_time(2, no_beat=("rollout/0",))


@pytest.mark.parametrize("state", ["none", "starting", "stopping", "ended", "failed"])
def test_only_running_roles_are_watched(state: str) -> None:
    scene = Scene()
    scene.set("inference/0", state, pid=os.getpid())
    assert scene.pass_time(100, no_beat=("inference/0",)) == []
    scene.set("inference/0", "running", pid=os.getpid())
    assert scene.pass_time(9, no_beat=("inference/0",)) == [], "the limit counts from the change of state"


def test_a_rank_that_starts_is_watched_and_a_dead_row_is_not() -> None:
    scene = Scene()
    scene.set("trainer/1", "starting", pid=os.getpid())
    scene.set("ingest/0", "running", pid=0)
    [stall] = scene.pass_time(60, no_tick=("trainer/1", "ingest/0"))
    assert (stall.name, stall.flag) == ("trainer/1", "--step-timeout-s")


def test_zero_turns_it_off() -> None:
    scene = Scene(hang_timeout_s=0.0, step_timeout_s=0.0)
    assert scene.pass_time(400, turn_s=1.0, no_beat=("rollout/0", "trainer/0")) == []


def test_of_ranks_that_stand_still_the_one_that_waits_for_nobody_is_to_blame() -> None:
    scene = Scene()
    scene.table.write_wait(scene.table.row_of("trainer/0"), "all trainer ranks", "", scene.now)
    stalls = scene.pass_time(60, no_tick=("trainer/0", "trainer/1"))
    assert {stall.name for stall in stalls} == {"trainer/0", "trainer/1"}
    assert scene.watchdog.blame(stalls).name == "trainer/1"
    assert scene.watchdog.blame([stall for stall in stalls if stall.name == "trainer/0"]).name == "trainer/0"


@pytest.mark.parametrize("has_stood_longer", ["trainer/0", "trainer/1"])
def test_of_ranks_that_stand_still_the_one_that_has_begun_fewer_collectives_is_to_blame(has_stood_longer: str) -> None:
    """In a step ranks say nothing: the one that waits in a collective may be the first, or for a moment the only one, over the limit."""
    scene = Scene()
    for name, reached in (("trainer/0", 8), ("trainer/1", 7)):
        scene.table.set_word(scene.table.row_of(name), "reached", reached)
    assert scene.pass_time(1, no_tick=(has_stood_longer,)) == []
    stalls = scene.pass_time(60, no_tick=("trainer/0", "trainer/1"))
    assert [stall.name for stall in stalls] == [has_stood_longer]
    guilty = scene.watchdog.blame(stalls)
    assert (guilty.name, guilty.pid, guilty.flag) == ("trainer/1", os.getpid(), "--step-timeout-s")
    assert 38 < guilty.silent_s < 42
    assert "has not begun the collective in which another rank waits for it (--step-timeout-s)" in str(guilty)


def test_a_rank_without_a_heartbeat_is_to_blame_whatever_it_has_begun() -> None:
    scene = Scene()
    for name, reached in (("trainer/0", 7), ("trainer/1", 8)):
        scene.table.set_word(scene.table.row_of(name), "reached", reached)
    stalls = scene.pass_time(60, no_beat=("trainer/1",))
    assert scene.watchdog.blame(stalls).name == "trainer/1"


def test_a_process_that_a_debugger_traces_is_left_alone_and_a_stopped_one_is_called_so() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(19)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid) == "T"
        scene = Scene()
        scene.set("ingest/0", "running", pid=child.pid)
        [stall] = scene.pass_time(12, no_beat=("ingest/0",))
        assert "it is stopped (SIGSTOP)" in str(stall)
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == ""
