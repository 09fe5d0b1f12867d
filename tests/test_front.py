"""Requests through pushes at random moments, with an engine of the test's own: tokens, versions, salts, the order of outputs."""

import asyncio
import contextlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accerl_mp.config import SyncConfig
from accerl_mp.inference.control import PushControl
from accerl_mp.inference.front import Reply, RequestFront
from accerl_mp.inference.order import OutputOrder
from accerl_mp.inference.replies import EngineLost, Generation, ReplyCollector
from accerl_mp.inference.supported import warning_of

NUM_PUSHES, NUM_REQUESTS = 12, 20


class ScriptedEngine:
    """Steps like vLLM: each running request gets a token that names its place, with the version in use as its logprob.

    A finished request reaches its waiter some steps late, as over a socket, and a step is always in flight.
    """

    num_workers = 1
    has_whole_graphs = False

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.version = -1
        self.is_paused = False
        self.salts: list[str] = []
        self.num_sampled = 0
        self._running: dict[str, dict[str, Any]] = {}
        self._waiting: list[dict[str, Any]] = []
        self._held = False
        self._done: list[dict[str, Any]] = []

    async def generate(self, key: str, ids: list[int], *, max_tokens: int, temperature: float, salt: str, seed: int | None = None) -> Any:
        self.salts.append(salt)
        request = {"key": key, "start": len(ids), "left": max_tokens, "ids": [], "logprobs": [], "reason": ""}
        request["future"] = asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        return await request["future"]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            if not self.is_paused:
                self._step()
            if not self._held:
                self._deliver()

    def _step(self) -> None:
        while self._waiting and len(self._running) < 6:
            request = self._waiting.pop(0)
            self._running[request["key"]] = request
        for request in list(self._running.values()):
            if self._random.random() < 0.8:
                request["ids"].append(request["start"] + len(request["ids"]))
                self.num_sampled += 1
                request["logprobs"].append(float(self.version))
                request["left"] -= 1
            if request["left"] == 0:
                self._end(request, "length")

    def _end(self, request: dict[str, Any], reason: str) -> None:
        self._running.pop(request["key"], None)
        request["reason"] = reason
        self._done.append(request)

    def _deliver(self) -> None:
        for request in self._done:
            if not request["future"].done():
                fields = {"ids": request["ids"], "logprobs": request["logprobs"], "finish_reason": request["reason"]}
                request["future"].set_result(SimpleNamespace(num_cached_tokens=0, **fields))
        self._done = []

    async def pause(self, *, mode: str, clear_cache: bool) -> None:
        await asyncio.sleep(0)
        self.is_paused = True
        if mode == "abort":
            for request in [*self._running.values(), *self._waiting]:
                self._end(request, "abort")
            self._waiting = []

    async def resume(self) -> None:
        self.is_paused = False
        await asyncio.sleep(0)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        await asyncio.sleep(0)
        return [{"state": "received", "version": 0, "error": ""}]

    @contextlib.asynccontextmanager
    async def swapped(self, version: int) -> Any:
        """Between two steps; then generation goes on while the answer travels, but what it makes is held back."""
        await asyncio.sleep(0)
        self._deliver()
        self.version = version
        counts = {key: len(request["ids"]) for key, request in self._running.items()}
        self._held = True
        try:
            for _ in range(int(self._random.integers(1, 6))):
                await asyncio.sleep(0)
            yield [{"time": 0.0, "seconds": 0.001, "path": "layerwise", "reason": ""}], counts
        finally:
            self._held = False


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("settings", [{}, {"sync_mode": "drain"}, {"kv_on_sync": "recompute"}, {"sync_staging": "off"}], ids=str)
def test_no_token_is_lost_doubled_or_mislabelled(settings: dict[str, Any], seed: int) -> None:
    replies, engine = asyncio.run(_play(SyncConfig(**settings), seed))
    mixed = 0
    for prompt, max_tokens, reply in replies:
        assert reply.ids == list(range(len(prompt), len(prompt) + max_tokens)), "each place once, in order"
        assert reply.versions == [int(logprob) for logprob in reply.logprobs], "the version that sampled it"
        assert reply.finish_reason == "length"
        mixed += len(set(reply.versions)) > 1
    assert mixed >= 5, "pushes must hit replies in the middle"
    assert engine.num_sampled == sum(len(reply.ids) for _, _, reply in replies), "no token was thrown away"
    assert not engine.is_paused


