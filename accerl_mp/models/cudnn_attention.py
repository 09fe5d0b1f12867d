"""cuDNN's fused attention over a whole pack, forward and backward, as two operators that a compiled layer keeps whole.

FlashAttention 2 reaches 220 to 310 TFLOP/s on a Hopper card; cuDNN has kernels written for it. NVIDIA's `nvidia-cudnn-frontend`
describes a graph (tensors of [B, H, S, D] with ragged offsets: where each sample starts in the packed rows), cuDNN plans it once,
and the plan then runs for every pack of its class: as many samples or fewer (the rest has no rows), as long or shorter. Classes are
coarse, so that a run plans a few dozen times at most; a plan takes about a tenth of a second.

T tokens of a pack, B samples (rounded up to a power of two), H heads, K key heads, D head size.
"""

import importlib
import importlib.util
import threading
import weakref
from enum import IntEnum
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accerl_mp.topology import gpu_capability, visible_gpus

INSTALL = "pip install nvidia-cudnn-frontend==1.28.0"
OLDEST_CUDNN = 91200
"""Ragged offsets with grouped heads need 9.6, 9.10.0 has known faults; older than this was never tried."""
MAX_HEAD_SIZE = 128
_PLANS = 256
_NO_WINDOW = 0
_MOST_PADDING = 4
"""Times the tokens of a pack that stats are padded to; they are kept for each layer, a value a head."""

_of_thread = threading.local()


