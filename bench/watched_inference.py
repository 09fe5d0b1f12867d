"""An inference process of a real run, with notes of when tokens came out of vLLM and when weights were on their way and swapped.

At its end it writes two arrays into the run folder, times by time.monotonic():

    tokens-N.npy   [steps, 3]    when a step's outputs were made, their tokens, the longest time that a request had waited for its own
    pushes-N.npy   [pushes, 4]   version, when it was announced, when its swap began and ended
"""

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.inference.engine import Engine
from accerl_mp.inference.server import InferenceServer
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.transport.process import Process, run_process
from bench.tapped_inference import Tap

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
    engine = Engine.start(process.config, stop_ids, replica=process.index)
    tap, pushes = Tap(engine), PushNotes(engine)
    try:
        asyncio.run(InferenceServer(process, engine).run())
    finally:
        save(process.paths.run_dir, process.index, tap.rows, pushes.rows)
        engine.close()


def save(folder: Path, index: int, tokens: list[Any], pushes: list[Any]) -> None:
    np.save(folder / f"tokens-{index}.npy", np.array(tokens, np.float64).reshape(-1, 3))
    np.save(folder / f"pushes-{index}.npy", np.array(pushes, np.float64).reshape(-1, 4))


if __name__ == "__main__":
    run_process("inference", main)
