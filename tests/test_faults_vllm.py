"""The fault matrix's heavy half: a whole real run. vLLM's three processes are broken while they work and while they rest; every
process is killed while vLLM stands in a push."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engine_fixture import RequestClient
from games_fixture import games_dir  # noqa: F401

from accerl_mp import recovery
from tests import held_push
from tests.fault_matrix import EVENTS, REST, Cell, cells_of
from tests.held_push import HELD, HOLD
from tests.live_run import ROOT, LiveRun

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

FLAGS = """
--placement cpu --fsdp-world-size 1 --num-rollout-workers 2 --rollout-batch-size 4 --rl-algorithm grpo --keep-zero-std-groups
--tw-max-episode-steps 4 --tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8
--train-packing padded --batch-size 8 --grad-accum-steps 1 --max-policy-lag 1 --learning-rate 1e-5
--sync-every-optimizer-steps 2 --max-steps 1000000 --max-restarts 1000 --hang-timeout-s 15 --sync-timeout-s 120
"""
STANDING_FLAGS = "--sync-staging off --hang-timeout-s 60".split()
PLACE = {"inference front": 0, "inference core": 1, "inference worker": 2}


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In place of conftest's: the shared run lives on from test to test, with ever new processes; its end looks."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, games_dir: Path) -> Iterator[Callable[..., LiveRun]]:  # noqa: F811
    """One run at a time for all cells with the same flags, started anew if one of them ended it."""
    runs: list[tuple[tuple[str, ...], LiveRun]] = []
    model = ["--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(games_dir)]

    def live(*more: str, python: Path = Path(sys.executable)) -> LiveRun:
        if not runs or runs[-1][0] != more or runs[-1][1].process.poll() is not None:
            for _, run in runs[-1:]:
                finish(run)
            folder = tmp_path_factory.mktemp("faults") / "a run"
            runs.append((more, LiveRun(folder, [*FLAGS.split(), *model, *more], python=python)))
            runs[-1][1].attach()
            runs[-1][1].wait_training(1, 300)
        return runs[-1][1]

    yield live
    try:
        for _, run in runs[-1:]:
            finish(run)
    finally:
        for _, run in runs:
            run.close()


def finish(run: LiveRun) -> None:
    """An orderly end, if a cell has not ended it: nothing lost, nothing trained twice, nothing left."""
    if run.process.poll() is not None:
        return
    assert run.stop() == 0, run.words()
    assert run.left() == []
    books = run.books()
    assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0), books


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.case) for cell in cells_of("test_vllm")])
def test_vllm(shared: Callable[..., LiveRun], cell: Cell) -> None:
    run = shared()
    run.wait_for(lambda: run.runs("inference/0") and len(run.vllm_pids()) == 3, "vLLM to run")
    run.wait_training(1)
    before, version = run.row("inference/0"), run.board.get("policy_version")
    run.wait_for(lambda: has_open_turns(run) != (cell.moment == REST), cell.moment, 60, every_s=0.001)
    os.kill(run.vllm_pids()[PLACE[cell.who]], getattr(signal, EVENTS[cell.event]))
    run.wait_for(lambda: run.row("inference/0").num_restarts > before.num_restarts, "a restart", 90)
    run.wait_for(lambda: run.runs("inference/0"), "vLLM to run again", 180)
    run.wait_training(3, 120)
    assert run.row("inference/0").pid != before.pid
    run.wait_for(lambda: run.board.get("policy_version") > version, "the next push", 120)
    if cell.event == "stopped":
        assert "--hang-timeout-s" in run.output.read_text()


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.case) for cell in cells_of("test_while_vllm_stands")])
def test_while_vllm_stands(shared: Callable[..., LiveRun], cell: Cell) -> None:
    run = shared(*STANDING_FLAGS, python=held_push.PYTHON)
    name = "inference/0" if cell.who in PLACE else f"{cell.who}/0"
    run.wait_for(lambda: run.runs(name) and run.runs("inference/0") and len(run.vllm_pids()) == 3, "everything to run", 180)
    run.wait_training(1)
    before, version = run.row(name), run.board.get("policy_version")
    with standing_vllm(run):
        os.kill(run.vllm_pids()[PLACE[cell.who]] if cell.who in PLACE else before.pid, signal.SIGKILL)
        time.sleep(1.0)  # so that the death meets a vLLM that stands, and is seen by some in the middle of it
    run.wait_for(lambda: run.row(name).num_restarts > before.num_restarts, "a restart", 90)
    run.wait_for(lambda: run.runs(name), f"{name} to run again", 180)
    run.wait_training(4, 180)
    run.wait_for(lambda: run.board.get("policy_version") > version + 1, "the push after that one", 120)


@contextlib.contextmanager
def standing_vllm(run: LiveRun) -> Iterator[None]:
    """In the block vLLM is paused, with turns open, and has the first of a push's tensors."""
    hold, version = run.paths.run_dir / HOLD, run.board.get("policy_version")
    run.wait_for(lambda: run.runs("rollout/0") and run.runs("rollout/1"), "both rollouts to run")
    run.wait_for(lambda: run.board.get("policy_version") > version, "a push, after which there is work again", 120, every_s=0.001)
    rollouts = [run.row(f"rollout/{index}").pid for index in range(2)]
    try:
        with stopped(rollouts):  # else they would have played all that they may before the next push begins
            hold.touch()
            run.wait_for(lambda: run.row("trainer/0").waits_for == HELD, "a push to be held", 50)
        run.wait_for(lambda: has_open_turns(run), "a turn to be open", 30)
        assert answers_nothing(run, for_s=3.0), run.words()
        assert has_open_turns(run), run.words()
        yield
    finally:
        hold.unlink(missing_ok=True)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """For less than --hang-timeout-s."""
    assert all(pids), "0 would be the test's own group"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_trainer_that_is_stopped_for_a_while_in_a_push_goes_on(shared: Callable[..., LiveRun]) -> None:
    """Longer than a late heartbeat is noted (5 s), shorter than --hang-timeout-s: nobody is started again, and the push is the same."""
    run = shared(*STANDING_FLAGS, python=held_push.PYTHON)
    run.wait_for(lambda: run.runs("inference/0") and len(run.vllm_pids()) == 3, "everything to run", 180)
    run.wait_training(1)
    rank, rows, log = run.row("trainer/0"), run.table.snapshot(), run.log("trainer")
    with standing_vllm(run), stopped([rank.pid]):
        time.sleep(8.0)
    version = run.board.get("policy_version")
    run.wait_for(lambda: run.board.get("policy_version") > version + 1, "the push after that one", 120)
    assert [(row.name, row.pid) for row in run.table.snapshot()] == [(row.name, row.pid) for row in rows]
    assert "trainer/0 has had no heartbeat for" in run.log("supervisor")
    assert "begins again" not in run.log("trainer").removeprefix(log)


def answers_nothing(run: LiveRun, for_s: float) -> bool:
    """Where vLLM generates, one token takes some ten milliseconds."""
    client = RequestClient(run, name="rollout/99")
    try:
        client.send([5, 6, 7], max_tokens=1)
        return client.receive(for_s) is None
    finally:
        client.close()


def has_open_turns(run: LiveRun) -> bool:
    return any(run.row(f"rollout/{index}").waits_for.startswith("inference/") for index in range(2))


def test_a_signal_to_every_process_at_once_saves_the_state_and_exits_with_zero(shared: Callable[..., LiveRun]) -> None:
    """As a cluster does it that takes its machines back."""
    run = shared()
    run.wait_for(lambda: run.runs("inference/0"), "vLLM to run", 180)
    run.wait_training(1)
    step, processes = run.step, run.processes()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 0, run.words()
    assert run.left() == []
    state, damaged = recovery.newest_whole(run.paths.resume)
    assert damaged == []
    assert state is not None
    assert state.step >= step
