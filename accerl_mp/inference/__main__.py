"""An inference process: `python -m accerl_mp.inference --run-dir DIR --index N`. One vLLM engine, its requests and its pushes."""

import importlib.util

from accerl_mp.inference.engine import Engine
from accerl_mp.inference.server import InferenceServer
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.transport.loop import run_loop
from accerl_mp.transport.process import Process, run_process

# Python's spawn runs the parent's main module again in each child, but skips one that is called `__main__` in a package.
# Under this name the children of vLLM run `child.py` instead: before anything else.
__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


def main(process: Process) -> None:
    """Start the engine (holds this thread for tens of seconds), then serve until the run ends."""
    config = process.config
    stop_ids = find_stop_ids(process.paths.tokenizer, config.inference.infer_stop)
    engine = Engine.start(config, stop_ids, replica=process.index)
    try:
        run_loop(InferenceServer(process, engine).run())
    finally:
        engine.close()


if __name__ == "__main__":
    run_process("inference", main)
