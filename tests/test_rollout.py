"""A rollout process among scripted peers over real sockets: nothing lost, nothing doubled, nothing executed twice."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_fixture import build_tokenizer, save_tokenizer
from fake_peers import Answer, FakeInference, FakeIngest, Ledger, make_deals, reply_fields
from games_fixture import games_dir  # noqa: F401

from accerl_mp.config import Config
from accerl_mp.launcher.sweep import sweep
from accerl_mp.rollout.client import InferenceClient, InferenceError
from accerl_mp.rollout.guard import Step, StepGuard
from accerl_mp.rollout.loop_timer import LoopTimer
from accerl_mp.rollout.tasks import first_to_end
from accerl_mp.rollout.worker import Worker
from accerl_mp.topology import RunPaths
from accerl_mp.transport import sockets
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import EVAL_BASE, MAX_UNACKED, MetricsReceiver
from accerl_mp.transport.errors import EXIT_GAME_HUNG, Closed, DeadlineExpired
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.transport.process import Process

pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")
TOKENIZER = build_tokenizer()


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path)
    sockets.make_folder(paths)
    yield paths
    sweep(paths)


def says(text: str, **fields: Any) -> dict[str, Any]:
    return reply_fields(TOKENIZER.encode(text + "<|im_end|>"), **fields)


def wins_half(request: dict[str, Any], _number: int) -> dict[str, Any]:
    """Even episodes take the coin and win, odd ones look until they are cut."""
    return says("look" if request["episode_id"] % 2 else "take coin")


# the client alone


def generate(paths: RunPaths, *, episode_id: int = 0, num_replicas: int = 1, timeout_s: float = 20, health: Health | None = None) -> Any:
    """One `generate`; returns (reply, number of resubmitted turns)."""

    async def run() -> Any:
        client = InferenceClient(paths, health or Health.detached("rollout/0"), LoopTimer(), num_replicas=num_replicas, timeout_s=timeout_s)
        request = {"episode_id": episode_id, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0.5, "salt_version": -1, "seed": 77}
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await client.generate(**request))

        try:
            await first_to_end(client.run(), ask())
        finally:
            client.close()
        return answers[0], client.num_resubmitted

    return asyncio.run(run())


def test_a_reply_comes_back_with_versions_and_salt(paths: RunPaths) -> None:
    inference = FakeInference(paths, lambda _request, _number: reply_fields([5, 6, 7], version=9)).start()
    reply, num_resubmitted = generate(paths)
    inference.stop()
    assert (reply.ids.tolist(), reply.logprobs.tolist(), reply.versions.tolist()) == ([5, 6, 7], [-0.5] * 3, [9] * 3)
    assert (reply.finish_reason, reply.salt_version, num_resubmitted) == ("stop", 4, 0)
    (request,) = inference.requests
    assert request["prompt"] == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert (request["max_tokens"], request["temperature"], request["salt_version"], request["seed"]) == (8, 0.5, -1, 77)


def test_an_episode_stays_with_one_replica(paths: RunPaths) -> None:
    replicas = [FakeInference(paths, lambda _request, _number, n=n: reply_fields([n]), index=n).start() for n in range(2)]
    answers = [generate(paths, episode_id=episode_id, num_replicas=2)[0].ids.tolist() for episode_id in (0, 1, 4, 7)]
    for replica in replicas:
        replica.stop()
    assert answers == [[0], [1], [0], [1]]


def test_an_aborted_reply_is_asked_for_again(paths: RunPaths) -> None:
    def answer(_request: dict[str, Any], number: int) -> dict[str, Any]:
        return reply_fields([9], finish_reason="abort") if number < 2 else reply_fields([5])

    inference = FakeInference(paths, answer).start()
    reply, num_resubmitted = generate(paths)
    inference.stop()
    assert (reply.ids.tolist(), num_resubmitted) == ([5], 2)
    assert len({request["id"] for request in inference.requests}) == 3


def test_a_lost_request_is_submitted_again_at_its_deadline(paths: RunPaths) -> None:
    inference = FakeInference(paths, lambda _request, number: reply_fields([5]) if number else None).start()
    reply, num_resubmitted = generate(paths, timeout_s=0.5)
    inference.stop()
    assert (reply.ids.tolist(), num_resubmitted) == ([5], 1)


def test_a_replica_that_never_answers_ends_the_wait_by_name(paths: RunPaths) -> None:
    inference = FakeInference(paths, lambda _request, _number: None).start()
    for episode_id, named in ((0, "episode 0"), (EVAL_BASE + 2 * 10**6, "an evaluation")):
        with pytest.raises(DeadlineExpired, match=rf"inference/0 to reply to {named}.*--request-timeout-s"):
            generate(paths, timeout_s=0.3, episode_id=episode_id)
    inference.stop()
    assert len(inference.requests) == 6


def test_a_dying_engines_error_is_not_the_end_but_a_refusal_is(paths: RunPaths) -> None:
    def dies_once(_request: dict[str, Any], number: int) -> dict[str, Any]:
        return reply_fields([5]) if number else {"error": "EngineError: gone", "finish_reason": "abort"}

    inference = FakeInference(paths, dies_once).start()
    assert generate(paths)[0].ids.tolist() == [5]
    inference.stop()
    inference = FakeInference(paths, lambda _request, _number: {"error": "ValueError: prompt too long", "finish_reason": "abort"}).start()
    with pytest.raises(InferenceError, match="prompt too long"):
        generate(paths)
    inference.stop()


def test_a_reply_without_all_its_logprobs_is_refused(paths: RunPaths) -> None:
    inference = FakeInference(paths, lambda _request, _number: reply_fields([5, 6]) | {"logprobs": b"\0\0\0\0"}).start()
    with pytest.raises(InferenceError, match="2 tokens came with 1 logprobs"):
        generate(paths)
    inference.stop()


def test_turns_of_an_engine_that_was_started_anew_are_submitted_again(paths: RunPaths) -> None:
    table = HealthTable.detached(["rollout/0", "inference/0"])
    table.set_word(1, "pid", 100)
    board = Board.detached()

    def answer(_request: dict[str, Any], number: int) -> dict[str, Any] | None:
        if number == 0:
            table.set_word(1, "pid", 101)
            return None
        return reply_fields([5])

    inference = FakeInference(paths, answer).start()
    start = time.monotonic()
    reply, num_resubmitted = generate(paths, timeout_s=60, health=Health("rollout/0", table=table, board=board))
    inference.stop()
    assert (reply.ids.tolist(), num_resubmitted) == ([5], 1)
    assert time.monotonic() - start < 10


def test_waiting_for_a_reply_ends_with_the_run(paths: RunPaths) -> None:
    health = Health.detached("rollout/0")
    inference = FakeInference(paths, lambda _request, _number: health.request_stop()).start()
    with pytest.raises(Closed):
        generate(paths, health=health)
    inference.stop()


# a worker


def build_process(paths: RunPaths, **flags: Any) -> Process:
    defaults = {"infer_size": 1, "infer_max_tokens": 16, "tw_max_episode_steps": 2, "rollout_batch_size": 4}
    config = Config.from_flat(defaults | flags)
    save_tokenizer(paths.tokenizer)
    health = Health.detached("rollout/0")
    health.board.set("policy_version", 0)
    return Process("rollout", 0, paths, config, health, health.board, sys.stderr)


def play(process: Process, is_done: Callable[[], bool], timeout_s: float = 40) -> None:
    """Run a worker in this thread until `is_done`, looked at by another."""
    stopped = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < deadline and not stopped.is_set():
            time.sleep(0.01)
        process.health.request_stop()

    watcher = threading.Thread(target=watch)
    watcher.start()

    async def run() -> None:
        await Worker(process).run()

    try:
        with pytest.raises(Closed):
            asyncio.run(run())
    finally:
        stopped.set()
        watcher.join()


def play_groups(paths: RunPaths, games: Path, *, num_groups: int, group_size: int, answer: Answer = wins_half, **flags: Any) -> Ledger:
    ledger = Ledger(make_deals(str(games / "room-2.z8"), num_groups=num_groups, group_size=group_size))
    inference, ingest = FakeInference(paths, answer).start(), FakeIngest(paths, ledger).start()
    play(build_process(paths, **flags), lambda: ledger.is_done)
    inference.stop()
    ingest.stop()
    return ledger


def test_a_worker_plays_what_is_dealt(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    receiver = MetricsReceiver(paths)
    ledger = play_groups(paths, games_dir, num_groups=3, group_size=4, transcripts_every=6)
    records = receiver.receive(1.0)
    receiver.close()
    assert sorted(ledger.committed) == [0, 1, 2]
    assert set(ledger.outcomes.values()) == {"samples"}
    for group_id, samples in ledger.committed.items():
        assert [sample.episode_id for sample in samples] == list(range(group_id * 4, group_id * 4 + 4))
        assert [sample.won for sample in samples] == [True, False, True, False]
        assert [round(sample.advantage, 4) for sample in samples] == [1, -1, 1, -1]
        assert {record["worker"] for record in ledger.episodes[group_id]} == {0}
    played = [record["episode"] for record in records if record["kind"] == "episode"]
    assert sorted(record["episode_id"] for record in played) == list(range(12))
    assert sum("GRPO/AdvantageStd" in record.get("values", {}) for record in records) == 3
    assert sorted(path.name for path in (paths.run_dir / "episodes").iterdir()) == ["train-0000000.json", "train-0000006.json"]


def test_ppo_sends_each_episode_as_a_group_of_one(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = play_groups(paths, games_dir, num_groups=8, group_size=1, rl_algorithm="ppo")
    assert {len(samples) for samples in ledger.committed.values()} == {1}
    assert set(ledger.outcomes.values()) == {"samples"}
    assert len(ledger.committed) == 8


def test_a_group_without_signal_travels_without_samples(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = play_groups(paths, games_dir, num_groups=2, group_size=2, answer=lambda _request, _number: says("look"))
    assert set(ledger.outcomes.values()) == {"zero_std"}
    assert [len(records) for records in ledger.episodes.values()] == [2, 2]
    assert set(map(len, ledger.committed.values())) == {0}


def test_a_game_that_breaks_is_reported_and_the_process_goes_on(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=3, group_size=2))
    ledger.deals[1]["game_path"] = str(games_dir / "gone.z8")
    inference, ingest = FakeInference(paths, wins_half).start(), FakeIngest(paths, ledger).start()
    play(build_process(paths), lambda: ledger.is_done)
    inference.stop()
    ingest.stop()
    assert sorted(ledger.committed) == [0, 2]
    assert "gone.z8" in ledger.failed[1]


def test_at_most_two_groups_wait_for_their_ack_and_nothing_is_dropped(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=6, group_size=2))
    inference, ingest = FakeInference(paths, wins_half).start(), FakeIngest(paths, ledger, acks=False).start()
    process = build_process(paths)
    start = time.monotonic()
    play(process, lambda: len(ledger.committed) >= MAX_UNACKED and time.monotonic() - start > 3)
    ingest.stop()
    inference.stop()
    assert ledger.most_unacked == MAX_UNACKED == len(ledger.committed)


def test_no_group_is_lost_or_doubled_when_ingest_dies_and_comes_back(paths: RunPaths, games_dir: Path, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr("accerl_mp.rollout.work.RESEND_S", 0.3)
    monkeypatch.setattr("accerl_mp.rollout.work.ASK_AGAIN_S", 0.2)
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=12, group_size=2))
    inference = FakeInference(paths, wins_half).start()
    ended = threading.Event()

    def ingests() -> None:
        """Three that die right after a commit, before its ack; then one that lives."""
        for die_after in (2, 1, 3, None):
            ingest = FakeIngest(paths, ledger, die_after=die_after).start()
            while ingest._thread.is_alive() and not ended.is_set():
                time.sleep(0.02)
            ingest.stop()
            time.sleep(0.1)

    lives = threading.Thread(target=ingests)
    lives.start()
    play(build_process(paths), lambda: ledger.is_done and ledger.num_doubles >= 3)
    ended.set()
    lives.join()
    inference.stop()
    assert sorted(ledger.committed) == list(range(12))
    assert ledger.num_doubles >= 3  # each commit whose ack was lost came again
    assert ledger.most_unacked <= MAX_UNACKED


def test_a_worker_waits_for_the_first_weights(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=1, group_size=2))
    inference, ingest = FakeInference(paths, wins_half).start(), FakeIngest(paths, ledger).start()
    process = build_process(paths)
    process.board.set("policy_version", -1)
    start = time.monotonic()
    play(process, lambda: time.monotonic() - start > 1)
    inference.stop()
    ingest.stop()
    assert inference.requests == []
    assert not ledger.committed


# a process


def start_process(paths: RunPaths, **flags: Any) -> tuple[subprocess.Popen, HealthTable, Board]:
    process = build_process(paths, **flags)
    process.config.save(paths.args)
    paths.log("rollout", 0).parent.mkdir(exist_ok=True)
    table, board = HealthTable.create(paths.health, ["rollout/0"]), Board.create(paths.board)
    board.set("policy_version", 0)
    command = [sys.executable, "-m", "accerl_mp.rollout", "--run-dir", str(paths.run_dir), "--index", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL), table, board


def wait_for(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


def test_a_process_is_small_has_no_torch_and_ends_when_asked(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=4, group_size=4))
    inference, ingest = FakeInference(paths, wins_half).start(), FakeIngest(paths, ledger).start()
    process, table, board = start_process(paths)
    try:
        wait_for(lambda: ledger.is_done)
        memory_mib = psutil.Process(process.pid).memory_info().rss / 2**20
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert table.read(0).state == "running"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert table.read(0).state == "ended"
    finally:
        process.kill()
        process.wait()
        for peer in (inference, ingest):
            peer.stop()
        table.unlink()
        board.unlink()
    assert "libtorch" not in maps
    assert memory_mib < 120
    assert sorted(ledger.committed) == [0, 1, 2, 3]


def test_a_killed_process_loses_no_group(paths: RunPaths, games_dir: Path) -> None:  # noqa: F811
    ledger = Ledger(make_deals(str(games_dir / "room-2.z8"), num_groups=6, group_size=2))

    def slowly(request: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(0.02)
        return wins_half(request, number)

    inference, ingest = FakeInference(paths, slowly).start(), FakeIngest(paths, ledger).start()
    process, table, board = start_process(paths)
    try:
        wait_for(lambda: len(ledger.committed) >= 1)
        process.kill()
        process.wait()
        board.unlink()
        table.unlink()
        process, table, board = start_process(paths)
        wait_for(lambda: ledger.is_done)
    finally:
        process.kill()
        process.wait()
        for peer in (inference, ingest):
            peer.stop()
        table.unlink()
        board.unlink()
    assert sorted(ledger.committed) == list(range(6))


# the guard of env steps


def test_a_step_that_hangs_is_noticed_and_a_quick_one_is_not() -> None:
    expired: list[Step] = []
    guard = StepGuard(0.2, time.monotonic, expired.append)
    with guard("/games/quick.z8", group_id=1, game_id=2):
        time.sleep(0.02)
    time.sleep(0.4)
    assert expired == []
    with guard("/games/slow.z8", group_id=3, game_id=4):
        time.sleep(0.5)
    guard.close()
    assert [(step.path, step.group_id, step.game_id) for step in expired] == [("/games/slow.z8", 3, 4)]


HANGS = """
import sys, time
from functools import partial
from accerl_mp.rollout.guard import StepGuard, end_process
from accerl_mp.transport.process import Process, run_process

