"""The inference process of bench/weight_sync.py: the real one, with a note of when each token was made.

Settings of a push are read anew from the run folder before each `connect`, so that one engine serves all variants.
"""

import asyncio
import importlib.util
from typing import Any

from accerl_mp.config import Config
from accerl_mp.inference.control import PushControl
from accerl_mp.inference.engine import Engine
from accerl_mp.inference.server import InferenceServer
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.transport.process import Process, run_process
from bench.push_report import TOKENS_FILE
from bench.token_times import note_tokens

# As in accerl_mp/inference/__main__.py: vLLM's own processes run this first.
__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


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
    note_tokens(process.paths.run_dir / TOKENS_FILE)
    engine = Engine.start(process.config, find_stop_ids(process.paths.tokenizer, process.config.inference.infer_stop))
    try:
        asyncio.run(Server(process, engine).run())
    finally:
        engine.close()


if __name__ == "__main__":
    run_process("inference", main)
