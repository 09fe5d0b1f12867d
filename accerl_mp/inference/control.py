"""The inference side of a push: the calls of weight_sync/protocol.py, one at a time, in the order in which they come."""

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from accerl_mp.config import SyncConfig
from accerl_mp.inference.front import RequestFront
from accerl_mp.inference.graphs import GraphGuard
from accerl_mp.weight_sync.protocol import FAILED, PROGRESS

if TYPE_CHECKING:
    from accerl_mp.inference.engine import Engine

_log = logging.getLogger(__name__)


class PushControl:
    """Answers trainer rank 0. Nothing here waits for the trainer; each call ends by itself or by its caller's deadline."""

    def __init__(self, engine: "Engine", front: RequestFront, *, session: str, sync: SyncConfig) -> None:
        self._engine, self._front = engine, front
        self._session, self._sync = session, sync
        self._graphs = GraphGuard(engine, sync.sync_timeout_s / 3)
        self._pause_mode = "abort" if sync.sync_mode == "drain" else "keep"
        # A drained engine has no request whose KV could stay, and the reference clears the cache at each push.
        self._clears_cache = sync.sync_mode == "drain" or sync.kv_on_sync == "recompute"
        self._is_staged = sync.sync_staging == "on"
        # Where weights arrive in the model itself, and where requests end or lose their cache, the engine must stand.
        self._pauses = sync.sync_pause == "on" or self._clears_cache or not self._is_staged
        self._paused_at: float | None = None
        self._path = ""
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

    async def _layout(self, manifest: list[Any], bucket_bytes: int) -> None:
        await self._engine.call_workers("sync_layout", manifest, bucket_bytes, self._is_staged, self._sync.sync_swap)

    async def _begin(self, version: int, runs: list[Any], with_sums: bool) -> None:
        if not self._is_staged:
            await self._pause(version)
        await self._engine.call_workers("sync_begin", version, runs, with_sums)

    async def _poll(self) -> dict[str, Any]:
        reports = await self._engine.call_workers("sync_poll")
        behind = min(reports, key=lambda report: PROGRESS.index(report["state"]))
        if behind["state"] == FAILED:
            return {"error": behind["error"], "state": FAILED}
        return {"state": behind["state"], "version": behind["version"]}

    async def _checksums(self) -> dict[str, Any]:
        return {"checksums": await self._engine.call_workers("sync_checksums")}

    async def _swap(self, version: int) -> dict[str, Any]:
        """Load, cut the versions, go on: between two steps of an engine that generates, or of one that stands (`--sync-pause`).

        A failure in between leaves the engine standing and requests held: half-loaded weights are not generated with.
        """
        start = time.monotonic()
        self._front.hold()
        # The version that is in use already comes again when a push began again or another process was started again. Its weights
        # may then be newer than those that the cache was filled with under the same salt.
        if self._pauses or version == self._front.ledger.version:
            await self._pause(version)
        pause_s = time.monotonic() - start
        is_whole = False
        try:
            async with self._engine.swapped(version) as (reports, num_tokens):
                self._front.ledger.cut(num_tokens, version)
            is_whole = True
        finally:
            if not is_whole:
                await self._pause(version)
        start_resume = time.monotonic()
        load_s = max(report["seconds"] for report in reports)
        standstill_s = await self._resume() or load_s
        if self.is_open:
            self._front.release()
        self._say(reports)
        times = {"pause_s": pause_s, "load_s": load_s, "resume_s": time.monotonic() - start_resume, "swap_s": time.monotonic() - start}
        return times | {"standstill_s": standstill_s, "path": reports[0]["path"]}

    async def _pause(self, version: int) -> None:
        """Twice does no harm."""
        self._front.hold()
        self._paused_at = self._paused_at or time.monotonic()
        is_again = version == self._front.ledger.version
        await self._engine.pause(mode=self._pause_mode, clear_cache=self._clears_cache or is_again)

    async def _resume(self) -> float | None:
        """How long the engine stood; None: it did not."""
        if self._paused_at is None:
            return None
        await self._engine.resume()
        start, self._paused_at = self._paused_at, None
        return time.monotonic() - start

    def _say(self, reports: list[dict[str, Any]]) -> None:
        """Log the chosen way once."""
        for worker, report in enumerate(reports if self._path != reports[0]["path"] else []):
            pause = "with a pause" if self._pauses else "between two steps"
            _log.info("worker %d: weights are swapped %s, %s: %s", worker, report["path"], pause, report["reason"])
        self._path = reports[0]["path"]

    async def _probe(self, ids: list[int]) -> dict[str, Any]:
        await self._graphs.ask()  # first: wrong graphs must not pass for wrong weights
        key = f"probe-{time.monotonic_ns()}"
        return {"logprobs": await self._engine.forced_logprobs(key, ids)}

    async def _open(self) -> None:
        await self._graphs.ask()
        self.is_open = True
        self._front.release()

    async def _abort(self) -> None:
        await self._engine.call_workers("sync_abort")


_OPS = {
    "status": PushControl._status,
    "connect": PushControl._connect,
    "layout": PushControl._layout,
    "begin": PushControl._begin,
    "poll": PushControl._poll,
    "checksums": PushControl._checksums,
    "swap": PushControl._swap,
    "probe": PushControl._probe,
    "open": PushControl._open,
    "abort": PushControl._abort,
}
