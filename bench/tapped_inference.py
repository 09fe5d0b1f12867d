"""The inference process of bench/weight_sync.py: the real one, with a note of when each token came out of vLLM.

Settings of a push are read anew from the run folder before each `connect`, so that one engine serves all variants.
"""

import asyncio
import importlib.util
from typing import Any

import numpy as np

from accerl_mp.config import Config
from accerl_mp.inference.control import PushControl
from accerl_mp.inference.engine import Engine
from accerl_mp.inference.server import InferenceServer
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.transport.process import Process, run_process
from bench.push_report import TOKENS_FILE

# As in accerl_mp/inference/__main__.py: vLLM's own processes run this first.
__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


class Tap:
    """Looks at what vLLM's engine loop sends, before anything else does."""

    def __init__(self, engine: Engine) -> None:
        self._outputs = engine._outputs
        self._take = self._outputs._take
        self._outputs._take = self._get
        self._last: dict[str, float] = {}
        self.rows: list[tuple[float, int, float, int]] = []

    async def _get(self) -> Any:
        outputs = await self._take()
        count, gap, num_first = 0, 0.0, 0
        for output in outputs.outputs:
            if output.new_token_ids:
                count += len(output.new_token_ids)
                num_first += output.request_id not in self._last
                gap = max(gap, outputs.timestamp - self._last.get(output.request_id, outputs.timestamp))
                self._last[output.request_id] = outputs.timestamp
            if output.finish_reason is not None:
                self._last.pop(output.request_id, None)
        if count:
            self.rows.append((outputs.timestamp, count, gap, num_first))
        return outputs


class Server(InferenceServer):
    """Takes the settings of the variant that is measured."""

    def __init__(self, process: Process, engine: Engine) -> None:
        super().__init__(process, engine)
        control, answer = self._control, self._control.answer

        async def answer_anew(op: str, fields: dict[str, Any]) -> dict[str, Any]:
            if op == "connect":
                sync = Config.load(process.paths.args).sync
                fresh = PushControl(engine, self._front, session=control._session, sync=sync)
                control.__dict__ |= {name: value for name, value in fresh.__dict__.items() if name not in ("is_open", "answer")}
            return await answer(op, fields)

        control.answer = answer_anew  # type: ignore[method-assign]


def main(process: Process) -> None:
    engine = Engine.start(process.config, find_stop_ids(process.paths.tokenizer, process.config.inference.infer_stop))
    tap = Tap(engine)
    try:
        asyncio.run(Server(process, engine).run())
    finally:
        engine.close()
        np.save(process.paths.run_dir / TOKENS_FILE, np.array(tap.rows))


if __name__ == "__main__":
    run_process("inference", main)
