"""Imported before anything else by every tool and every script of bench/: where packages are missing, a plain sentence and no traceback.

Standard library only.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_READING = ("numpy", "rich", "msgpack")
_ALL = (*_READING, "psutil", "zmq", "tokenizers", "transformers", "torch", "textworld", "tensorboard", "vllm")
"""One of the last that pip installs is among them."""
_RESULTS = ("numpy", "rich", "psutil")
_NEEDED = {"top": _READING, "report": _READING, "compare": _RESULTS, "plots": (*_RESULTS, "matplotlib")}
"""What reads a run folder or results does so wherever it was copied to; the others need a whole environment."""

if missing := [name for name in _NEEDED.get(Path(sys.argv[0]).stem, _ALL) if find_spec(name) is None]:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise SystemExit(
        f"this environment is not complete ({missing[0]}{more} missing): bash launch.sh is setting it up, or was stopped on the way "
        f"(bash launch.sh --setup-only finishes it), or {sys.executable} is not its Python"
    )
