"""Models to measure with: the demo's own, larger random ones of the same architecture, or a folder."""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.common import ROOT

DEMO = ROOT / "accerl_mp" / "presets" / "demo_model"

SIZES: dict[str, dict[str, int]] = {
    "4m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    "25m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    "0.75b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
}
"""Qwen3 shapes. 0.75b is Qwen3-0.6B with a head of its own (its vocabulary too)."""
_A3B = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768}
_A3B |= {"num_experts": 128, "num_experts_per_tok": 8}
MIXTURES: dict[str, dict[str, int]] = {
    "moe-tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 32}
    | {"num_experts": 8, "num_experts_per_tok": 2},
    "moe-2b": _A3B | {"num_hidden_layers": 2},
    "moe-3b": _A3B | {"num_hidden_layers": 4},
    "moe-5b": _A3B | {"num_hidden_layers": 7},
}
"""Qwen3-MoE shapes. The large ones are two, four and seven of the 48 layers of Qwen3-30B-A3B, with its vocabulary."""
_LARGE = ("0.75b", "moe-2b", "moe-3b", "moe-5b")
"""With a head of their own, Qwen3's vocabulary, saved in bfloat16."""
_HEAD_DIMS = {"4m": 32, "25m": 64, "0.75b": 128, "moe-tiny": 32, "moe-2b": 128, "moe-3b": 128, "moe-5b": 128}


def model_folder(name: str, temporary: Path) -> Path:
    """The folder of `demo`, of one of SIZES or MIXTURES (made in `temporary`: random weights, the demo's tokenizer), or `name` itself."""
    if name == "demo":
        return DEMO
    if name not in SIZES | MIXTURES:
        return Path(name)
    folder = temporary / f"model-{name}"
    if not folder.exists():
        _make(name, folder)
    return folder


def _make(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base = json.loads((DEMO / "config.json").read_text())
    sizes = {"max_position_embeddings": 65536, "head_dim": _HEAD_DIMS[name], **(SIZES | MIXTURES)[name]}
    if name in _LARGE:
        sizes |= {"vocab_size": 151936, "tie_word_embeddings": False}
    keep = ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings")
    config = AutoConfig.for_model("qwen3_moe" if name in MIXTURES else "qwen3", **{key: base.get(key) for key in keep} | sizes)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16 if name in _LARGE else torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(DEMO / file, folder / file)


if __name__ == "__main__":  # python bench/models.py NAME FOLDER
    _make(sys.argv[1], Path(sys.argv[2]))
