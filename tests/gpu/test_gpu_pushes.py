"""Pushes into a running vLLM on one GPU, by CUDA IPC: every way to swap is verified, and fifty take no memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common import python_path

ROOT = Path(__file__).parents[2]
NUM_PUSHES = 50
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def run_bench(out: Path, *flags: str) -> dict[str, Any]:
    """The script asserts that each variant's first and last push are verified, and that no reply's versions go back."""
    command = [sys.executable, "bench/weight_sync.py", "--requests", "8", "--tokens", "60", "--idle-s", "1", "--pause-between-s", "0.05"]
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run([*command, *flags, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [note for note in result["notes"] if "cut short" in note] == []
    return result


def test_every_way_to_swap_is_verified_and_fifty_pushes_take_no_memory(tmp_path: Path) -> None:
    flags = ["--placement", "colocated", "--model", "qwen3-0.75b", "--share", "0.1", "--kv-gib", "2"]
    ways = [f"on/captured/offx{NUM_PUSHES}", "on/captured/onx2", "on/plain/offx2", "on/layerwise/offx2", "off/plain/onx2"]
    result = run_bench(tmp_path / "pushes.json", *flags, "--variants", *ways)
    pushes = [measure for measure in result["measures"] if measure["name"] == "push time"]
    kinds = {tuple(measure["labels"][name] for name in ("swapped", "pause", "staging")): len(measure["samples"]) for measure in pushes}
    assert kinds == {
        ("captured", "off", "on"): NUM_PUSHES, ("captured", "on", "on"): 2, ("plain", "off", "on"): 2, ("layerwise", "off", "on"): 2,
        ("plain", "on", "off"): 2,
    }  # fmt: skip
    grown = [m for m in result["measures"] if m["name"] == "GPU memory that the pushes took" and m["labels"]["swap"] == "captured"]
    assert max(grown[0]["samples"]) <= 64, "MiB of the card, trainer and vLLM; one message that stayed would be 256"
