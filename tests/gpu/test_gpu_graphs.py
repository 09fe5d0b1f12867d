"""vLLM's CUDA graphs of steps with prompts in them: what comes out under load is what each request gets alone.

MODEL_PATH: a model of some size (the demo's is sure of every token, and its context too short).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.skipif("MODEL_PATH" not in os.environ, reason="needs MODEL_PATH, as SmolLM2's")
def test_logprobs_under_load_are_those_of_each_request_alone(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    command = [sys.executable, "bench/engine_loop.py", "--model", os.environ["MODEL_PATH"], "--cases", "stock:128", "--step-tokens", "2048"]
    command += ["--seconds", "2", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr[-3000:]
    (target,) = json.loads(out.read_text())["targets"]
    assert target["met"], target
