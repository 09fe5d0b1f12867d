"""An inference process of a real run, with notes of when tokens were made and when weights were on their way and swapped.

In the run folder, times by time.monotonic():

    tokens-N.f64   see bench/token_times.py
    pushes-N.npy   [pushes, 4]   version, when it was announced, when its swap began and ended; written at the end
"""

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from accerl_mp.inference.engine import Engine
from accerl_mp.inference.server import InferenceServer
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.transport.process import Process, run_process
from bench.token_times import note_tokens

# As in accerl_mp/inference/__main__.py: vLLM's own processes run this first.
__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


class PushNotes:
    """Looks at the calls that reach the workers."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[tuple[int, float, float, float]] = []
        self._call, self._swapped, self._began = engine.call_workers, engine.swapped, 0.0
        engine.call_workers = self._call_workers  # type: ignore[method-assign]
        engine.swapped = self._note_swap  # type: ignore[method-assign]

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        if method == "sync_begin":
            self._began = time.monotonic()
        return await self._call(method, *args)

    @contextlib.asynccontextmanager
    async def _note_swap(self, version: int) -> AsyncIterator[Any]:
        start = time.monotonic()
        async with self._swapped(version) as swap:
            yield swap
        self.rows.append((version, self._began, start, time.monotonic()))


def main(process: Process) -> None:
    stop_ids = find_stop_ids(process.paths.tokenizer, process.config.inference.infer_stop)
    note_tokens(process.paths.run_dir / f"tokens-{process.index}.f64")
    engine = Engine.start(process.config, stop_ids, replica=process.index)
    pushes = PushNotes(engine)
    try:
        asyncio.run(InferenceServer(process, engine).run())
    finally:
        np.save(process.paths.run_dir / f"pushes-{process.index}.npy", np.array(pushes.rows, np.float64).reshape(-1, 4))
        engine.close()


if __name__ == "__main__":
    run_process("inference", main)