async def _play(sync: SyncConfig, seed: int) -> tuple[list[tuple[list[int], int, Reply]], ScriptedEngine]:
    engine, random = ScriptedEngine(seed), np.random.default_rng(seed + 100)
    front = RequestFront(engine, run_id="run", salt_scope=sync.prefix_cache_scope)  # type: ignore[arg-type]
    control = PushControl(engine, front, session="s", sync=sync)  # type: ignore[arg-type]
    loop = asyncio.create_task(engine.run())

    async def ask(delay: int) -> tuple[list[int], int, Reply]:
        for _ in range(delay):
            await asyncio.sleep(0)
        prompt, max_tokens = [0] * int(random.integers(1, 9)), int(random.integers(1, 60))
        return prompt, max_tokens, await front.reply(prompt, max_tokens=max_tokens, temperature=1.0, salt_version=-1)

    asked = [asyncio.create_task(ask(int(random.integers(0, 400)))) for _ in range(NUM_REQUESTS)]
    for version in range(NUM_PUSHES):
        assert (await control.answer("begin", {"version": version, "runs": [], "with_sums": False}))["error"] is None
        assert (await control.answer("swap", {"version": version}))["error"] is None
        if version == 0:
            await control.answer("open", {})
        for _ in range(int(random.integers(1, 60))):
            await asyncio.sleep(0)
    replies = await asyncio.gather(*asked)
    loop.cancel()
    return replies, engine


@pytest.mark.parametrize(("scope", "expected"), [("episode", [0, 0, 1]), ("version", [0, 1, 1])])
def test_the_cache_is_keyed_by_the_version_of_the_scope(scope: str, expected: list[int]) -> None:
    """A request before a push, the same episode's next one after it, and another episode's first."""

    async def play() -> ScriptedEngine:
        engine = ScriptedEngine(0)
        front = RequestFront(engine, run_id="run", salt_scope=scope)  # type: ignore[arg-type]
        loop = asyncio.create_task(engine.run())
        front.ledger.cut({}, 0)
        front.release()
        first = await front.reply([1], max_tokens=2, temperature=1.0, salt_version=-1)
        front.ledger.cut({}, 1)
        await front.reply([1, 2], max_tokens=2, temperature=1.0, salt_version=first.salt_version)
        await front.reply([1], max_tokens=2, temperature=1.0, salt_version=-1)
        loop.cancel()
        return engine

    assert asyncio.run(play()).salts == [f"run-{version}" for version in expected]


@pytest.mark.parametrize("seed", [None, 5, 2**32 - 1, -7, 2**80])
def test_each_part_of_an_aborted_reply_has_a_seed_of_its_own(seed: int | None) -> None:
    """A stranger's number too becomes one that vLLM can take: 32 bits."""
    given: list[int | None] = []

    class Aborting:
        async def generate(self, _key: str, ids: list[int], *, seed: int | None, **_: Any) -> Generation:
            given.append(seed)
            is_last = len(given) == 3
            return Generation([9], [-1.0], "stop" if is_last else "abort", 0)

    async def play() -> Reply:
        front = RequestFront(Aborting(), run_id="run", salt_scope="episode")  # type: ignore[arg-type]
        front.ledger.cut({}, 0)
        front.release()
        return await front.reply([1], max_tokens=8, temperature=1.0, salt_version=-1, seed=seed)

    assert asyncio.run(play()).ids == [9, 9, 9]
    assert given == [None] * 3 if seed is None else len(set(given)) == 3
    assert all(one is None or 0 <= one < 2**32 for one in given)


class FakeLLM:
    """The parts of AsyncLLM that OutputOrder touches: a queue and the task that empties it."""

    def __init__(self) -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.engine_core = SimpleNamespace(outputs_queue=queue, get_output_async=queue.get)
        self.errored = False
        self.seen: list[float] = []
        self.output_handler: Any = None

    async def handle(self) -> None:
        while True:
            outputs = await self.engine_core.get_output_async()
            await asyncio.sleep(0)
            self.seen.append(outputs.timestamp)

    def put(self, *times: float) -> None:
        for time in times:
            self.engine_core.outputs_queue.put_nowait(SimpleNamespace(timestamp=time, outputs=[]))


