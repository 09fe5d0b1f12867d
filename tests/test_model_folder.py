"""What a model folder's config.json says, and which settings vLLM would refuse for it: the same sentences for a run and for tools."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from accerl_mp.config import Config, resolve
from accerl_mp.model_folder import CPU_HEAD_SIZES, ModelFacts, cpu_context, engine_problems, folder_problems, read_facts

QWEN = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024}


def facts_of(folder: Path, **values: Any) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(values))
    return read_facts(folder)


def problems(facts: ModelFacts, **values: Any) -> list[str]:
    config = resolve(Config.from_flat({"model_path": "m", "placement": "cpu"} | values), num_gpus=8, log_dir="unused")
    return list(engine_problems(config, facts, tensor_parallel="--tp", context="--len 9"))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2_moe", "qwen3", "gemma3", "phi3", "opt", "gpt_neox"])
def test_the_facts_are_those_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    facts, text = read_facts(tmp_path), config.get_text_config()
    assert facts.longest_context == text.max_position_embeddings
    assert facts.num_heads == text.num_attention_heads
    assert facts.num_kv_heads == (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    assert facts.has_experts == ("moe" in kind)
    if facts.kv_values_per_token:
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        assert facts.kv_values_per_token == 2 * text.num_hidden_layers * facts.num_kv_heads * width


def test_a_context_that_the_model_or_a_cpus_cache_has_not_is_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, max_position_embeddings=40960, **QWEN)
    assert facts.kv_values_per_token == 57344
    assert problems(facts, vllm_max_model_len=4000) == []
    (found,) = problems(facts, vllm_max_model_len=8000)
    assert found.startswith("--len 9: on a CPU vLLM has a KV cache of 1 GiB, which holds 4617 tokens")
    assert problems(facts, vllm_max_model_len=8000, kv_cache_gib=2.0) == []
    assert problems(facts, vllm_max_model_len=8000, placement="dedicated") == []
    assert problems(facts, vllm_max_model_len=50000, placement="dedicated") == ["--len 9 is over the model's context of 40960 tokens"]


def test_models_whose_cache_is_not_keys_and_values_of_every_token_are_not_judged(tmp_path: Path) -> None:
    for other in ({"kv_lora_rank": 512}, {"sliding_window": 512}, {"mamba_d_state": 16}):
        assert cpu_context(facts_of(tmp_path, **QWEN, **other), Config()) is None
    assert cpu_context(facts_of(tmp_path, **QWEN, sliding_window=512, use_sliding_window=False), Config()) is not None


def test_heads_that_gpus_cannot_share_are_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, **QWEN)
    assert problems(facts, infer_tp_size=2, placement="dedicated") == []
    assert problems(facts, infer_tp_size=3, placement="dedicated") == ["--tp 3 does not divide the model's 16 attention heads"]
    facts = facts_of(tmp_path, num_attention_heads=12, num_key_value_heads=4)
    (found,) = problems(facts, infer_tp_size=6, placement="dedicated")
    assert "4 key-value heads" in found
    assert "has no experts" in problems(facts, enable_expert_parallel=True)[0]


def test_heads_that_vllms_cpu_attention_has_not_are_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, hidden_size=96, num_attention_heads=6, num_hidden_layers=1)
    assert facts.head_size == 16
    assert "this model's have 16" in problems(facts)[0]
    assert problems(facts, placement="dedicated") == []
    # The table is that of the installed vLLM.
    source = Path(importlib.util.find_spec("vllm").origin).parent / "v1/attention/backends/cpu_attn.py"
    sizes = re.search(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", source.read_text(), re.S)[1]
    assert set(map(int, sizes.split(","))) <= set(CPU_HEAD_SIZES)


def test_quantised_weights_cannot_be_trained(tmp_path: Path) -> None:
    facts_of(tmp_path, quantization_config={"quant_method": "awq"})
    assert any("its weights are quantised (awq)" in problem for problem in folder_problems(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"its config.json cannot be read"):
        read_facts(tmp_path)
    assert any("no tokenizer in it" in problem for problem in folder_problems(tmp_path))
