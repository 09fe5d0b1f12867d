"""What a run needs of a GPU's memory, estimated from the model's shapes before a weight is read.

An estimate, printed by the launcher: weights, gradients and optimizer state are exact, activations are those of a plain decoder
layer. vLLM's KV cache is what its share of the card leaves, so that it need not measure anything: with a trainer on
the same card its own measurement would be of two programs.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from accerl_mp.config import Config
from accerl_mp.models.attention import head_size
from accerl_mp.models.copies import copied_bytes
from accerl_mp.models.fsdp import UNSHARDED_SHARE, decoder_layers, is_held_whole

GIB = 1 << 30

_TRAINER_BASE = 3 * GIB // 2
"""CUDA context, NCCL's buffers, cuBLAS workspaces."""
_VLLM_BASE = 3 * GIB
"""The same, CUDA graphs, sampling buffers."""
_GRAPH_TOKENS, _KEY_SPLITS = 2048, 32
"""Of vLLM's largest CUDA graph (inference/engine.py), and the parts into which FlashAttention may split a sequence's keys in one."""
_TRAINED_SHARE = 0.25
"""Of a pack's tokens, where the head runs at trained ones only; the rest is prompt."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU, by what they are for. `trainer` and `vllm` share a card when colocated."""

    card_bytes: int
    trainer: dict[str, int]
    vllm: dict[str, int]
    vllm_share_bytes: int
    """--gpu-memory-utilization of the card."""
    request_bytes: int
    """KV cache of one request of --vllm-max-model-len."""
    is_shared: bool

    @property
    def kv_cache_bytes(self) -> int:
        return self.vllm_share_bytes - sum(self.vllm.values())

    @property
    def trainer_share_bytes(self) -> int:
        return self.card_bytes - (self.vllm_share_bytes if self.is_shared else 0)

    def problems(self) -> list[str]:
        """What cannot fit, activations aside: those are the rough part, see `warnings`."""
        found = []
        if self.kv_cache_bytes < self.request_bytes:
            found.append(
                f"--gpu-memory-utilization gives vLLM {_gib(self.vllm_share_bytes)} of the GPU's {_gib(self.card_bytes)}: less "
                f"{_parts(self.vllm)} there are {_gib(self.kv_cache_bytes)} for the KV cache, one request of --vllm-max-model-len needs "
                f"{_gib(self.request_bytes)}; raise it, or spread the model with --infer-tp-size"
            )
        certain = {name: size for name, size in self.trainer.items() if name not in ("activations", "logits")}
        if sum(certain.values()) > self.trainer_share_bytes:
            found.append(
                f"a trainer rank has {_gib(self.trainer_share_bytes)} of the GPU's {_gib(self.card_bytes)}, but needs {_parts(certain)}: "
                + ("lower --gpu-memory-utilization, or use two GPUs" if self.is_shared else "raise --fsdp-world-size")
            )
        return found

    def warnings(self) -> list[str]:
        if sum(self.trainer.values()) <= self.trainer_share_bytes or self.problems():
            return []
        needed, parts = _gib(sum(self.trainer.values())), _parts(self.trainer)
        return [
            f"a trainer rank may need {needed} ({parts}), but has {_gib(self.trainer_share_bytes)}: if it runs out of memory, "
            "lower --train-token-budget (or --batch-size) or give --gradient-checkpointing"
        ]

    def lines(self) -> list[str]:
        """For the terminal."""
        kv_cache = self.vllm | {"KV cache": self.kv_cache_bytes}
        return [
            f"GPU memory, estimated, of {_gib(self.card_bytes)}" + (", shared by both:" if self.is_shared else " each:"),
            f"  trainer rank  {_gib(sum(self.trainer.values())):>9}: {_parts(self.trainer)}",
            f"  vLLM          {_gib(self.vllm_share_bytes):>9}: {_parts(kv_cache)}",
        ]


def plan_memory(model: nn.Module, config: Config, card_bytes: int) -> MemoryPlan:
    """`model`: of this Config, whole, perhaps on the meta device."""
    return MemoryPlan(
        card_bytes=card_bytes,
        trainer=_trainer_bytes(model, config, card_bytes),
        vllm=_vllm_bytes(model, config),
        vllm_share_bytes=int((config.inference.gpu_memory_utilization or 0.0) * card_bytes),
        request_bytes=(config.inference.vllm_max_model_len or 0) * _kv_bytes_per_token(model, config),
        is_shared=config.run.placement == "colocated",
    )


