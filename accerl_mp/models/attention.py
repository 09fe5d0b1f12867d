"""Attention over packed rows: several samples one after the other, each attending to itself only.

Four functions behind Transformers' attention interface, chosen by name in the model's config:

    accerl_segments   PyTorch SDPA, one causal call a sample; any device and dtype
    accerl_varlen     PyTorch's varlen kernel (FlashAttention), one call a pack; GPU, bfloat16 or float16
    accerl_fa2        the flash-attn package's kernel, likewise (Transformers' own way to it is compiled anew for every layer)
    accerl_cudnn      cuDNN's kernels for Hopper and newer cards, likewise (`cudnn_attention.py`)

None has a mask function, so Transformers builds no mask: a [T, T] mask of a pack costs 3.3 times the time. Without segments
all are plain causal attention over the rows of a batch: padding on the right needs no mask, since no token looks right.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from accerl_mp.models import cudnn_attention as cudnn

SEGMENTS = "accerl_segments"
VARLEN = "accerl_varlen"
FLASH2 = "accerl_fa2"  # without "flash", or Transformers looks for a kernel of that name
CUDNN = "accerl_cudnn"
NAMES = {"sdpa": SEGMENTS, "varlen": VARLEN, "flash_attention_2": FLASH2, "cudnn": CUDNN}
"""By `--attn-implementation`."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which a model asks for attention that neither function computes (Gemma 2's soft cap, GPT-OSS's sinks, T5's bias)."""


@dataclass(frozen=True)
class Segments:
    """Where the samples of a pack lie. Travels to the attention function as keyword arguments of the model's forward."""

    lengths: list[int]
    """Tokens of each sample, in order."""
    cu_seqlens: Tensor
    """[samples + 1] int32 on the model's device: 0 and the running sum of `lengths`."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str) -> "Segments":
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, ends.to(device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Segments":
        return Segments(self.lengths, move(self.cu_seqlens))

    def forward_arguments(self, attention: str) -> dict[str, Any]:
        """For the function named `attention`; the varlen ones under the names that Transformers' own flash attention reads."""
        if attention == SEGMENTS:
            return {"segment_lengths": self.lengths}
        if attention == CUDNN:
            return cudnn.layout(self.lengths, self.cu_seqlens)
        # No list of lengths here: a compiled layer would be compiled again for each.
        longest = max(self.lengths)
        return {"cu_seq_lens_q": self.cu_seqlens, "cu_seq_lens_k": self.cu_seqlens, "max_length_q": longest, "max_length_k": longest}


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segment_lengths: list[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` [B, H, S, D], `key` and `value` with H or fewer heads; returns [B, S, H, D]. Segments only with B = 1."""
    _refuse_unsupported(module, others)
    lengths = segment_lengths or [query.shape[2]]
    grouped = {"enable_gqa": True} if _num_groups(module, query, key) > 1 else {}  # a branch: compiled, the comparison is a symbol
    parts = zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
    outputs = [_causal(*part, sliding_window=sliding_window, scale=scaling, **grouped) for part in parts]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2), None


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `segment_attention`, in one kernel call over the whole pack."""
    if cu_seq_lens_q is None:
        return segment_attention(module, query, key, value, None, scaling=scaling, sliding_window=sliding_window)
    from torch.nn.attention.varlen import varlen_attn  # looks for its kernels when it is imported

    _refuse_unsupported(module, others)
    # Fewer key heads than query heads are the kernel's own business: torch 2.11's has no enable_gqa, and needs none (tests/gpu).
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    query, key, value = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    output = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window)
    return output[None], None


def flash2_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `varlen_attention`."""
    if cu_seq_lens_q is None:
        return segment_attention(module, query, key, value, None, scaling=scaling, sliding_window=sliding_window)
    from flash_attn import flash_attn_varlen_func

    _refuse_unsupported(module, others)
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    query, key, value = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=scaling, causal=True, window_size=window)[None], None


def cudnn_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segment_ends: Tensor | None = None,
    segment_sizes: Tensor | None = None,
    longest: int = 0,
    stats_rows: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `varlen_attention`."""
    if segment_ends is None or segment_sizes is None:
        return segment_attention(module, query, key, value, None, scaling=scaling, sliding_window=sliding_window)
    _refuse_unsupported(module, others)
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(f"{type(module).__name__} has values of another size than its keys: --attn-implementation cudnn takes one size")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    pack = {"segment_ends": segment_ends, "segment_sizes": segment_sizes, "longest": longest, "stats_rows": stats_rows}
    return cudnn.attend(query, key, value, **pack, scale=scale, window=sliding_window)[None], None


def register() -> None:
    """Make the names known to Transformers (once a process; again does no harm)."""
    AttentionInterface.register(SEGMENTS, segment_attention)
    AttentionInterface.register(FLASH2, flash2_attention)
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionInterface.register(CUDNN, cudnn_attention)


def choose(wanted: str, *, device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> str:
    """The name that goes into the model's config for `--attn-implementation`.

    Raises ValueError where a forced one cannot run; `auto` takes the fastest that can.
    """
    register()
    if wanted == "auto":
        return next(NAMES[name] for name in ("cudnn", "varlen", "sdpa") if _obstacle(name, device, dtype, config) is None)
    if found := _obstacle(wanted, device, dtype, config):
        raise ValueError(f"--attn-implementation {wanted} cannot run here: {found}; auto takes what can")
    return NAMES[wanted]


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> str | None:
    """Why the attention of that flag's value cannot run; None where it can."""
    if name == "sdpa":
        return None
    if name == "cudnn":
        return cudnn.obstacle(device, dtype, head_size(config))
    obstacle = _varlen_obstacle(device, dtype, config)
    if obstacle is None and name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (launch.sh --with-flash-attn)"
    return obstacle


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _varlen_obstacle(device: torch.device, dtype: torch.dtype, config: PretrainedConfig) -> str | None:
    if device.type != "cuda":
        return "its kernels need a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels need bfloat16, the compute dtype is {dtype}"
    if head_size(config) > 256 or head_size(config) % 8:
        return f"its kernels take head sizes that are multiples of 8 up to 256, the model's is {head_size(config)}"
    return None


def _causal(query: Tensor, key: Tensor, value: Tensor, *, sliding_window: int | None, **options: Any) -> Tensor:
    """One sample (or a batch of rows) attending to itself and to the left."""
    length = query.shape[2]
    if sliding_window is None or length <= sliding_window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]
    mask = (distance >= 0) & (distance < sliding_window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _num_groups(module: torch.nn.Module, query: Tensor, key: Tensor) -> int:
    """Query heads that share a key head. From the module where it knows: in a compiled layer shapes are symbols."""
    return getattr(module, "num_key_value_groups", None) or query.shape[1] // key.shape[1]


def _refuse_unsupported(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(f"{type(module).__name__} needs attention with {name}, which no trainer attention here computes")
