"""No wait without an end: what the source calls, and what becomes of waits whose other side never comes."""

import ast
import asyncio
import itertools
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accerl_mp.config import Config
from accerl_mp.inference.pulse import watch_pulse
from accerl_mp.topology import RunPaths
from accerl_mp.trainer import saving
from accerl_mp.transport import health as transport_health
from accerl_mp.transport import sockets
from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.weight_sync.aside import Aside
from accerl_mp.weight_sync.replicas import Replicas

PACKAGE = Path(__file__).parent.parent / "accerl_mp"

WITHOUT_LIMIT = {
    # Named waits with no deadline of their own (timeout_s=0), each with what ends it.
    ("ingest/loop.py", "waiting"): "idle turns of 0.2 s; a run that starves ends at the trainer's --replay-sample-timeout-seconds",
    ("stats/__main__.py", "waiting"): "idle turns of 1 s: nobody waits for stats",
    ("inference/server.py", "waiting"): "looks round four times a second; the trainer's --inference-start-timeout-s is the limit",
    ("trainer/ranks.py", "waiting"): "a collective that a rank never reaches: the supervisor names it (--step-timeout-s)",
    ("weight_sync/patience.py", "waiting"): "its loop ends after 10 s",
    ("weight_sync/sender.py", "waiting"): "for a thread whose own waits have --sync-timeout-s, stage by stage",
    # Calls that block without a timeout.
    ("rollout/worker.py", "wait"): "inside of wait_for",
    ("inference/server.py", "recv_multipart"): "a coroutine: cancelled when any other part of the process ends",
    ("inference/order.py", "wait"): "the gate opens in a `finally`, whatever becomes of the swap",
    ("inference/front.py", "wait"): "the rollout's --request-timeout-s ends it",
    ("inference/engine.py", "get"): "the same, or the engine's death, or `pulse.py`",
    ("transport/channels.py", "recv"): "after a poll, and with DONTWAIT",
    ("transport/loop.py", "recv_multipart"): "with DONTWAIT",
    ("transport/sockets.py", "recv_multipart"): "after a poll that says that there is something",
    ("weight_sync/replicas.py", "recv"): "after a poll that says that there is something",
    ("weight_sync/buckets.py", "get"): "a side thread: the main thread's wait has --sync-timeout-s, and closes the queue",
    ("weight_sync/group.py", "wait"): "side threads: the group's own timeout, or abort()",
    ("weight_sync/verdict.py", "wait"): "after is_completed()",
    ("transport/process.py", "join"): "the heartbeat looks every second",
    ("launcher/rank.py", "waitpid"): "after SIGKILL",
    ("debugging.py", "flock"): "another debugger has the terminal: a person is at it",
    ("launcher/prepare.py", "wait"): "the demo's games are made, with a progress bar, before a run begins: Ctrl+C ends it",
    ("tools/sft.py", "wait"): "ranks that were asked to end; a tool, Ctrl+C ends it",
}
"""(module, call): why it may. Anything else needs a limit."""

_SOCKETS_AND_QUEUES = {
    "recv",
    "recv_multipart",
    "recv_string",
    "recv_json",
    "join",
    "wait",
    "get",
    "acquire",
    "waitpid",
    "flock",
    "communicate",
}


