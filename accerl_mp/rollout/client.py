"""Asks inference for replies. An episode stays with one replica, whose prefix cache holds what it has played so far."""

import asyncio
import itertools
import logging
from array import array
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from accerl_mp.rollout.episode import Reply
from accerl_mp.rollout.loop_timer import LoopTimer
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import MessageError
from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.health import Health, Wait
from accerl_mp.transport.loop import LoopSocket

MAX_DEADLINES = 3
"""Deadlines that a turn may miss before this process gives up, while the engine runs."""
MAX_ABORTS = 20
"""Aborted replies of a turn after which it is given back as aborted."""
MAX_ERRORS = 3
"""Error replies that a turn may get: a dying engine gives one, and so does a request that it will never take."""
_FINISH_REASONS = ("stop", "length", "abort")
_POLL_S = 0.2
_ERROR_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class InferenceError(RuntimeError):
    """Inference refused a request, or answered something that is no reply."""


@dataclass(slots=True)
class _Request:
    replica: int
    answer: asyncio.Future[Reply | None]
    """None: ask again, the engine was started anew."""
    wait: Wait | None = None


@dataclass(slots=True)
class _Tries:
    num_deadlines: int = 0
    num_aborts: int = 0
    num_errors: int = 0


class InferenceClient:
    """One DEALER a replica.

    waits for      a reply, at most `--request-timeout-s`; then the turn is submitted again, under a new id
    unblocked by   the reply
    when full      it cannot be: a process has at most `--rollout-batch-size` requests open
    at the end     the waits raise Closed; `close()`
    a dead engine  its successor says hello, or shows up in the health table under another pid: its turns are submitted again
    """

    def __init__(self, paths: RunPaths, health: Health, timer: LoopTimer, *, num_replicas: int, timeout_s: float) -> None:
        self._health, self._timer, self._timeout_s = health, timer, timeout_s
        self._context = sockets.new_context()
        self._sockets = [
            LoopSocket(
                sockets.connect_dealer(self._context, paths, channels.REQUESTS, identity=health.name, index=index),
                partial(self._take, index),
            )
            for index in range(num_replicas)
        ]
        self._pids = [self._pid(index) for index in range(num_replicas)]
        self._requests: dict[int, _Request] = {}
        self._ids = itertools.count()
        self.num_resubmitted = 0
        """Turns submitted again so far."""

    async def run(self) -> None:
        """Watches over what is asked until cancelled; Closed or PeerLost at the run's end. Whoever calls `generate` keeps this running."""
        while True:
            await asyncio.sleep(_POLL_S)
            self._check_waits()
            for socket in self._sockets:
                socket.check()
            for replica, pid in enumerate(self._pids):
                self._pids[replica] = self._pid(replica)
                if pid not in (0, self._pids[replica]):
                    self._ask_again(replica)

    async def generate(
        self, *, episode_id: int, prompt: list[int], max_tokens: int, temperature: float, salt_version: int, seed: int | None = None
    ) -> Reply:
        """A turn's reply, submitted as often as it takes. An aborted one comes back only if the engine aborts again and again."""
        replica = episode_id % len(self._sockets)
        message = {
            "episode_id": episode_id,
            "prompt": array("i", prompt).tobytes(),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "salt_version": salt_version,
            "seed": seed,
        }
        tries = _Tries()
        while True:
            try:
                reply = await self._ask(replica, message)
            except DeadlineExpired:
                tries.num_deadlines += self._is_running(replica)
                if tries.num_deadlines >= MAX_DEADLINES:
                    raise
            except InferenceError as error:
                tries.num_errors += 1
                if tries.num_errors >= MAX_ERRORS:
                    raise
                _log.warning("inference/%d refused a turn of episode %d: %s", replica, episode_id, error)
                await asyncio.sleep(_ERROR_PAUSE_S)
            else:
                if reply is not None:
                    tries.num_aborts += reply.is_aborted
                    if not reply.is_aborted or tries.num_aborts >= MAX_ABORTS:
                        return reply
                    await asyncio.sleep(0.01 * tries.num_aborts)
            self.num_resubmitted += 1

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    async def _ask(self, replica: int, message: dict[str, Any]) -> Reply | None:
        """Submit once, under an id of its own: a late answer to an earlier try is dropped."""
        request_id, request = next(self._ids), _Request(replica, asyncio.get_running_loop().create_future())
        self._requests[request_id] = request
        episode_id = message["episode_id"]
        played = f"episode {episode_id}" if episode_id < channels.EVAL_BASE else "an evaluation"
        what = f"inference/{replica} to reply to {played}"
        try:
            self._sockets[replica].send(channels.pack("request", {"id": request_id, **message}))
            with (
                self._timer.waiting("reply"),
                self._health.waiting(what, self._timeout_s, flag="--request-timeout-s", peer=f"inference/{replica}") as request.wait,
            ):
                return await request.answer
        finally:
            del self._requests[request_id]

    def _take(self, replica: int, frames: list[bytes]) -> None:
        """A message has come."""
        try:
            message = channels.unpack("reply", b"".join(frames))
        except MessageError as error:
            _log.error("inference/%d sent a reply that is none, its turn is asked again at its deadline: %s", replica, error)
            return
        request = self._requests.get(message["id"])
        if request is None or request.answer.done():
            return  # an answer to an earlier try
        try:
            request.answer.set_result(_reply(message))
        except InferenceError as error:
            request.answer.set_exception(error)

    def _check_waits(self) -> None:
        """One look at all deadlines: a timer a request would cost as much as its messages."""
        for request in list(self._requests.values()):
            if request.wait is not None and not request.answer.done():
                try:
                    request.wait.check()
                except DeadlineExpired as error:
                    request.answer.set_exception(error)

    def _ask_again(self, replica: int) -> None:
        requests = [request for request in self._requests.values() if request.replica == replica and not request.answer.done()]
        _log.info("inference/%d was started anew: %d turns are submitted again", replica, len(requests))
        for request in requests:
            request.answer.set_result(None)

    def _pid(self, replica: int) -> int:
        """Of the replica's process; 0 where the run has no health table (tests, tools)."""
        table, name = self._health.table, f"inference/{replica}"
        return int(table.word(table.row_of(name), "pid")) if name in table.names else 0

    def _is_running(self, replica: int) -> bool:
        """False while it is down or starting: that has limits of its own, which the supervisor watches."""
        table, name = self._health.table, f"inference/{replica}"
        return name not in table.names or table.read(table.row_of(name)).state == "running"


def _reply(message: dict[str, Any]) -> Reply:
    if message["error"] is not None:
        raise InferenceError(message["error"])
    try:
        ids = np.frombuffer(message["ids"], np.int32)
        logprobs = np.frombuffer(message["logprobs"], np.float32)
        versions = np.frombuffer(message["versions"], np.int32)
    except ValueError as error:
        raise InferenceError(f"a reply whose arrays are cut: {error}") from error
    if not len(ids) == len(logprobs) == len(versions):
        raise InferenceError(f"a reply of {len(ids)} tokens came with {len(logprobs)} logprobs and {len(versions)} versions")
    if not np.isfinite(logprobs).all() or (ids < 0).any() or (versions < 0).any():
        numbers = f"ids {ids.tolist()}, logprobs {logprobs.tolist()}, versions {versions.tolist()}"
        raise InferenceError(f"a reply with impossible numbers: {numbers}")
    if message["finish_reason"] not in _FINISH_REASONS:
        raise InferenceError(f"a reply that finished for the reason {message['finish_reason']!r}")
    return Reply(
        ids=ids, logprobs=logprobs, versions=versions, finish_reason=message["finish_reason"], salt_version=message["salt_version"]
    )
