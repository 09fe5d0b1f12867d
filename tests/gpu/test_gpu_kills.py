"""Kill -9 of vLLM's GPU process and of a trainer rank, each in the middle of a push: the run goes on by itself and ends as it should.

MODEL_PATH and TEXTWORLD_GAME_DIR say of what (default: the demo's model, and two games made here), ACCERL_TEST_PLACEMENT where.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from games_fixture import games_dir  # noqa: F401

from tests.live_run import ROOT, LiveRun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

STEPS = 20
FLAGS = f"""
--num-rollout-workers 4 --rollout-batch-size 8 --rl-algorithm grpo --keep-zero-std-groups
--tw-max-episode-steps 6 --tw-history-token-window 1536 --max-length 1536
--train-packing varlen --train-token-budget 8192 --train-logprob-mode response_only_lm_head
--batch-size 16 --grad-accum-steps 1 --sync-every-optimizer-steps 1 --max-policy-lag 2 --max-steps {STEPS}
--sync-bucket-mb 1 --sync-timeout-s 60 --verify-sync 4 --resume-every-rounds 2 --max-trainer-restarts 1
--enforce-eager --compile off
"""
"""Each engine starts twice: in half the time without compiling and CUDA graphs, of which a push over a killed process knows nothing."""
KILLED_AFTER = 3


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LiveRun]:
    games = os.environ.get("TEXTWORLD_GAME_DIR") or str(request.getfixturevalue("games_dir"))
    model = os.environ.get("MODEL_PATH") or str(ROOT / "accerl_mp/presets/demo_model")
    placement = os.environ.get("ACCERL_TEST_PLACEMENT", "auto")
    share = os.environ.get("ACCERL_TEST_GPU_SHARE", "0.4")
    words = [*FLAGS.split(), "--model-path", model, "--tw-game-dir", games, "--placement", placement, "--gpu-memory-utilization", share]
    run = LiveRun(tmp_path / "run", words)
    yield run
    run.close()


def in_a_push(run: LiveRun) -> bool:
    """A version is announced that not all of vLLM uses yet."""
    return run.board.get("next_version") - 1 > run.board.get("policy_version") >= 0


def kill_in_a_push(run: LiveRun, after_step: int, pid: int) -> int:
    """The version that was on its way."""
    run.wait_for(lambda: run.step >= after_step, f"optimizer step {after_step}", 240)
    run.wait_for(lambda: in_a_push(run), "a push", 60, every_s=0.0001)
    os.kill(pid, signal.SIGKILL)
    return run.board.get("next_version") - 1


def test_a_run_goes_on_when_vllms_gpu_process_is_killed_in_a_push(run: LiveRun) -> None:
    run.attach()
    run.wait_for(lambda: run.runs("inference/0"), "vLLM to run", 400)
    run.wait_training(1)
    front, *gpu_workers = run.vllm_pids()
    broken = kill_in_a_push(run, KILLED_AFTER, gpu_workers[-1])
    run.wait_for(lambda: run.row("inference/0").num_restarts == 1, "a restart of vLLM", 90)
    run.wait_for(lambda: run.runs("inference/0"), "vLLM to run again", 300)
    assert run.row("inference/0").pid != front
    rounds = ended_well(run)
    log = run.log("trainer")
    assert f"push {broken} broke and begins again" in log or f"push {broken}: a new weight group" in log, log[-3000:]
    assert log.count(f"push {broken} verified") == 1, "all weights, under the same version, and the first push of a group is verified"
    print(json.dumps({"killed": "vLLM's GPU process", "in push": broken, "steps": STEPS, "rounds": len(rounds)}))


def test_a_run_goes_on_when_a_trainer_rank_is_killed_in_a_push(run: LiveRun) -> None:
    run.attach()
    run.wait_for(lambda: run.runs("inference/0"), "vLLM to run", 400)
    run.wait_training(1)
    old_rank = run.row("trainer/0").pid
    run.wait_for(lambda: "saved the state" in run.log("trainer"), "a state to go on from", 120)
    broken = kill_in_a_push(run, KILLED_AFTER, old_rank)
    run.wait_for(lambda: restarted(run, old_rank), "the whole run to start again", 400)
    rounds = ended_well(run)
    assert max(line.get("Run/TrainerRestarts", 0) for line in rounds) == 1
    assert "goes on from" in run.log("trainer")
    print(json.dumps({"killed": "trainer rank 0", "in push": broken, "steps": STEPS, "rounds": len(rounds)}))


def ended_well(run: LiveRun) -> list[dict[str, Any]]:
    """Wait for the end: all steps, nothing left, nothing lost or trained twice. Returns the lines of its rounds."""
    assert run.process.wait(300) == 0, run.words()
    assert run.left() == []
    lines = [json.loads(line) for line in (run.paths.run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "Train/Loss" in line]
    assert rounds[-1]["step"] == STEPS
    assert sum(line.get("Sync/VerifiedPushes", 0) for line in lines) >= 2, "the first push of each group is verified"
    versions = [line["version"] for line in rounds]
    assert versions == sorted(versions)
    books = run.books()
    assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0), books
    return rounds


def restarted(run: LiveRun, old_rank: int) -> bool:
    try:
        run.attach()
        return run.row("trainer/0").pid not in (0, old_rank)
    except (OSError, ValueError):  # being made
        return False
