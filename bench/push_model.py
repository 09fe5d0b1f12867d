"""What bench/weight_sync.py pushes: models of a known shape with random weights, or a model folder with its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.config import Config, ModelConfig
from accerl_mp.rollout.tokenizer import Tokenizer

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


PROMPT_TOKENS = 48
"""Of a request, at most."""
_DRIFT = 0.01
"""By how much a push moves a folder's weights, relatively: far more than the probe's bound, and the model still speaks."""

MakePrompt = Callable[[np.random.Generator], np.ndarray]


def folder_of(name: str, temporary: Path) -> Path:
    """Where the model that `--model` names is, or will be once `write_folders` has made it."""
    return temporary / "model" if name in MODELS else Path(name)


def write_folders(name: str, model: Path, tokenizer: Path) -> MakePrompt:
    """What an inference process reads: a config (its weights come by push) and the tokens that end a reply. Gives the load's prompts.

    A name: random tokens. A folder: questions in the model's own chat format, so that it answers at length.
    """
    tokenizer.mkdir()
    if name not in MODELS:
        return _questions(model, tokenizer)
    model.mkdir()
    base = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(base | {"tie_word_embeddings": True, "dtype": "float32"} | MODELS[name]))
    (tokenizer / "meta.json").write_text(json.dumps({"eos_token_ids": [EOS]}))
    return lambda random: random.integers(10, MODELS[name]["vocab_size"], PROMPT_TOKENS, dtype=np.int32)


def _questions(model: Path, folder: Path) -> MakePrompt:
    from accerl_mp.launcher.tokenizer import export_tokenizer

    if problems := export_tokenizer(ModelConfig(model_path=str(model)), folder):
        raise SystemExit("\n".join(problems))
    tokenizer = Tokenizer.load(folder)

    def question(random: np.random.Generator) -> np.ndarray:
        text = f"Tell me a very long story about a house with {random.integers(1000, 10_000)} rooms."
        ids = tokenizer.encode_start(tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True))
        return np.array(ids[-PROMPT_TOKENS:], np.int32)

    return question


def build_model(name: str, config: Config) -> Any:
    """Float32 weights, as the trainer's masters, on its device: the folder's own or random ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    path = config.model.model_path
    with torch.device("cpu" if config.run.placement == "cpu" else "cuda"):
        if name in MODELS:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    if config.run.placement == "cpu":
        torch.set_num_threads(1)
    return model.eval()


def change_weights(name: str, model: Any, train_mode: str) -> None:
    """Random weights: as much as can be, cheaply, signs of rows. A folder's: a little. With last_layer only what that mode trains."""
    import torch

    for parameter_name, parameter in model.named_parameters():
        is_last = any(part in parameter_name for part in (f"layers.{model.config.num_hidden_layers - 1}.", "model.norm", "lm_head"))
        parameter.requires_grad_(train_mode == "full" or is_last)
        if parameter.requires_grad:
            rows = (len(parameter), *[1] * (parameter.dim() - 1))
            signs = torch.randint(0, 2, rows, device=parameter.device) * 2 - 1
            with torch.no_grad():
                parameter.mul_(signs if name in MODELS else 1 + _DRIFT * signs)
    if parameter.is_cuda:
        torch.cuda.synchronize()  # or the push would wait for it


def gpu_memory_mib() -> float:
    """In use on the trainer's card, by whomever: with CUDA IPC vLLM's too. 0 without a card."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