def obstacle(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why cuDNN's attention cannot run here; None where it can. Creates no CUDA context (the launcher asks too)."""
    if device.type != "cuda":
        return "its kernels need a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels need bfloat16, the compute dtype is {dtype}"
    if head_size > MAX_HEAD_SIZE or head_size % 16:
        return f"it takes head sizes that are multiples of 16 up to {MAX_HEAD_SIZE}, the model's is {head_size}"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_initialized() else gpu_capability(visible_gpus())
    if capability is not None and capability < (9, 0):
        return f"it is for compute capability 9.0 (H100, H200) and up, this card has {capability[0]}.{capability[1]}"
    return _package_obstacle()


@lru_cache(maxsize=1)
def _package_obstacle() -> str | None:
    if importlib.util.find_spec("cudnn") is None:
        return f"nvidia-cudnn-frontend is not installed ({INSTALL})"
    try:
        version = _frontend().backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        return f"nvidia-cudnn-frontend does not load: {error}"
    if not hasattr(_frontend(), "diagonal_alignment"):
        return f"nvidia-cudnn-frontend {_frontend().__version__} is too old ({INSTALL})"
    if version < OLDEST_CUDNN:
        return f"it needs cuDNN {OLDEST_CUDNN} or newer, here is {version}"
    if (torchs := torch.backends.cudnn.version()) != version:
        return f"nvidia-cudnn-frontend has loaded cuDNN {version}, torch {torchs}: two of them in one process"
    return None


def _frontend() -> ModuleType:
    """The package, whose module is called `cudnn`. Only here: it is optional, and finds torch's libcudnn only after torch has loaded it."""
    return importlib.import_module("cudnn")


def size_class(size: int, least: int) -> int:
    """`size` rounded up to a multiple of an eighth of the next power of two, at least of `least`: at most a quarter more."""
    step = max(least, (1 << (size - 1).bit_length()) // 8)
    return -(-size // step) * step


def layout(lengths: list[int], cu_seqlens: Tensor) -> dict[str, Any]:
    """Arguments of `attend` for a pack of samples of these lengths; `cu_seqlens` [samples + 1] int32 on the model's device.

    Samples without tokens fill up to the class. Shapes and `longest` are a class's, so that packs of one class look alike; the odd
    length of both tensors is no other size of a model, which a compiler would else take for the same.
    """
    num_segments, total, longest = 1 << (len(lengths) - 1).bit_length(), sum(lengths), size_class(max(lengths), 128)
    ends = torch.cat([cu_seqlens, cu_seqlens.new_full((num_segments + 1 - len(cu_seqlens),), total)])
    padded = num_segments * longest
    return {
        "segment_ends": ends,
        "segment_sizes": ends.diff(append=ends[-1:]),
        "longest": longest,
        # Of stats in rows as long as the longest sample the backward makes its own in less than half the time.
        "stats_rows": padded if padded <= _MOST_PADDING * total else total,
    }


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_ends: Tensor,
    segment_sizes: Tensor,
    longest: int,
    stats_rows: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention within each sample: `query` [T, H, D], `key` and `value` [T, K, D], the rest from `layout`; gives [T, H, D].

    `window`: how many tokens one sees, itself included. Differentiable in the first three.
    """
    pack = (segment_ends, segment_sizes, longest, stats_rows)
    return torch.ops.accerl.cudnn_attention(query, key, value, *pack, scale, window or _NO_WINDOW)[0]


class _Uid(IntEnum):
    """Names of a graph's tensors."""

    QUERY = 1
    KEY = 2
    VALUE = 3
    OUTPUT = 4
    STATS = 5
    GRAD_OUTPUT = 6
    GRAD_QUERY = 7
    GRAD_KEY = 8
    GRAD_VALUE = 9
    SIZES_OF_QUERIES = 10
    SIZES_OF_KEYS = 11
    QUERY_OFFSETS = 12
    KEY_OFFSETS = 13
    STATS_OFFSETS = 14


class _Class(NamedTuple):
    """What a plan is made for."""

    dtype: torch.dtype
    device: int
    num_segments: int
    longest: int
    heads: int
    key_heads: int
    head_size: int
    scale: float
    window: int
    has_padded_stats: bool
    max_tokens: int
    """Rows at most; the backward's accumulators are as large. 0 for the forward, which needs none."""


class _Plan(NamedTuple):
    graph: Any
    workspace_bytes: int


_PACK = "Tensor segment_ends, Tensor segment_sizes, SymInt longest, SymInt stats_rows, float scale, int window"
_COMPILES = {"tags": torch.Tag.pt2_compliant_tag}
# Not `torch.library.custom_op`: what that wraps around a call takes as long as the call.
torch.library.define("accerl::cudnn_attention", f"(Tensor query, Tensor key, Tensor value, {_PACK}) -> (Tensor, Tensor)", **_COMPILES)
torch.library.define(
    "accerl::cudnn_attention_backward",
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor stats, {_PACK}) -> (Tensor, Tensor, Tensor)",
    **_COMPILES,
)


@torch.library.impl("accerl::cudnn_attention", "CUDA")
def _attention(
    query: Tensor, key: Tensor, value: Tensor,
    segment_ends: Tensor, segment_sizes: Tensor, longest: int, stats_rows: int, scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([T, H, D], float32 log of each row's sum for the backward: [T, H], or [B, H, S] with S = `longest`, flat)."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    kind = _class_of(query, key, segment_sizes, longest, stats_rows, scale, window, max_tokens=0)
    output, stats = torch.empty_like(query), query.new_empty((stats_rows * kind.heads,), dtype=torch.float32)
    tensors = {_Uid.QUERY: query, _Uid.KEY: key, _Uid.VALUE: value, _Uid.OUTPUT: output, _Uid.STATS: stats}
    _execute(_forward_plan(kind), tensors | _ragged(kind, segment_ends, segment_sizes), query.device)
    return output, stats


@torch.library.register_fake("accerl::cudnn_attention")
def _(query, key, value, segment_ends, segment_sizes, longest, stats_rows, scale, window):
    return query.new_empty(query.shape), query.new_empty((stats_rows * query.shape[1],), dtype=torch.float32)


@torch.library.impl("accerl::cudnn_attention_backward", "CUDA")
def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, stats: Tensor,
    segment_ends: Tensor, segment_sizes: Tensor, longest: int, stats_rows: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    grad, query, key, value = grad.contiguous(), query.contiguous(), key.contiguous(), value.contiguous()
    kind = _class_of(query, key, segment_sizes, longest, stats_rows, scale, window, max_tokens=size_class(len(query), 1024))
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tensors = {_Uid.QUERY: query, _Uid.KEY: key, _Uid.VALUE: value, _Uid.OUTPUT: output, _Uid.STATS: stats, _Uid.GRAD_OUTPUT: grad}
    tensors |= dict(zip((_Uid.GRAD_QUERY, _Uid.GRAD_KEY, _Uid.GRAD_VALUE), grads, strict=True))
    _execute(_backward_plan(kind), tensors | _ragged(kind, segment_ends, segment_sizes), query.device)
    return grads


@torch.library.register_fake("accerl::cudnn_attention_backward")
def _(grad, query, key, value, output, stats, segment_ends, segment_sizes, longest, stats_rows, scale, window):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segment_ends, segment_sizes, ctx.longest, ctx.stats_rows, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, segment_ends, segment_sizes)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.accerl.cudnn_attention_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.stats_rows, ctx.scale, ctx.window)
    return *grads, *[None] * 6


torch.library.register_autograd("accerl::cudnn_attention", _differentiate, setup_context=_remember)


def _class_of(
    query: Tensor, key: Tensor, segment_sizes: Tensor, longest: int, stats_rows: int, scale: float, window: int, *, max_tokens: int
) -> _Class:
    (_, heads, head_size), key_heads = query.shape, key.shape[1]
    device, num_segments = query.device.index or 0, len(segment_sizes) - 1
    padded = stats_rows == num_segments * longest
    return _Class(query.dtype, device, num_segments, longest, heads, key_heads, head_size, scale, window, padded, max_tokens)


def _ragged(kind: _Class, segment_ends: Tensor, segment_sizes: Tensor) -> dict[int, Tensor]:
    """Lengths, and where each sample starts in elements of the packed rows."""
    offsets = _offsets(kind.heads, kind.key_heads, kind.head_size, segment_ends)
    uids = (_Uid.QUERY_OFFSETS, _Uid.KEY_OFFSETS) + (() if kind.has_padded_stats else (_Uid.STATS_OFFSETS,))
    return {_Uid.SIZES_OF_QUERIES: segment_sizes, _Uid.SIZES_OF_KEYS: segment_sizes, **dict(zip(uids, offsets, strict=False))}


def _offsets(heads: int, key_heads: int, head_size: int, segment_ends: Tensor) -> tuple[Tensor, ...]:
    """Of query, key and stats, each [ends] int64. All layers of a pack ask for the same: the last answer is kept, for this very tensor."""
    sizes = heads, key_heads, head_size
    ends_of, sizes_of, offsets = getattr(_of_thread, "offsets", (lambda: None, None, ()))
    if ends_of() is segment_ends and sizes_of == sizes:
        return offsets
    num_ends = len(segment_ends)
    # Each row starts at 16 bytes.
    rows = torch.empty((3, -(-num_ends // 2) * 2), dtype=torch.int64, device=segment_ends.device)
    torch.mul(segment_ends, _row_sizes(*sizes, segment_ends.device), out=rows[:, :num_ends])
    offsets = rows.unbind(0)
    _of_thread.offsets = weakref.ref(segment_ends), sizes, offsets
    return offsets


@lru_cache(maxsize=16)
def _row_sizes(heads: int, key_heads: int, head_size: int, device: torch.device) -> Tensor:
    """[3, 1] int64: elements of a token in query, key and stats. Kept on the device: made anew, it would be copied for each layer."""
    return torch.tensor([[heads * head_size], [key_heads * head_size], [heads]], dtype=torch.int64, device=device)


def _execute(plan: _Plan, tensors: dict[int, Tensor], device: torch.device) -> None:
    """On the current stream, in memory of torch's allocator."""
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    plan.graph.execute({int(uid): tensor for uid, tensor in tensors.items()}, workspace, handle=_handle(device))


def _handle(device: torch.device) -> Any:
    """cuDNN's handle of this thread and card (the backward runs on autograd's thread), set to the current stream."""
    handles = _of_thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = _frontend().create_handle()
    _frontend().set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


class _Graph:
    """A graph in the making: tensors of packed rows."""

    def __init__(self, kind: _Class) -> None:
        self.cudnn, self.kind = _frontend(), kind
        types = self.cudnn.data_type
        self.io_type = types.BFLOAT16 if kind.dtype == torch.bfloat16 else types.HALF
        self.graph = self.cudnn.pygraph(
            io_data_type=self.io_type,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=_handle(torch.device("cuda", kind.device)),
        )
        self.query_offsets, self.key_offsets = (
            self._column(uid, kind.num_segments + 1, types.INT64) for uid in (_Uid.QUERY_OFFSETS, _Uid.KEY_OFFSETS)
        )
        self.stats_offsets = None if kind.has_padded_stats else self._column(_Uid.STATS_OFFSETS, kind.num_segments + 1, types.INT64)

    def _column(self, uid: _Uid, length: int, data_type: Any) -> Any:
        return self.graph.tensor(name=uid.name.lower(), dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, uid=int(uid))

    def _shape(self, uid: _Uid) -> tuple[list[int], list[int]]:
        """(sizes, strides) of [B, H, S, D] in rows of tokens; the first stride is never used, offsets stand in for it."""
        kind = self.kind
        if uid is _Uid.STATS:
            inner = [kind.longest, 1] if kind.has_padded_stats else [1, kind.heads]
            return [kind.num_segments, kind.heads, kind.longest, 1], [kind.heads * kind.longest, *inner, 1]
        heads = kind.key_heads if uid in (_Uid.KEY, _Uid.VALUE, _Uid.GRAD_KEY, _Uid.GRAD_VALUE) else kind.heads
        size = kind.head_size
        return [kind.num_segments, heads, kind.longest, size], [heads * kind.longest * size, size, heads * size, 1]

    def _offsets(self, uid: _Uid) -> Any:
        if uid is _Uid.STATS:
            return self.stats_offsets
        return self.key_offsets if uid in (_Uid.KEY, _Uid.VALUE, _Uid.GRAD_KEY, _Uid.GRAD_VALUE) else self.query_offsets

    def _type(self, uid: _Uid) -> Any:
        return self.cudnn.data_type.FLOAT if uid is _Uid.STATS else self.io_type

    def given(self, uid: _Uid) -> Any:
        dim, stride = self._shape(uid)
        tensor = self.graph.tensor(name=uid.name.lower(), dim=dim, stride=stride, data_type=self._type(uid), uid=int(uid))
        self._place(tensor, uid)
        return tensor

    def returned(self, tensor: Any, uid: _Uid) -> None:
        dim, stride = self._shape(uid)
        tensor.set_uid(int(uid)).set_output(True).set_dim(dim).set_stride(stride).set_data_type(self._type(uid))
        self._place(tensor, uid)

    def _place(self, tensor: Any, uid: _Uid) -> None:
        if (offsets := self._offsets(uid)) is not None:
            tensor.set_ragged_offset(offsets)

    def mask(self) -> dict[str, Any]:
        """Causal, within samples of their own lengths."""
        cudnn, kind = self.cudnn, self.kind
        sizes = [self._column(uid, kind.num_segments, cudnn.data_type.INT32) for uid in (_Uid.SIZES_OF_QUERIES, _Uid.SIZES_OF_KEYS)]
        return {
            "attn_scale": kind.scale,
            "use_padding_mask": True,
            "seq_len_q": sizes[0],
            "seq_len_kv": sizes[1],
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
            # cuDNN's left bound counts the tokens that are seen, as `window` does.
            "diagonal_band_left_bound": None if kind.window == _NO_WINDOW else kind.window,
        }

    def plan(self) -> _Plan:
        """Raises the package's own error, which says why, where cuDNN has no kernel for the graph."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return _Plan(self.graph, self.graph.get_workspace_size())


@lru_cache(maxsize=_PLANS)
def _forward_plan(kind: _Class) -> _Plan:
    graph = _Graph(kind)
    query, key, value = (graph.given(uid) for uid in (_Uid.QUERY, _Uid.KEY, _Uid.VALUE))
    output, stats = graph.graph.sdpa(name="sdpa", q=query, k=key, v=value, generate_stats=True, **graph.mask())
    graph.returned(output, _Uid.OUTPUT)
    graph.returned(stats, _Uid.STATS)
    return graph.plan()


@lru_cache(maxsize=_PLANS)
def _backward_plan(kind: _Class) -> _Plan:
    graph = _Graph(kind)
    uids = {"q": _Uid.QUERY, "k": _Uid.KEY, "v": _Uid.VALUE, "o": _Uid.OUTPUT, "dO": _Uid.GRAD_OUTPUT, "stats": _Uid.STATS}
    given = {name: graph.given(uid) for name, uid in uids.items()}
    # Without a bound on the rows the accumulators would be of B times the longest sample.
    bounds = {"max_total_seq_len_q": kind.max_tokens, "max_total_seq_len_kv": kind.max_tokens}
    grads = graph.graph.sdpa_backward(name="sdpa_backward", **given, **bounds, **graph.mask())
    for tensor, uid in zip(grads, (_Uid.GRAD_QUERY, _Uid.GRAD_KEY, _Uid.GRAD_VALUE), strict=True):
        graph.returned(tensor, uid)
    return graph.plan()
