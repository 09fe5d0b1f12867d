"""The LM head in chunks of rows: log-probabilities straight from hidden states, so that [tokens, vocabulary] exists in no dtype.

The logits of a chunk are computed, reduced and forgotten; the backward pass computes them again. Where that is one chunk anyway,
nothing is computed twice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accerl_mp.algorithms.logprobs import CHUNK_ROWS, COMPILED_CHUNK_ROWS, token_logprobs
from accerl_mp.models.fsdp import reshard

_log = logging.getLogger(__name__)

Reduced = tuple[Tensor, Tensor, Sequence[Tensor] | None]
"""(log-probabilities [R] float32, entropies [R] float32, router logits of each layer). A tuple: FSDP looks for tensors in it."""


@dataclass(frozen=True)
class Rows:
    """What to reduce."""

    indices: Tensor
    """[R] int64 into the flattened rows of the batch."""
    targets: Tensor
    """[R] int64, the token that each row predicts."""
    temperature: float = 1.0


def chunk_head(model: nn.Module, device: torch.device, *, compiled: bool = False, chunk_rows: int | None = None) -> bool:
    """Let `model(..., rows=Rows(...))` give Reduced. False, and the model as it was, where that isn't what its own forward computes.

    Collective if sharded. It goes through the model's own call, for FSDP's hooks.
    """
    chunk_rows = chunk_rows or (COMPILED_CHUNK_ROWS if compiled else CHUNK_ROWS)
    own, body, head = model.forward, model.base_model, model.get_output_embeddings()  # type: ignore[operator]
    if body is model or head is None:
        return False

    @wraps(own)
    def forward(*arguments: Any, rows: Rows | None = None, **options: Any) -> Any:
        if rows is None:
            return own(*arguments, **options)
        output = body(*arguments, **options)
        hidden = output.last_hidden_state.flatten(0, 1)[rows.indices]
        reduce_chunk = _head_of(model, head, rows.temperature, compiled)
        return *_reduce(reduce_chunk, hidden, rows.targets, chunk_rows), getattr(output, "router_logits", None)

    model.forward = forward  # type: ignore[method-assign]
    model.has_chunked_head = True  # type: ignore[assignment]
    if not _agrees(model, device):
        model.forward = own  # type: ignore[method-assign]
        model.has_chunked_head = False  # type: ignore[assignment]
        _log.warning("%s does more to its logits than is known here: they are kept whole, tokens x vocabulary", type(model).__name__)
    return model.has_chunked_head  # type: ignore[return-value]


def _head_of(model: nn.Module, head: nn.Module, temperature: float, compiled: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    cap = getattr(model.config, "final_logit_softcapping", None)

    def reduce_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return token_logprobs(logits, targets, temperature=temperature, compiled=compiled)

    return reduce_chunk


def _reduce(
    reduce_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], hidden: Tensor, targets: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    if len(hidden) <= chunk_rows:
        return reduce_chunk(hidden, targets)
    parts = [
        checkpoint(reduce_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def _agrees(model: nn.Module, device: torch.device) -> bool:
    """With the model's own logits, on a few tokens."""
    tokens = torch.arange(8, device=device)
    with torch.compiler.set_stance("force_eager"):  # a forward without gradients would be compiled apart
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        got, _, _ = model(input_ids=tokens[None], use_cache=False, rows=Rows(tokens[:-1], tokens[1:]))
    expected, _ = token_logprobs(logits, tokens[1:])
    reshard(model)
    return torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