def main(process: Process) -> None:
    guard = StepGuard(0.3, time.monotonic, partial(end_process, process))
    with guard("/games/hangs.z8", group_id=8, game_id=9):
        time.sleep(60)

run_process("rollout", main)
"""


def test_a_process_whose_step_hangs_ends_and_names_the_game(paths: RunPaths) -> None:
    process = build_process(paths, env_step_timeout_s=0.3)
    process.config.save(paths.args)
    paths.log("rollout", 0).parent.mkdir()
    table, board = HealthTable.create(paths.health, ["rollout/0"]), Board.create(paths.board)
    ledger = Ledger({})
    ingest = FakeIngest(paths, ledger).start()
    try:
        code = subprocess.run(
            [sys.executable, "-c", HANGS, "--run-dir", str(paths.run_dir)], timeout=30, stderr=subprocess.DEVNULL
        ).returncode
        error = table.read(0).error
    finally:
        ingest.stop()
        table.unlink()
        board.unlink()
    assert code == EXIT_GAME_HUNG
    assert "hangs.z8" in error
    assert "--env-step-timeout-s" in ledger.failed[8]
    log = paths.log("rollout", 0).read_text()
    assert "time.sleep(60)" in log or "in main" in log


# time


def test_waiting_side_by_side_counts_once_and_without_the_work_meanwhile() -> None:
    async def run() -> dict[str, tuple[float, int, float]]:
        timer = LoopTimer()

        async def wait(seconds: float) -> None:
            with timer.waiting("reply"):
                await asyncio.sleep(seconds)

        async def work() -> None:
            await asyncio.sleep(0.05)
            with timer.phase("env"):
                time.sleep(0.1)

        started = time.perf_counter()
        await asyncio.gather(wait(0.3), wait(0.3), wait(0.2), work())
        return timer.take() | {"all": (time.perf_counter() - started, 1, 0.0)}

    phases = asyncio.run(run())
    wall_s, env_s, reply_s = (phases[name][0] for name in ("all", "env", "reply"))
    assert env_s >= 0.1
    assert reply_s >= 0.1, "at least what is left of 0.3 s beside the work"
    # A busy machine stretches each part, but not their sum: counted side by side, or with the work, it would be above the wall time.
    assert env_s + reply_s <= wall_s
