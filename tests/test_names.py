"""Checkpoint names: what leaves the trainer loads into a fresh model, tied weights once, experts split, in the announced order."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from trainer_cases import config_for
from transformers import AutoModelForCausalLM

from accerl_mp.models.build import load_model, select_trainable
from accerl_mp.models.names import manifest
from accerl_mp.models.units import iter_weights

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS: list[tuple[str, bool, dict]] = [("qwen3", True, {}), ("qwen3", False, {}), ("qwen2", True, {}), ("llama", False, {})]
MODELS += [("phi3", False, {}), ("gemma3_text", True, {}), ("qwen2_moe", False, EXPERTS), ("qwen3_moe", False, EXPERTS)]


@pytest.mark.parametrize(("kind", "tied", "options"), MODELS)
def test_weights_go_into_a_fresh_model_and_give_the_same_logits(kind: str, tied: bool, options: dict, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    tiny.save_tiny(source, kind, tied=tied, **options)
    model = load_model(config_for(source), CPU)
    with torch.no_grad():  # not what stands in the folder
        for parameter in model.parameters():
            parameter.mul_(0.9)
    weights = dict(iter_weights(model, trainable_only=False, dtype=None))
    with safe_open(source / "model.safetensors", "pt") as file:
        assert set(weights) == set(file.keys())
    copy.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text((source / "config.json").read_text())
    fresh, ids = AutoModelForCausalLM.from_pretrained(copy), torch.randint(0, 512, (1, 25))
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, fresh(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("train_mode", ["full", "lm_head", "last_layer"])
@pytest.mark.parametrize(("kind", "tied", "options"), MODELS)
def test_the_manifest_announces_what_comes(kind: str, tied: bool, options: dict, train_mode: str, tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, kind, tied=tied, **options)
    model = load_model(config_for(tmp_path, train_mode=train_mode), CPU)
    for trainable_only in (False, True):
        came = [
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in iter_weights(model, trainable_only=trainable_only, dtype=torch.bfloat16)
        ]
        assert manifest(model, trainable_only=trainable_only, dtype=torch.bfloat16) == came
        assert {dtype for _, _, dtype in came} == {"bfloat16"}


def test_only_what_trains_travels_when_asked() -> None:
    model = tiny.build_tiny(tied=True)
    select_trainable(model, "lm_head")
    assert [name for name, _ in iter_weights(model, trainable_only=True, dtype=None)] == ["model.embed_tokens.weight"]


def test_persistent_buffers_travel_and_others_do_not() -> None:
    model = tiny.build_tiny()
    model.model.register_buffer("scale", torch.ones(3))
    model.model.register_buffer("cache", torch.ones(3), persistent=False)
    names = [name for name, _, _ in manifest(model, trainable_only=False, dtype=torch.bfloat16)]
    assert "model.scale" in names
    assert not {"model.cache", "model.rotary_emb.inv_freq"} & set(names)
    assert "model.scale" not in [name for name, _, _ in manifest(model, trainable_only=True, dtype=None)]
