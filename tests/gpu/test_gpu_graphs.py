"""CUDA graphs of whole steps: what comes out under load is what each request gets alone without them, and what transformers says.

MODEL_PATH: a model of some size (the demo's is sure of every token, and its context too short).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import python_path

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.skipif("MODEL_PATH" not in os.environ, reason="needs MODEL_PATH, as SmolLM2's")
def test_logprobs_under_load_are_those_of_each_request_alone(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    command = [
        sys.executable,
        "bench/engine_loop.py",
        "--model",
        os.environ["MODEL_PATH"],
        "--cases",
        "stock:128",
        "short:4",
        "--step-tokens",
        "2048",
    ]
    command += ["--seconds", "2", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path()}, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [target for target in result["targets"] if not target["met"]] == []
    assert len(result["targets"]) == 4, "under load and alone, long prompts and short ones"
    reference = [measure for measure in result["measures"] if "transformers" in measure["name"]]
    assert len(reference) == 2
    assert max(measure["p95"] for measure in reference) < 0.3, "bfloat16 against float32"
