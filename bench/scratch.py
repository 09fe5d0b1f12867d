"""Throw-away environments under the temp folder: for what we are measured against, never for what we depend on."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import ROOT

RAY = "ray==2.56.0"
"""The reference's own pin."""


def scratch_python(*requirements: str) -> Path:
    """The interpreter of an environment with these packages; made at the first call, kept until the temp folder is emptied."""
    key = hashlib.blake2s("\n".join((sys.version, *requirements)).encode(), digest_size=5).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"accerl-bench-env-{os.getuid()}-{key}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements], check=True)
        (folder / "complete").touch()
    return python


def ray_python() -> Path:
    return scratch_python(RAY, f"numpy=={np.__version__}", *(_pinned(name) for name in ("psutil", "msgpack", "pyzmq")))


class RayDriver:
    """`bench/ray_buffer.py` in its environment: a command in, an answer out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.started = self._answer()
        """Seconds to start Ray and its first actor."""

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"Ray's driver ended with exit code {self._process.wait()}")


@contextmanager
def ray_driver() -> Iterator[RayDriver]:
    """Ray, until the block ends."""
    python = ray_python()
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_worker_niceness"] = "0"  # Ray's workers yield to everything else by default: not in a comparison
    command = [str(python), "-m", "bench.ray_buffer"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        yield RayDriver(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pinned(name: str) -> str:
    from importlib.metadata import version

    return f"{name}=={version(name)}"
