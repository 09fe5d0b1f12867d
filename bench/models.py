"""Models to measure with: the demo's own, larger random ones of the same architecture, or a folder."""

import json
import shutil
from pathlib import Path

from bench.common import ROOT

DEMO = ROOT / "accerl_mp" / "presets" / "demo_model"

SIZES: dict[str, dict[str, int]] = {
    "4m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    "25m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    "0.75b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
}
"""Qwen3 shapes. 0.75b is Qwen3-0.6B with a head of its own (its vocabulary too)."""
_HEAD_DIMS = {"4m": 32, "25m": 64, "0.75b": 128}


def model_folder(name: str, temporary: Path) -> Path:
    """The folder of `demo`, of one of SIZES (made in `temporary`, with random weights and the demo's tokenizer), or `name` itself."""
    if name == "demo":
        return DEMO
    if name not in SIZES:
        return Path(name)
    folder = temporary / f"model-{name}"
    if not folder.exists():
        _make(name, folder)
    return folder


def _make(name: str, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    base = json.loads((DEMO / "config.json").read_text())
    sizes = {"max_position_embeddings": 65536, "head_dim": _HEAD_DIMS[name], **SIZES[name]}
    if name == "0.75b":
        sizes |= {"vocab_size": 151936, "tie_word_embeddings": False}
    keep = ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**{key: base.get(key) for key in keep} | sizes))
    model.to(torch.bfloat16 if name == "0.75b" else torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
