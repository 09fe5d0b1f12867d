"""What a HuggingFace model folder holds, from its small files alone: nothing here imports torch or Transformers, or reads a weight."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accerl_mp.config import Config
from accerl_mp.files import open_file, read_text

CPU_KV_CACHE_GIB = 1.0
"""Of vLLM's CPU engine without --kv-cache-gib."""
_GIB = 1 << 30
_JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
    *("adapter_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
)
_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""vLLM takes the smallest of these; families call it otherwise."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's CPU attention."""
_OTHER_CACHES = ("kv_lora_rank", "layers_block_type", "mamba_d_state", "ssm_state_size", "linear_num_key_heads")
"""Models with these have layers whose cache is none of keys and values of each token, or whose heads differ."""


@dataclass(frozen=True)
class ModelFacts:
    """Of config.json; None: it does not say, or not in a way that is read here."""

    longest_context: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    kv_values_per_token: int | None
    """Numbers that a token has in the KV cache of all layers; None too where some layers attend to a window, or keep another state."""
    has_experts: bool
    vocab_size: int | None
    quantization: str | None


def read_facts(folder: Path) -> ModelFacts:
    """ValueError: no config.json that is a JSON object."""
    try:
        whole = json.loads(read_text(folder / "config.json"))
        text = whole.get("text_config") or whole
        quantization = whole.get("quantization_config") or text.get("quantization_config")
        # num_experts, num_local_experts, n_routed_experts: each family calls them otherwise.
        has_experts = any(key.endswith("experts") for key in text)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}: its config.json cannot be read ({type(error).__name__}: {error})") from error
    num_heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    num_kv_heads = _number(text, "num_key_value_heads", "num_kv_heads") or num_heads
    num_layers, width = _number(text, "num_hidden_layers", "n_layer", "n_layers"), _number(text, "hidden_size", "n_embd", "d_model")
    head_size = _number(text, "head_dim") or (width // num_heads if width and num_heads else None)
    is_plain = not any(text.get(key) for key in _OTHER_CACHES)
    is_windowed = bool(text.get("sliding_window")) and text.get("use_sliding_window", True)
    return ModelFacts(
        longest_context=min((value for key in _CONTEXT_KEYS if (value := _number(text, key))), default=None),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size if is_plain else None,
        kv_values_per_token=2 * num_layers * num_kv_heads * head_size
        if num_layers and num_kv_heads and head_size and is_plain and not is_windowed
        else None,
        has_experts=has_experts,
        vocab_size=_number(text, "vocab_size"),
        quantization=quantization.get("quant_method", "quantized") if isinstance(quantization, dict) else None,
    )


def _number(text: dict[str, Any], *keys: str) -> int | None:
    return next((value for key in keys if isinstance(value := text.get(key), int) and value > 0), None)


def folder_problems(folder: Path) -> Iterator[str]:
    """What keeps the folder from being a model that can be trained."""
    if not os.path.isdir(folder):
        yield f"--model-path {folder}: no such folder (models are read from disk only, never downloaded)"
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        yield f"--model-path {folder} cannot be read: this user may not"
        return
    if unreadable := sorted(path.name for path in folder.iterdir() if path.is_file() and not os.access(path, os.R_OK)):
        yield f"--model-path {folder}: {', '.join(unreadable[:3])} cannot be read: this user may not"
        return
    yield from json_problems(folder)
    if not (folder / "config.json").is_file():
        yield f"--model-path {folder}: no config.json in it: not a HuggingFace model folder"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        yield f"--model-path {folder}: no *.safetensors (or pytorch_model*.bin) in it: there are no weights to train"
    for file in sorted(folder.glob("*.safetensors")):
        if problem := damage_of(file):
            yield f"--model-path {folder}: {file.name} is damaged ({problem}): no weights could be read; copy it again"
    if missing := _missing_shards(folder):
        yield f"--model-path {folder}: {', '.join(missing)} of model.safetensors.index.json are missing: weights would be left out"
    if quantization := _quantization_of(folder):
        yield f"--model-path {folder}: its weights are quantised ({quantization}), training needs plain ones"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        yield f"--model-path {folder}: no tokenizer in it (tokenizer.json): games could not be turned into tokens"


def json_problems(folder: Path) -> Iterator[str]:
    """Files that Transformers, vLLM or we read of it, and that are no JSON objects: each would be a traceback of its reader."""
    for name in _JSON_FILES:
        if not os.path.lexists(folder / name):
            continue
        try:
            content = json.loads(read_text(folder / name))
            problem = "" if isinstance(content, dict) else f"it holds a {type(content).__name__}"
        except (OSError, ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            yield f"--model-path {folder}: {name} is no JSON object ({problem}): nothing could be loaded; copy it again"


def _quantization_of(folder: Path) -> str | None:
    try:
        return read_facts(folder).quantization
    except ValueError:
        return None  # Transformers says what is wrong with it


def damage_of(file: Path) -> str:
    """What is wrong with a .safetensors file, from its header and its size alone; empty: nothing."""
    size_bytes = file.stat().st_size
    with open_file(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size_bytes < 8 or length > size_bytes - 8:
            return f"{size_bytes} bytes do not even hold its header"
        header = opened.read(length)
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its header is no table of tensors"
    expected = 8 + length + end
    return "" if size_bytes == expected else f"{size_bytes} bytes, its header speaks of {expected}"


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []  # `json_problems` or Transformers says what is wrong with it
    return [name for name in names if not (folder / name).is_file()]


def engine_problems(config: Config, facts: ModelFacts, *, tensor_parallel: str, context: str) -> Iterator[str]:
    """What vLLM would refuse of this model under these settings, after it has loaded for a minute.

    tensor_parallel: what the tool calls --infer-tp-size; context: the flag that made vLLM's context so long, with its value
    """
    inference = config.inference
    num_gpus, length = inference.infer_tp_size, inference.vllm_max_model_len or 0
    if facts.num_heads and facts.num_heads % num_gpus:
        yield f"{tensor_parallel} {num_gpus} does not divide the model's {facts.num_heads} attention heads"
    elif facts.num_kv_heads and facts.num_kv_heads % num_gpus and num_gpus % facts.num_kv_heads:
        yield f"{tensor_parallel} {num_gpus} and the model's {facts.num_kv_heads} key-value heads do not divide each other"
    if config.run.placement == "cpu" and facts.head_size and facts.head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"--placement cpu: vLLM's CPU attention takes heads of {sizes} numbers, this model's have {facts.head_size}: it needs a GPU"
    if inference.enable_expert_parallel and not facts.has_experts:
        yield f"--enable-expert-parallel: the model in {config.model.model_path} has no experts: leave it out"
    if facts.longest_context and length > facts.longest_context:
        yield f"{context} is over the model's context of {facts.longest_context} tokens"
    elif config.run.placement == "cpu" and (most := cpu_context(facts, config)) and length > most:
        yield (
            f"{context}: on a CPU vLLM has a KV cache of {inference.kv_cache_gib or CPU_KV_CACHE_GIB:g} GiB, which holds {most} "
            "tokens of this model; use a shorter one, or a larger --kv-cache-gib"
        )


def cpu_context(facts: ModelFacts, config: Config) -> int | None:
    """Tokens that the KV cache of vLLM's CPU engine holds, a block kept aside; None: not known."""
    if not facts.kv_values_per_token:
        return None
    bytes_per_token = facts.kv_values_per_token * (2 if config.model.dtype == "bfloat16" else 4)
    return max(1, int((config.inference.kv_cache_gib or CPU_KV_CACHE_GIB) * _GIB) // bytes_per_token - 64)
