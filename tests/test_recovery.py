"""vLLM is killed: while the trainer waits for its samples (a whole small run), and in the middle of a push."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixture import VOCABULARY, InferenceRun, RequestClient, greedy_of, start_inference
from games_fixture import games_dir  # noqa: F401
from push_load import prompt_of, train_only
from tiny import build_tiny

from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import HealthTable
from accerl_mp.weight_sync import patience, sender
from accerl_mp.weight_sync.group import join_group

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
ROOT = Path(__file__).parent.parent
FLAGS = """
--placement cpu --fsdp-world-size 2 --num-rollout-workers 2 --rollout-batch-size 4 --rl-algorithm grpo --keep-zero-std-groups
--tw-max-episode-steps 4 --tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8 --transcripts-every 1
--train-packing padded --batch-size 12 --grad-accum-steps 1 --max-policy-lag 0
--sync-every-optimizer-steps 2 --max-steps 4
"""


def _launch(run_dir: Path, games: Path, temporary: str) -> subprocess.Popen:
    words = [*FLAGS.split(), "--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(games)]
    environment = os.environ | {"ACCERL_PYTHON": sys.executable, "TMPDIR": temporary}
    command = ["bash", str(ROOT / "launch.sh"), *words, "--log-dir", str(run_dir)]
    with (run_dir.parent / "output.txt").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def _wait_for(condition: Any, launched: subprocess.Popen, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert launched.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def _waits_for_the_first_samples(table: HealthTable, board: Board) -> bool:
    """The rings are empty, and the rollouts have only begun: no step can follow without vLLM."""
    waits_for = table.read(table.row_of("trainer/0")).waits_for
    return board.get("policy_version") == 0 and board.get("optimizer_step") == 0 and waits_for.startswith("ring/0 to hold")


def test_training_goes_on_when_vllm_is_killed_while_the_trainer_waits_for_samples(tmp_path: Path, games_dir: Path) -> None:  # noqa: F811
    paths = RunPaths(tmp_path / "run")
    temporary = tempfile.mkdtemp(prefix="accerl-test-", dir="/tmp")  # short enough for sockets
    launched = _launch(paths.run_dir, games_dir, temporary)
    try:
        _wait_for(paths.health.exists, launched, 60)
        table, board = HealthTable.attach(paths.health), Board.attach(paths.board)
        _wait_for(lambda: _waits_for_the_first_samples(table, board), launched, 180)
        os.kill(int(table.word(table.row_of("inference/0"), "pid")), signal.SIGKILL)
        assert launched.wait(180) == 0, (tmp_path / "output.txt").read_text()
    finally:
        if launched.poll() is None:
            launched.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # launch.sh may take its 25 + 45 s, then the supervisor's 45
                launched.wait(150)
        left = [name for name in os.listdir(temporary) if name.startswith(("accerl", "torchelastic", "vllm"))]
        shutil.rmtree(temporary)
    assert left == [], "what a killed vLLM and torchrun have made there goes with the run"
    log = paths.log("trainer", 0).read_text()
    assert re.findall(r"push (\d+) verified", log) == ["0", "0"], "the new engine gets the version in use, verified like a first push"
    rounds = [record for line in (paths.run_dir / "metrics.jsonl").read_text().splitlines() if "Train/Loss" in (record := json.loads(line))]
    assert [(record["step"], record["version"]) for record in rounds] == [(2, 1), (4, 2)]
    _check_versions(paths.run_dir / "episodes")


def _check_versions(transcripts: Path) -> None:
    """They never fall within an episode, and are those of the run (how many are seen depends on who was faster)."""
    seen: set[int] = set()
    for path in transcripts.glob("train-*.json"):
        versions = [version for turn in json.loads(path.read_text())["turns"] for version in turn["versions"]]
        assert versions == sorted(versions)
        seen.update(versions)
    assert {0} <= seen <= {0, 1, 2}


def test_a_push_whose_receiver_is_killed_begins_again_with_its_successor(tmp_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(10, 500, 40).tolist()
    with start_inference(tmp_path, verify_sync=50, inference_start_timeout_s=120) as run, _Supervisor(run) as supervisor:
        client = RequestClient(run)
        run.connect()
        run.push(0)
        assert set(client.ask(prompt)["versions"].tolist()) == {0}
        with torch.no_grad():
            run.model.model.norm.weight.normal_()
        send, is_killed = run.sync._group.send, threading.Event()
        run.sync._group.send = lambda buffer: is_killed.wait(60) and send(buffer)  # or the push could be over before
        run.sync.start_push(1, trainable_only=True)
        os.kill(run.popen.pid, signal.SIGKILL)
        is_killed.set()
        assert not run.sync.has_new_replica(), "it is dead, and nobody else is there yet"
        supervisor.start()
        report = run.sync.finish_push()
        assert (report.version, report.verified) == (1, True)
        assert not run.sync.has_new_replica()
        reply = client.ask(prompt, max_tokens=12, temperature=0.0)
        assert set(reply["versions"].tolist()) == {1}
        assert reply["ids"].tolist() == greedy_of(run.model, prompt, 12)
        assert not run.push(2, trainable_only=True).verified, "the second push of its group"
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_breaks", [1, 3])
def test_without_staging_a_push_that_breaks_half_way_is_done_again_and_vllm_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_breaks: int
) -> None:
    """vLLM stands, half of its weights are new; nobody has died. What was being generated then goes on under the new version."""
    monkeypatch.setattr(patience, "_DEATH_SHOWS_S", 0.5)
    model = build_tiny(vocab_size=VOCABULARY, intermediate_size=4096)
    with contextlib.closing(InferenceRun(tmp_path, model, verify_sync=50, sync_staging="off", sync_bucket_mb=1)) as run:
        client = RequestClient(run)
        run.connect()
        run.push(0)
        for seed in range(8):
            client.send(prompt_of(seed), max_tokens=150)
        train_only(run.model, "")
        breaks = _break_sends(run, monkeypatch, num_breaks)
        report = run.push(1)
        assert (report.version, report.verified, breaks) == (1, True, [3] * num_breaks), "after two messages, on a group of its own each"
        replies = [client.receive(60) for _ in range(8)]
        assert all(reply is not None and reply["error"] is None for reply in replies)
        assert {int(reply["versions"][-1]) for reply in replies} == {1}
        assert client.ask(prompt_of(99), max_tokens=12, temperature=0.0)["ids"].tolist() == greedy_of(run.model, prompt_of(99), 12)
        assert not run.push(2).verified, "the second push of its group"
        client.close()


def _break_sends(run: InferenceRun, monkeypatch: pytest.MonkeyPatch, num_breaks: int) -> list[int]:
    """The third message of the next pushes does not get through. Fills the list with the number of the message that broke."""
    breaks: list[int] = []

    def spoilt(group: Any) -> None:
        send, sent = group.send, itertools.count(1)

        def broken(buffer: torch.Tensor) -> None:
            number = next(sent)
            if number == 3 and len(breaks) < num_breaks:
                breaks.append(number)
                raise RuntimeError("connection reset by peer")
            send(buffer)

        group.send = broken

    def joined(*arguments: Any) -> Any:
        group = join_group(*arguments)
        spoilt(group)
        return group

    spoilt(run.sync._group)
    monkeypatch.setattr(sender, "join_group", joined)
    return breaks


class _Supervisor(threading.Thread):
    """Once started: starts inference again. Stays until the end of the block: inference dies with the thread that started it."""

    def __init__(self, run: InferenceRun) -> None:
        super().__init__(daemon=True)
        self._run, self._is_over = run, threading.Event()

    def __enter__(self) -> "_Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def run(self) -> None:
        self._run.popen.wait()
        self._run.table.set_word(self._run.table.row_of("inference/0"), "pid", 0)
        time.sleep(0.5)
        self._run.popen = self._run.start_process()
        self._is_over.wait()