def _trainer_bytes(model: nn.Module, config: Config, card_bytes: int) -> dict[str, int]:
    ranks = config.run.fsdp_world_size or 1
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = {"weights": 4 * total // ranks, "gradients": 4 * trained // ranks, "AdamW": 8 * trained // ranks}
    if config.algorithm.ref_kl_coef > 0:
        parts["start model"] = 4 * total // ranks
    size = _itemsize(config)
    parts["whole weights and gradients of a step"] = _whole_bytes(model, config, card_bytes)
    parts["push"] = min(2 * (config.sync.sync_bucket_mb << 20), size * total)
    parts["activations"] = _activation_bytes(model, config)
    parts["logits"] = _logit_bytes(model, config)
    parts["CUDA"] = _TRAINER_BASE
    return parts


def _whole_bytes(model: nn.Module, config: Config, card_bytes: int) -> int:
    """What a rank holds beside its shards while a step computes."""
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    whole = sum((dtype.itemsize + 4 * parameter.requires_grad) * parameter.numel() for parameter in model.parameters())
    if whole > UNSHARDED_SHARE * card_bytes:  # one layer at a time, two in flight
        return 2 * whole // max(1, len(decoder_layers(model)))
    if config.run.fsdp_world_size == 1 and is_held_whole(model, dtype, card_bytes):  # sums are the gradients named above
        return 0 if dtype == torch.float32 else copied_bytes(model, dtype)
    return whole


def _tokens(config: Config) -> int:
    """Most of a micro-batch."""
    batch = config.batch
    return batch.train_token_budget or 0 if batch.train_packing == "varlen" else batch.batch_size * batch.max_length


def _activation_bytes(model: nn.Module, config: Config) -> int:
    """What the backward pass needs of each layer: its input, both norms, q, k, v before and after rotation, gate, up and their product."""
    settings: PretrainedConfig = model.config
    hidden, heads = settings.hidden_size, settings.num_attention_heads
    query, key = heads * head_size(settings), _kv_heads(settings) * head_size(settings)
    layer = _itemsize(config) * (4 * hidden + 5 * query + 4 * key + 3 * _intermediate(settings))
    layers, kept = len(decoder_layers(model)), _itemsize(config) * hidden
    per_token = layers * kept + layer if config.model.gradient_checkpointing else layers * layer
    return _tokens(config) * per_token


def _logit_bytes(model: nn.Module, config: Config) -> int:
    """Logits and their gradient, at every token or at the trained ones."""
    share = _TRAINED_SHARE if config.batch.train_logprob_mode == "response_only_lm_head" else 1.0
    return int(_tokens(config) * share) * model.config.vocab_size * 2 * _itemsize(config)


def _vllm_bytes(model: nn.Module, config: Config) -> dict[str, int]:
    settings, inference = model.config, config.inference
    total = sum(parameter.numel() for parameter in model.parameters())
    per_token = _itemsize(config) * (4 * settings.hidden_size + 3 * _intermediate(settings))
    size_bytes = _itemsize(config) * total
    working = inference.vllm_max_num_batched_tokens * per_token + inference.vllm_max_num_seqs * settings.vocab_size * 16
    if not inference.enforce_eager:  # float32 partial sums of each part
        heads = settings.num_attention_heads // inference.infer_tp_size
        working += 4 * heads * head_size(settings) * _KEY_SPLITS * min(_GRAPH_TOKENS, inference.vllm_max_num_batched_tokens)
    # Staging holds the whole model on each worker, whatever --infer-tp-size is.
    return {"weights": size_bytes // inference.infer_tp_size, "staging": size_bytes, "working memory": working + _VLLM_BASE}


def _kv_bytes_per_token(model: nn.Module, config: Config) -> int:
    heads = max(1, _kv_heads(model.config) // config.inference.infer_tp_size)
    return 2 * _itemsize(config) * len(decoder_layers(model)) * heads * head_size(model.config)


def _itemsize(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _kv_heads(settings: PretrainedConfig) -> int:
    return getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads


def _intermediate(settings: PretrainedConfig) -> int:
    """Width of the feed-forward part that one token passes: of a mixture, the experts that it is sent to."""
    experts = getattr(settings, "num_experts_per_tok", None)
    width = getattr(settings, "moe_intermediate_size", None)
    if experts and width:
        return experts * width + (getattr(settings, "shared_expert_intermediate_size", None) or 0)
    return getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def _parts(parts: dict[str, int]) -> str:
    """What shows at one decimal."""
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if abs(size) >= GIB // 20) or "next to nothing"
