"""Imported before anything else by every tool: while launch.sh installs the environment, a plain sentence and no traceback.

Standard library only.
"""

from importlib.util import find_spec

_PACKAGES = ("numpy", "rich", "zmq", "msgpack", "tokenizers", "transformers", "torch", "textworld", "tensorboard", "vllm")
"""One of the last that pip installs is among them."""

if missing := [name for name in _PACKAGES if find_spec(name) is None]:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise SystemExit(
        f"this environment is not complete yet ({missing[0]}{more} missing): bash launch.sh is setting it up, or was stopped on the way; "
        "bash launch.sh --setup-only finishes it"
    )
