"""What bench/weight_sync.py pushes: models of a known shape with random weights."""

import json
from pathlib import Path
from typing import Any

from accerl_mp.config import Config

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "head_dim": 32, "hidden_act": "silu"}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": QWEN3
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3-0.75b": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "qwen3-3b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
    | {"head_dim": 128, "vocab_size": 151936},
    "smollm2-135m": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_theta": 100000,
    },
}
"""Shapes alone: weights are random."""
EOS = 2


def write_folders(model: Path, tokenizer: Path, shape: dict[str, Any]) -> None:
    """What an inference process reads: a config (its weights come by push) and the end-of-turn token."""
    model.mkdir()
    base = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(base | {"tie_word_embeddings": True, "dtype": "float32"} | shape))
    tokenizer.mkdir()
    (tokenizer / "meta.json").write_text(json.dumps({"eos_token_ids": [EOS]}))


def build_model(config: Config) -> Any:
    """Random float32 weights, as the trainer's masters, on its device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu" if config.run.placement == "cpu" else "cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.model_path), dtype=torch.float32)
    if config.run.placement == "cpu":
        torch.set_num_threads(1)
    return model.eval()


def change_weights(model: Any, train_mode: str) -> None:
    """As much as can be, cheaply: signs of rows. With last_layer only what that mode trains."""
    import torch

    for name, parameter in model.named_parameters():
        is_last = f"layers.{model.config.num_hidden_layers - 1}." in name or "model.norm" in name or "lm_head" in name
        parameter.requires_grad_(train_mode == "full" or is_last)
        if parameter.requires_grad:
            signs = torch.randint(0, 2, (len(parameter), *[1] * (parameter.dim() - 1)), device=parameter.device) * 2 - 1
            with torch.no_grad():
                parameter.mul_(signs)
    if parameter.is_cuda:
        torch.cuda.synchronize()  # or the push would wait for it
