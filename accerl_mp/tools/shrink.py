"""A small random model of any HuggingFace config: the same architecture and tokenizer in a size that a smoke test runs."""

import shutil
from pathlib import Path
from typing import Any

_SIZES: dict[str, int] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,  # vLLM's CPU attention takes multiples of 32
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
"""Fields of configs, under all the names that families use; only those that a config has are changed, and only downwards."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")


def shrink(source: Path, out: Path, *, seed: int, trust_remote_code: bool = False) -> int:
    """Write a folder with random weights; returns the number of parameters.

    The vocabulary keeps its size, so that the tokenizer fits. ValueError: a config that gives no model in this size.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    _make_small(config.get_text_config())
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = model(torch.arange(8)[None]).logits
    except (RuntimeError, IndexError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{config.model_type} gives no working model in this size ({type(error).__name__}: {error})") from error
    if not torch.isfinite(logits).all():
        raise ValueError(f"{config.model_type} gives logits that are not finite in this size")
    model.to(torch.bfloat16).save_pretrained(out)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, out)
    if (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", out)
    return model.num_parameters()


def _make_small(config: Any) -> None:
    # Grouped-query attention stays what it was: as many query heads a key head, as far as four heads go.
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    for name, size in _SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > size:
            setattr(config, name, size)
    if kv_heads:
        config.num_key_value_heads = max(1, min(4, config.num_attention_heads * kv_heads // heads))
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[: config.num_hidden_layers])
