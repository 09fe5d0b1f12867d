"""The inference side of a push: the calls of weight_sync/protocol.py, one at a time, in the order in which they come."""

import logging
import os
import time
from typing import Any

from accerl_mp.inference.engine import Engine
from accerl_mp.inference.front import RequestFront
from accerl_mp.weight_sync.protocol import FAILED, PROGRESS

_log = logging.getLogger(__name__)


class PushControl:
    """Answers trainer rank 0. Nothing here waits for the trainer; each call ends by itself or by its caller's deadline."""

    def __init__(self, engine: Engine, front: RequestFront, *, session: str, sync_mode: str, kv_on_sync: str) -> None:
        self._engine, self._front = engine, front
        self._session = session
        self._pause_mode = "abort" if sync_mode == "drain" else "keep"
        # A drained engine has no request whose KV could stay, and the reference clears the cache at each push.
        self._clears_cache = sync_mode == "drain" or kv_on_sync == "recompute"
        self.is_open = False
        """The first verified push is in: requests are let in."""

    async def answer(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out one call. An error is an answer too: the trainer decides what becomes of the run."""
        if op not in _OPS:
            return {"error": f"unknown call {op!r}"}
        try:
            return {"error": None} | (await _OPS[op](self, **fields) or {})
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            _log.exception("call %s failed", op)
            return {"error": f"{type(error).__name__}: {error}"}

    async def _status(self) -> dict[str, Any]:
        version, num_workers = self._front.ledger.version, self._engine.num_workers
        return {"version": version, "num_workers": num_workers, "session": self._session, "pid": os.getpid()}

    async def _connect(self, address: dict[str, Any], first_rank: int) -> None:
        await self._engine.call_workers("sync_connect", address, first_rank)

    async def _begin(self, version: int, manifest: list[Any], bucket_bytes: int) -> None:
        await self._engine.call_workers("sync_begin", version, manifest, bucket_bytes)

    async def _poll(self) -> dict[str, Any]:
        reports = await self._engine.call_workers("sync_poll")
        behind = min(reports, key=lambda report: PROGRESS.index(report["state"]))
        if behind["state"] == FAILED:
            return {"error": behind["error"], "state": FAILED}
        return {"state": behind["state"], "version": behind["version"]}

    async def _checksums(self) -> dict[str, Any]:
        return {"checksums": await self._engine.call_workers("sync_checksums")}

    async def _swap(self, version: int) -> dict[str, Any]:
        """Pause, load, cut the versions, resume. A failure in between leaves requests held: half-loaded weights never answer.

        The version that is in use already comes again when a push began again or another process was started again. Its weights
        may then be newer than those that the cache was filled with under the same salt.
        """
        start = time.monotonic()
        self._front.hold()
        is_again = version == self._front.ledger.version
        await self._engine.pause(mode=self._pause_mode, clear_cache=self._clears_cache or is_again)
        reports = await self._engine.call_workers("sync_swap", version)
        # With all that was sent before in their hands, requests that no worker knows are those that had not begun.
        await self._engine.flush()
        num_tokens = {self._engine.key_of(key): count for key, count in reports[0]["num_tokens"].items()}
        self._front.ledger.cut(num_tokens, version)
        await self._engine.resume()
        if self.is_open:
            self._front.release()
        load_s = max(report["seconds"] for report in reports)
        return {"standstill_s": time.monotonic() - start, "load_s": load_s, "num_running": len(self._front.ledger)}

    async def _probe(self, ids: list[int]) -> dict[str, Any]:
        key = f"probe-{time.monotonic_ns()}"
        return {"logprobs": await self._engine.forced_logprobs(key, ids)}

    async def _open(self) -> None:
        self.is_open = True
        self._front.release()

    async def _abort(self) -> None:
        await self._engine.call_workers("sync_abort")


_OPS = {
    "status": PushControl._status,
    "connect": PushControl._connect,
    "begin": PushControl._begin,
    "poll": PushControl._poll,
    "checksums": PushControl._checksums,
    "swap": PushControl._swap,
    "probe": PushControl._probe,
    "open": PushControl._open,
    "abort": PushControl._abort,
}
