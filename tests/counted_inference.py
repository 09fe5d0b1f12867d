"""The inference process, whose every process says what it holds when it is asked (SIGUSR2)."""

import importlib.util
import sys
from pathlib import Path

from holdings import tell_when_asked

from accerl_mp.inference import __main__ as inference
from accerl_mp.transport.process import run_process

__spec__ = importlib.util.find_spec("counted_child")

if __name__ == "__main__":
    tell_when_asked(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    run_process("inference", inference.main)
