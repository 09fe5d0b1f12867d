"""Tiny random HuggingFace models for tests: real architectures, a few thousand weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {"hidden_size": 32, "head_dim": 32},
    "llama": {},
    "mistral": {"sliding_window": 16},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "attn_logit_softcapping": None},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | {"head_dim": 32},
}
"""By Transformers' model_type: what each needs beside SIZES. vLLM's CPU attention takes head sizes that are multiples of 32."""


def build_tiny(kind: str = "qwen3", *, tied: bool = True, vocab_size: int = 512, seed: int = 0, **overrides: object) -> torch.nn.Module:
    """A model of `kind` (a Transformers model_type) with random float32 weights large enough to have opinions."""
    torch.manual_seed(seed)
    sizes = SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | FAMILIES[kind] | overrides)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def save_tiny(folder: Path, kind: str = "qwen3", **options: object) -> torch.nn.Module:
    """Build one and write it to `folder` (no tokenizer)."""
    model = build_tiny(kind, **options)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model