def endless_calls() -> Iterator[tuple[str, str, int]]:
    """(module, call, line) of calls that could wait for ever."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_endless(node, node.func.attr):
                yield module, node.func.attr, node.lineno


def is_endless(call: ast.Call, name: str) -> bool:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "waiting":
        # With a subject alone it is a LoopTimer's, which measures.
        limit = options.get("timeout_s", ast.unparse(call.args[1]) if len(call.args) > 1 else "measured")
        return limit in ("0", "0.0")
    if name in ("join", "get", "wait", "acquire"):
        # `", ".join(words)`, `mapping.get(key)` and `event.wait(seconds)` have an argument.
        return not call.args and not options
    if name == "waitpid":
        return "WNOHANG" not in ast.unparse(call)
    if name == "flock":
        return "LOCK_NB" not in ast.unparse(call) and "LOCK_UN" not in ast.unparse(call)
    if name == "communicate":
        return "timeout" not in options
    return name in _SOCKETS_AND_QUEUES


def test_every_call_that_could_wait_for_ever_is_known_and_has_a_reason() -> None:
    found = {(module, name): line for module, name, line in endless_calls()}
    unknown = {f"accerl_mp/{module}:{line}: {name}" for (module, name), line in found.items() if (module, name) not in WITHOUT_LIMIT}
    assert not unknown, f"without a limit, and without a reason in WITHOUT_LIMIT: {sorted(unknown)}"
    assert not WITHOUT_LIMIT.keys() - found.keys(), "reasons for what is no more"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("socket.recv()", True),
        ("thread.join()", True),
        ("', '.join(words)", False),
        ("thread.join(timeout=5)", False),
        ("queue.get()", True),
        ("names.get('a')", False),
        ("health.waiting('x', 0)", True),
        ("health.waiting('x', timeout_s=0)", True),
        ("health.waiting('x', timeout_s=limit_s)", False),
        ("os.waitpid(pid, 0)", True),
        ("os.waitpid(pid, os.WNOHANG)", False),
        ("event.wait()", True),
    ],
)
def test_the_scan_knows_an_endless_call_when_it_sees_one(source: str, expected: bool) -> None:
    call = ast.parse(source).body[0].value  # type: ignore[attr-defined]
    assert is_endless(call, call.func.attr) is expected


def test_the_libraries_limits_are_longer_than_ours() -> None:
    """So that ours speak first, and name who waited for whom."""
    from accerl_mp.trainer.ranks import COLLECTIVE_TIMEOUT

    config = Config()
    assert config.metrics.hang_timeout_s < config.metrics.step_timeout_s < COLLECTIVE_TIMEOUT.total_seconds()
    assert config.metrics.hang_timeout_s < config.sync.sync_timeout_s, "a stuck vLLM is started again before a push gives up"


# The other side never comes


def test_a_vllm_that_accepts_calls_and_never_answers_is_named_with_the_flag(tmp_path: Path) -> None:
    paths, context = RunPaths(tmp_path), sockets.new_context()
    router = sockets.bind_router(context, paths, "control", 0)
    table = HealthTable.detached(["trainer/0", "inference/0"])
    health = Health("trainer/0", table=table, board=Health.detached().board)
    replicas = Replicas(paths, health, 1)
    with pytest.raises(DeadlineExpired) as caught:
        replicas.call("status", timeout_s=0.5, flag="--sync-timeout-s")
    expected = r"trainer/0 waited \d+ s for inference/0 to answer 'status'; --sync-timeout-s sets this limit"
    assert re.fullmatch(expected, str(caught.value))
    assert router.poll(1000), "it did accept the call"
    replicas.close()
    context.destroy(linger=0)
    paths.sockets.joinpath("control-0").unlink()
    paths.sockets.rmdir()


class DeafEngine:
    """vLLM's front lives, its loop answers `num_answers` times and then no more."""

    def __init__(self, num_answers: int) -> None:
        self.num_asked, self._num_answers = 0, num_answers

    async def call_workers(self, method: str, *_args: Any) -> list[Any]:
        assert method == "check_health"
        self.num_asked += 1
        if self.num_asked > self._num_answers:
            await asyncio.sleep(3600)
        return [None]


def test_a_vllm_whose_loop_has_stopped_ends_its_process_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accerl_mp.inference.pulse._EVERY_S", 0.01)
    health, engine = Health.detached("inference/0"), DeafEngine(3)
    with pytest.raises(DeadlineExpired, match=r"inference/0 waited \d+ s for vLLM's loop and workers to answer; --hang-timeout-s"):
        asyncio.run(watch_pulse(engine, health, timeout_s=0.5))  # type: ignore[arg-type]
    assert engine.num_asked == 4


