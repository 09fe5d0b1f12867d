"""Tiny random HuggingFace models for tests: real architectures, a few thousand weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def build_tiny(kind: str = "qwen3", *, tied: bool = True, vocab_size: int = 512, seed: int = 0, **overrides: object) -> torch.nn.Module:
    """A model of `kind` (a Transformers model_type) with random float32 weights large enough to have opinions."""
    torch.manual_seed(seed)
    sizes = SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "qwen3":
        sizes |= {"head_dim": 32}  # vLLM's CPU attention takes head sizes that are multiples of 32
    else:
        sizes |= {"hidden_size": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | overrides)), torch_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def save_tiny(folder: Path, kind: str = "qwen3", **options: object) -> torch.nn.Module:
    """Build one and write it to `folder` (no tokenizer)."""
    model = build_tiny(kind, **options)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model
