"""Runs first in every process of vLLM that `counted_inference.py` starts."""

import sys
from pathlib import Path

from holdings import tell_when_asked

from accerl_mp.inference import child

__all__ = ["child"]

tell_when_asked(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