def test_a_wait_that_is_looked_at_counts_as_moving() -> None:
    health = Health.detached("rollout/0")
    before = health.table.snapshot()[0].num_ticks
    with health.waiting("anything", 10) as wait:
        for _ in range(3):
            wait.check()
    assert health.table.snapshot()[0].num_ticks == before + 3


def test_a_side_threads_wait_is_no_sign_of_the_loop() -> None:
    """Rank 0's push goes on while its main thread is stuck: the watchdog must see that."""
    health = Health.detached("trainer/0")
    before = health.table.snapshot()[0].num_ticks

    def push() -> None:
        with health.waiting("inference to receive a push", 10) as wait:
            for _ in range(3):
                wait.check()

    thread = threading.Thread(target=push)
    thread.start()
    thread.join(10)
    assert health.table.snapshot()[0].num_ticks == before


def test_every_named_wait_of_the_source_says_what_it_waits_for() -> None:
    """`waiting("")` would be shown as no wait at all."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "waiting":
                assert node.args, f"{path}:{node.lineno}"
                assert ast.unparse(node.args[0]) not in ("''", '""'), f"{path}:{node.lineno}"


def test_warnings_come_at_30_seconds_and_double_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    health, clock = Health.detached(), itertools.count(1000.0, 7.0)
    monkeypatch.setattr(health.table, "clock", lambda: next(clock))
    started = time.monotonic()
    with health.waiting("a peer", 0) as wait:
        for _ in range(200):
            wait.check()
    assert time.monotonic() - started < 60
    assert 4 <= len(caplog.records) <= 7


@pytest.mark.parametrize("grows", [True, False])
def test_a_state_that_is_being_written_is_waited_for_as_long_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, grows: bool
) -> None:
    """The supervisor takes a rank for stuck whose loop does not tick for --step-timeout-s: not one with a large state and a slow disk."""
    monkeypatch.setattr(saving, "_LOOK_S", 0.01)
    monkeypatch.setattr(transport_health, "_FIRST_WARNING_S", 0.05)
    saver = object.__new__(saving.Saver)
    saver._folder, saver._health = tmp_path / "resume", Health.detached("trainer/0")
    part, is_over = saver._folder / ".state.new" / "__0_0.distcp", threading.Event()
    part.parent.mkdir(parents=True)

    def write() -> None:
        with part.open("wb", buffering=0) as file:
            while not is_over.wait(0.02):
                file.write(b"x" * grows)

    saver._thread = threading.Thread(target=write)
    saver._thread.start()
    assert not saver.finish(0.6), "the deadline"
    is_over.set()
    assert saver.finish()
    table = saver._health.table
    num_ticks = table.word(table.row_of("trainer/0"), "num_ticks")
    assert num_ticks > 10 if grows else num_ticks <= 4
    assert "for its state to be written" in caplog.text


def test_states_that_are_removed_meanwhile_do_not_disturb_who_looks_how_they_grow(tmp_path: Path) -> None:
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            for number in range(20):
                (tmp_path / f"{number}").mkdir()
                (tmp_path / f"{number}" / "file").touch()
            for number in range(20):
                shutil.rmtree(tmp_path / f"{number}")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        (tmp_path / "stays").write_bytes(b"123")
        assert {saving._bytes_below(tmp_path) for _ in range(1000)} == {3}
    finally:
        is_over.set()
        thread.join()


def test_work_aside_that_goes_on_is_not_said_to_have_failed() -> None:
    gate = threading.Event()
    work = Aside(lambda: gate.wait(30), "weights-test")
    work.join(0.01)
    with pytest.raises(RuntimeError, match="weights-test has not ended in time"):
        work.result()
    gate.set()
    work.join(30)
    assert work.result()
