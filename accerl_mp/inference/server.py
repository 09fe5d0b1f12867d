"""The sockets of an inference process and its one event loop.

Each request is answered by a task of its own, so that vLLM batches them all. Beside them three tasks: control calls, a watch that
ends the process with the run or with the engine, and one that ends it when vLLM lives but does not answer (`pulse.py`).
"""

import asyncio
import time
from array import array
from typing import Any

import numpy as np

from accerl_mp.inference.control import PushControl
from accerl_mp.inference.engine import Engine, EngineError
from accerl_mp.inference.front import FrontCounts, RequestFront
from accerl_mp.inference.pulse import watch_pulse
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import CONTROL, REQUESTS, MessageError, MetricsSender
from accerl_mp.transport.loop import LoopSocket
from accerl_mp.transport.process import Process
from accerl_mp.weight_sync import protocol

_WATCH_S = 0.25
_METRICS_EVERY = 4
"""Watches between two metric records."""


class InferenceServer:
    """One engine behind two ROUTER sockets."""

    def __init__(self, process: Process, engine: Engine) -> None:
        sync = process.config.sync
        self._process, self._engine = process, engine
        self._front = RequestFront(engine, run_id=process.paths.run_id, salt_scope=sync.prefix_cache_scope)
        session = f"{process.name} {time.time_ns()}"
        self._control = PushControl(engine, self._front, session=session, sync=sync)
        self._answering: set[asyncio.Task] = set()
        self._broken: BaseException | None = None

    async def run(self) -> None:
        """Serve until the run ends (raises Closed) or fails (PeerLost), or the engine dies (EngineError)."""
        process, context, plain = self._process, sockets.new_async_context(), sockets.new_context()
        self._requests = LoopSocket(sockets.bind_router(plain, process.paths, REQUESTS, process.index), self._take)
        self._calls = sockets.bind_router(context, process.paths, CONTROL, process.index)
        metrics = MetricsSender(process.paths, process.name)
        process.health.set_state("running")
        pulse = watch_pulse(self._engine, process.health, timeout_s=process.config.metrics.hang_timeout_s)
        tasks = [asyncio.create_task(loop) for loop in (self._serve_control(), self._watch(metrics), pulse)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel([*tasks, *self._answering])
            metrics.close()
            self._requests.close()
            plain.destroy(linger=0)
            context.destroy(linger=0)

    def _take(self, message: list[bytes]) -> None:
        identity, *frames = message
        data = frames[0] if len(frames) == 1 else b""  # anything else is no request, and is answered so
        task = asyncio.create_task(self._answer(identity, data))
        self._answering.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task) -> None:
        self._answering.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()  # a fault of ours: `_watch` ends the process with it

    async def _answer(self, identity: bytes, data: bytes) -> None:
        """Every request gets an answer, an error if need be."""
        start, number, counts = time.monotonic(), -1, self._front.counts
        try:
            request = channels.unpack_any(data)
            number = _number_of(request)
            channels.check("request", request)
            reply = await self._front.reply(
                np.frombuffer(request["prompt"], np.int32),
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                salt_version=request["salt_version"],
                seed=request["seed"],
            )
        except (MessageError, EngineError, ValueError) as error:
            counts.num_errors += 1
            self._requests.send(identity, _error_reply(number, f"{type(error).__name__}: {error}"))
            return
        counts.add_reply(len(reply.ids), time.monotonic() - start)
        message = {
            "id": number,
            "ids": array("i", reply.ids).tobytes(),
            "logprobs": array("f", reply.logprobs).tobytes(),
            "versions": array("i", reply.versions).tobytes(),
            "finish_reason": reply.finish_reason,
            "salt_version": reply.salt_version,
            "error": None,
        }
        self._requests.send(identity, channels.pack("reply", message))

    async def _serve_control(self) -> None:
        """Waits for the trainer's calls, without a limit, and answers them one after the other."""
        while True:
            identity, *frames = await self._calls.recv_multipart()
            try:
                op, number, fields = protocol.unpack_call(b"".join(frames))
            except MessageError:
                continue  # no number, so no way to answer
            answer = await self._control.answer(op, fields)
            await self._calls.send_multipart([identity, protocol.pack_answer(number, answer)])

    async def _watch(self, metrics: MetricsSender) -> None:
        """Look at the run and at the engine four times a second; report once a second from the first push on."""
        counts = self._front.counts
        with self._process.health.waiting("trainer/0 to push the first weights", 0):
            while not self._control.is_open:
                await self._look()
        counts.reset()
        while True:
            for _ in range(_METRICS_EVERY):
                await self._look()
            metrics.values(_tags(counts, num_running=len(self._front.ledger)))
            counts.reset()

    async def _look(self) -> None:
        health = self._process.health
        health.tick()
        health.check()
        self._requests.check()
        if self._broken is not None:
            raise self._broken
        if self._engine.is_dead:
            raise EngineError("vLLM's engine has died; its own messages are in this log")
        await asyncio.sleep(_WATCH_S)


def _tags(counts: FrontCounts, *, num_running: int) -> dict[str, channels.Value]:
    seconds, num_replies = time.monotonic() - counts.started, counts.num_replies
    tags: dict[str, channels.Value] = {
        "Infer/TokensPerSec": (counts.num_tokens, seconds, counts.num_tokens / seconds),
        "Infer/RequestsPerSec": (num_replies, seconds, num_replies / seconds),
        "Infer/RunningRequestsMean": num_running,
    }
    if num_replies:
        tags["Infer/ReplyTokensMean"] = (counts.num_tokens, num_replies, counts.num_tokens_max)
        tags["Infer/ReplySecondsMean"] = (counts.reply_seconds, num_replies, counts.reply_seconds_max)
        tags["Infer/PrefixCacheHitRate"] = (counts.num_cached_tokens, counts.num_prompt_tokens, 0.0)
    if counts.num_aborted:
        tags["Infer/AbortedReplies"] = counts.num_aborted
    if counts.num_errors:
        tags["Infer/FailedRequests"] = counts.num_errors
    return tags


def _number_of(request: dict[str, Any]) -> int:
    """The request's id even where the rest of it is wrong; -1 if there is none."""
    number = request.get("id")
    return number if isinstance(number, int) else -1


def _error_reply(number: int, error: str) -> bytes:
    empty: dict[str, Any] = {"ids": b"", "logprobs": b"", "versions": b"", "finish_reason": "abort", "salt_version": -1}
    return channels.pack("reply", {"id": number, "error": error} | empty)


async def _cancel(tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
