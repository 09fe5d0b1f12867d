"""The fault matrix's heavy half: a whole real run. vLLM's three processes are broken while they work and while they rest; every
process is killed while vLLM stands in a push."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.transport.health import is_alive
from tests.fault_matrix import EVENTS, REST, Cell, cells_of
from tests.live_run import ROOT, LiveRun

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

FLAGS = """
--placement cpu --fsdp-world-size 1 --num-rollout-workers 2 --rollout-batch-size 4 --rl-algorithm grpo --keep-zero-std-groups
--tw-max-episode-steps 4 --tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8
--train-packing padded --batch-size 8 --grad-accum-steps 1 --max-policy-lag 1 --learning-rate 1e-5
--sync-every-optimizer-steps 2 --max-steps 1000000 --max-restarts 1000 --hang-timeout-s 15 --sync-timeout-s 120
"""
BEGINS = "inference/0 to answer 'begin'"
PLACE = {"inference front": 0, "inference core": 1, "inference worker": 2}


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In place of conftest's: the shared run lives on from test to test, with ever new processes; its end looks."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, games_dir: Path) -> Iterator[Callable[..., LiveRun]]:  # noqa: F811
    """One run at a time for all cells with the same flags, started anew if one of them ended it."""
    runs: list[tuple[tuple[str, ...], LiveRun]] = []
    model = ["--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(games_dir)]

    def live(*more: str) -> LiveRun:
        if not runs or runs[-1][0] != more or runs[-1][1].process.poll() is not None:
            for _, run in runs[-1:]:
                finish(run)
            runs.append((more, LiveRun(tmp_path_factory.mktemp("faults") / "a run", [*FLAGS.split(), *model, *more])))
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
    run = shared("--sync-staging", "off")
    name = "inference/0" if cell.who in PLACE else f"{cell.who}/0"
    run.wait_for(lambda: run.runs(name) and run.runs("inference/0") and len(run.vllm_pids()) == 3, "everything to run", 180)
    run.wait_training(1)
    before, version = run.row(name), run.board.get("policy_version")
    with standing_vllm(run):
        os.kill(run.vllm_pids()[PLACE[cell.who]] if cell.who in PLACE else before.pid, signal.SIGKILL)
        time.sleep(1.0)  # so that the death meets a vLLM that stands
    run.wait_for(lambda: run.row(name).num_restarts > before.num_restarts, "a restart", 90)
    run.wait_for(lambda: run.runs(name), f"{name} to run again", 180)
    run.wait_training(4, 180)
    run.wait_for(lambda: run.board.get("policy_version") > version + 1, "the push after that one", 120)


@contextlib.contextmanager
def standing_vllm(run: LiveRun) -> Iterator[None]:
    """In the block vLLM is paused: rank 0 is stopped (shorter than --hang-timeout-s) just when its push has begun."""
    trainer = run.row("trainer/0").pid
    for _ in range(20):
        run.wait_for(lambda: run.row("trainer/0").waits_for == BEGINS, "a push to begin", 120, every_s=0.0005)
        with stopped(run, trainer):
            if a_turn_stays_open(run, within_s=4.0):
                yield
                return
        # Nobody had anything to ask. It still shows the same wait and an old heartbeat until it has had a turn: stopped again before
        # that, it would stand still for longer than --hang-timeout-s and be ended, rightly.
        run.wait_for(lambda: run.row("trainer/0").waits_for != BEGINS and run.row("trainer/0").beat_age_s < 2, "that push to go on", 60)
    pytest.fail(f"vLLM was never seen to stand:\n{run.words()}")


@contextlib.contextmanager
def stopped(run: LiveRun, pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        assert is_alive(pid), f"it was ended while it was stopped:\n{run.words()}"
        os.kill(pid, signal.SIGCONT)


def a_turn_stays_open(run: LiveRun, within_s: float) -> bool:
    """A turn takes some ten milliseconds where vLLM generates."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        rows = [run.row(f"rollout/{index}") for index in range(2)]
        if any(row.waits_for.startswith("inference/") and row.waits_s > 1.5 for row in rows):
            return True
        time.sleep(0.05)
    return False


def has_open_turns(run: LiveRun) -> bool:
    return any(run.row(f"rollout/{index}").waits_for.startswith("inference/") for index in range(2))
