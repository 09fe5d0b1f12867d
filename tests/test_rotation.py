"""Norm and rotation of queries and keys in one operator: what it computes, and which models it is for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from accerl_mp.models.rotation import fuse_rotations

pytestmark = pytest.mark.timeout(240)
GPU = torch.device("cuda")


@pytest.mark.parametrize("case", ["kernels_give_what_the_formula_gives", "models_give_the_same", "layers_compile_as_one_graph"])
def test_in_tritons_interpreter(case: str) -> None:
    """tests/gpu has the real thing."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(Path(__file__).with_name("rotation_cases.py")), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "sizes"),
    [
        ("qwen3", "cpu", torch.bfloat16, {}),
        ("qwen3", "cuda", torch.float32, {}),
        ("qwen3", "cuda", torch.bfloat16, {"head_dim": 48}),
        ("qwen3", "cuda", torch.bfloat16, {"head_dim": 16}),
        ("qwen3", "cuda", torch.bfloat16, {"head_dim": 512}),
        ("llama", "cuda", torch.bfloat16, {}),
        ("gemma3_text", "cuda", torch.bfloat16, {}),
    ],
)
def test_other_models_stay_as_they_are(kind: str, device: str, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    model = tiny.build_tiny(kind, **sizes)
    before = [type(module) for module in model.modules()]
    assert fuse_rotations(model, torch.device(device), dtype) == 0
    assert [type(module) for module in model.modules()] == before


def test_a_folders_own_class_of_that_name_keeps_its_forward() -> None:
    """`--trust-remote-code`: its forward may be another."""
    model = tiny.build_tiny("qwen3")
    for module in model.modules():
        if type(module).__name__ == "Qwen3Attention":
            module.__class__ = type("Qwen3Attention", (type(module),), {})
    assert fuse_rotations(model, GPU, torch.bfloat16) == 0


def test_norms_of_two_epsilons_stay_as_they_are() -> None:
    model = tiny.build_tiny("qwen3")
    model.model.layers[0].self_attn.q_norm.variance_epsilon *= 2
    assert fuse_rotations(model, GPU, torch.bfloat16) == 1


def test_keys_and_values_are_not_kept() -> None:
    model = tiny.build_tiny("qwen3")
    assert fuse_rotations(model, GPU, torch.bfloat16) == 2
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=torch.arange(5)[None], use_cache=True)
