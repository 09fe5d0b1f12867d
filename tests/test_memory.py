"""The estimate of a GPU's memory: exact where it can be, refusals with the arithmetic, prepare's own use of it."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import config_for

from accerl_mp.config import Config, resolve
from accerl_mp.launcher import prepare
from accerl_mp.launcher.environment import gpu_plan, rank_environment
from accerl_mp.models.build import build_empty
from accerl_mp.models.memory import GIB, MemoryPlan, plan_memory
from accerl_mp.topology import gpu_memory_bytes
from accerl_mp.trainer.ranks import wait_for_engine
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.health import Health, HealthTable

H200 = 143771 << 20
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True} | HEADS


def _model(**sizes: Any) -> torch.nn.Module:
    from transformers import AutoConfig

    return build_empty(AutoConfig.for_model("qwen3", **(SIZES | sizes)), attention="sdpa")


def _config(**values: Any) -> Config:
    defaults = {"dtype": "bfloat16", "placement": "colocated", "gpu_memory_utilization": 0.35, "vllm_max_model_len": 2049}
    return config_for(Path("unused"), **(defaults | {"train_token_budget": 16384} | values))


def test_state_is_counted_exactly() -> None:
    model = _model()
    number = sum(parameter.numel() for parameter in model.parameters())
    plan = plan_memory(model, _config(), H200)
    assert plan.trainer["weights"] == 4 * number
    assert plan.trainer["AdamW"] == 8 * number
    assert plan.trainer["gradients"] == 4 * number
    assert plan.trainer["whole weights and gradients of a step"] == 10 * number  # a copy, and the gradients of four packs
    assert plan.vllm["weights"] == plan.vllm["staging"] == 2 * number
    assert plan.kv_cache_bytes == int(0.35 * H200) - sum(plan.vllm.values())
    assert plan.request_bytes == 2049 * 28 * 2 * 8 * 128 * 2
    assert plan.problems() == plan.warnings() == []


WHOLE = "whole weights and gradients of a step"


@pytest.mark.parametrize(
    ("ranks", "dtype", "layers", "per_parameter"),
    [
        (1, "float32", 28, 0.0),  # computes with the masters, autograd adds to their gradients
        (2, "bfloat16", 28, 6.0),
        (1, "bfloat16", 200, 6.0),  # 3.3 B parameters: no room for gradients that wait, FSDP2's units
        (1, "bfloat16", 400, 2 * 6.0 / 400),  # a layer at a time
    ],
)
def test_what_a_step_holds_follows_from_how_the_model_is_held(ranks: int, dtype: str, layers: int, per_parameter: float) -> None:
    model = _model(num_hidden_layers=layers)
    number = sum(parameter.numel() for parameter in model.parameters())
    got = plan_memory(model, _config(fsdp_world_size=ranks, dtype=dtype), H200).trainer[WHOLE]
    assert got == int(per_parameter * number)


def test_more_ranks_and_a_part_that_trains_need_less() -> None:
    model = _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.27." in name)
    whole, part = plan_memory(_model(), _config(), H200).trainer, plan_memory(model, _config(fsdp_world_size=2), H200).trainer
    assert part["weights"] * 2 == whole["weights"]
    assert part["AdamW"] < whole["AdamW"] / 20
    assert plan_memory(model, _config(gradient_checkpointing=True), H200).trainer["activations"] < whole["activations"] / 5
    shorter = plan_memory(model, _config(train_logprob_mode="response_only_lm_head"), H200).trainer
    assert shorter["logits"] == whole["logits"] // 4


@pytest.mark.parametrize(
    ("card_gib", "values", "expected"),
    [
        (8, {}, "raise it"),
        (24, {"gpu_memory_utilization": 0.9}, "lower --gpu-memory-utilization"),
        (8, {"placement": "dedicated", "gpu_memory_utilization": 0.85}, "raise --fsdp-world-size"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(card_gib: int, values: dict[str, Any], expected: str) -> None:
    problems = plan_memory(_model(), _config(**values), card_gib * GIB).problems()
    assert any(expected in problem and "GiB" in problem for problem in problems), problems


def test_activations_alone_only_warn() -> None:
    plan = plan_memory(_model(), _config(train_token_budget=100_000), 80 * GIB)
    assert plan.problems() == []
    assert "--train-token-budget" in plan.warnings()[0]


def test_a_mixture_counts_the_experts_that_a_token_passes() -> None:
    from transformers import AutoConfig

    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 9999}
    model = build_empty(AutoConfig.for_model("qwen3_moe", **(SIZES | experts)), attention="sdpa")
    dense = plan_memory(_model(intermediate_size=1024), _config(), H200).trainer["activations"]
    assert plan_memory(model, _config(), H200).trainer["activations"] == dense


def test_the_lines_add_up() -> None:
    plan = MemoryPlan(100 * GIB, {"weights": 10 * GIB, "CUDA": GIB}, {"weights": 5 * GIB}, 35 * GIB, GIB, is_shared=True)
    assert plan.lines() == [
        "GPU memory, estimated, of 100.0 GiB, shared by both:",
        "  trainer rank   11.0 GiB: weights 10.0, CUDA 1.0",
        "  vLLM           35.0 GiB: weights 5.0, KV cache 30.0",
    ]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0, GPU-aa11, 143771\\n1, GPU-bb22, 81559\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("gpus", "mib"), [(["0"], 143771), (["1", "0"], 81559), (["GPU-bb22"], 81559), (["GPU-aa"], 143771), (["7"], None), ([], None)]
)
def test_the_smallest_card_counts(gpus: list[str], mib: int | None) -> None:
    assert gpu_memory_bytes(gpus) == (None if mib is None else mib << 20)


def test_one_gpu_runs_both_and_shares_ipc_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa11")
    config = resolve(Config(), num_gpus=1, log_dir="unused")
    plan = gpu_plan(config)
    assert (plan.trainer, plan.inference) == (["GPU-aa11"], [["GPU-aa11"]])
    environment = rank_environment(config, plan)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-aa11"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment  # such memory has no legacy IPC handle
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    two = resolve(Config(), num_gpus=2, log_dir="unused")
    assert "expandable_segments" in rank_environment(two, gpu_plan(two))["PYTORCH_CUDA_ALLOC_CONF"]
    assert gpu_plan(two).inference == [["1"]]


@pytest.mark.usefixtures("nvidia_smi")
def test_the_launcher_prints_the_plan_and_keeps_its_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launch.sh calls it on a machine with one GPU; nothing of the GPU itself is touched."""
    games = tmp_path / "games"
    games.mkdir()
    for name in ("a.z8", "a.json"):
        (games / name).write_text("{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    model = Path(prepare.__file__).parent.parent / "presets" / "demo_model"
    flags = ["--model-path", str(model), "--tw-game-dir", str(games), "--log-dir", str(tmp_path / "run"), "--batch-size", "4"]
    flags.append("--gpu-memory-utilization")
    command = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(tmp_path / "answer"), "--", *flags]
    refused = subprocess.run([*command, "0.01"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--gpu-memory-utilization gives vLLM 1.4 GiB of the GPU's 140.4 GiB" in refused.stderr
    done = subprocess.run([*command, "0.5"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPU memory, estimated, of 140.4 GiB, shared by both:" in done.stderr
    config = Config.load(tmp_path / "run" / "args.json")
    assert config.run.placement == "colocated"
    assert 60 < config.inference.kv_cache_gib < 70.2


def test_the_trainer_starts_after_the_engine_when_they_share_a_gpu() -> None:
    table = HealthTable.detached(["trainer/0", "inference/0"])
    health, engine = (Health(name, table=table, board=Board.detached()) for name in table.names)
    colocated = _config(inference_start_timeout_s=0.3)
    wait_for_engine(_config(placement="dedicated"), health)  # returns at once
    with pytest.raises(DeadlineExpired, match="inference/0"):
        wait_for_engine(colocated, health)
    engine.set_state("running")
    wait_for_engine(colocated, health)