@pytest.mark.parametrize("late", [0, 1, 5])
def test_outputs_before_the_swap_pass_and_later_ones_wait(late: int) -> None:
    async def play() -> None:
        llm = FakeLLM()
        order = OutputOrder(llm)
        llm.output_handler = asyncio.create_task(llm.handle())
        llm.put(0.5)
        for _ in range(late):
            await asyncio.sleep(0)
        with order.held():
            llm.put(1.0, 2.0, 3.0, 4.0)
            for _ in range(late):
                await asyncio.sleep(0)
            assert [time for time in llm.seen if time > 0.5] == []
            await order.let_through(until=2.5)
            assert llm.seen == [0.5, 1.0, 2.0]
            llm.put(5.0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert llm.seen == [0.5, 1.0, 2.0]
        for _ in range(20):
            await asyncio.sleep(0)
        assert llm.seen == [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
        with order.held():
            await order.let_through(until=math.inf)
        llm.output_handler.cancel()

    asyncio.run(asyncio.wait_for(play(), 20))


def core_output(request_id: str, ids: list[int], *, reason: str | None = None, num_cached: int | None = None) -> SimpleNamespace:
    """An EngineCoreOutput; a token's logprob is minus its id."""
    logprobs = SimpleNamespace(logprobs=-np.array(ids, np.float32)[:, None]) if ids else None
    prefill = None if num_cached is None else SimpleNamespace(num_cached_tokens=num_cached)
    return SimpleNamespace(request_id=request_id, new_token_ids=ids, new_logprobs=logprobs, prefill_stats=prefill, finish_reason=reason)


def test_replies_grow_output_by_output_and_others_are_left_alone() -> None:
    async def play() -> None:
        replies = ReplyCollector()
        first, second = replies.expect("a-0"), replies.expect("b-1")
        steps = [
            [core_output("a-0", [5], num_cached=7), core_output("probe-x", [1])],
            [core_output("b-1", [8], num_cached=0), core_output("a-0", [6, 7])],
            [core_output("a-0", [], reason="abort"), core_output("b-1", [9], reason="stop"), core_output("gone", [3], reason="stop")],
        ]
        left = []
        for number, step in enumerate(steps):
            outputs = SimpleNamespace(outputs=step)
            replies.take(outputs)
            left.append([output.request_id for output in outputs.outputs])
            assert (first.done(), second.done()) == (number == 2, number == 2)
        assert left == [["probe-x"], [], ["gone"]]
        assert await first == Generation([5, 6, 7], [-5.0, -6.0, -7.0], "abort", 7)
        assert await second == Generation([8, 9], [-8.0, -9.0], "stop", 0)

    asyncio.run(asyncio.wait_for(play(), 20))


def test_whoever_waits_for_a_dead_engine_hears_of_it_and_one_that_left_is_forgotten() -> None:
    async def play() -> None:
        async def dies() -> Any:
            raise OSError("its socket is gone")

        order = OutputOrder(SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=None, get_output_async=dies)))
        waiting, left = order.replies.expect("a-0"), order.replies.expect("b-1")
        left.cancel()
        order.replies.forget("b-1")
        late = SimpleNamespace(outputs=[core_output("b-1", [3], reason="stop")])
        order.replies.take(late)
        assert len(late.outputs) == 1
        with pytest.raises(OSError, match="socket is gone"):
            await order._get()
        with pytest.raises(EngineLost):
            await waiting

    asyncio.run(asyncio.wait_for(play(), 20))


@pytest.mark.parametrize(
    ("version", "known"), [("0.24.0", True), ("0.32.1.dev3", True), ("0.23.9", False), ("0.33.0rc1", False), ("1.0", False)]
)
def test_other_vllm_versions_are_warned_about_by_name(version: str, known: bool) -> None:
    warning = warning_of(version)
    assert (warning == "") is known
    assert known or (version in warning and "0.24 to 0.32" in warning)
