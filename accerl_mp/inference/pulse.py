"""Is vLLM still moving? Its loop and its workers are processes of their own, which the supervisor's watchdog does not see."""

import asyncio
import logging
import multiprocessing
import os
import signal
from pathlib import Path

from accerl_mp.inference.engine import Engine, EngineError
from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.health import Health

_EVERY_S = 5.0
_LOOK_S = 0.25

_log = logging.getLogger(__name__)


async def watch_pulse(engine: Engine, health: Health, *, timeout_s: float) -> None:
    """Ask vLLM's loop and every worker for a word, again and again, until cancelled.

    waits for      the answer of each, at most `timeout_s` (`--hang-timeout-s`; 0: no limit)
    on expiry      their stacks are in this process's log, then DeadlineExpired ends it: the supervisor starts another
    """
    while True:
        await asyncio.sleep(_EVERY_S)
        asking = asyncio.ensure_future(engine.call_workers("check_health"))
        try:
            with health.waiting("vLLM's loop and workers to answer", timeout_s, "--hang-timeout-s", peer=health.name) as wait:
                while not asking.done():
                    wait.check()
                    await asyncio.wait([asking], timeout=_LOOK_S)
        except DeadlineExpired:
            _dump_stacks()
            await asyncio.sleep(_LOOK_S)
            raise
        finally:
            asking.cancel()
        if (error := asking.exception()) is not None:
            raise EngineError(f"vLLM's engine does not answer any more: {error}") from error


def _dump_stacks() -> None:
    """Of vLLM's processes, which `child.py` has made ready for the signal. A stopped one cannot write them."""
    cores = [child.pid for child in multiprocessing.active_children() if child.pid]
    for pid in cores + [worker for core in cores for worker in _spawned_by(core)]:
        _log.error("asks process %d of vLLM for its stacks", pid)
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue


def _spawned_by(pid: int) -> list[int]:
    """Its workers; not its resource tracker, which does not know the signal."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except (FileNotFoundError, ProcessLookupError):
        return []
