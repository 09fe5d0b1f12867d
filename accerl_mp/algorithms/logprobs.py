"""Log-probabilities of given tokens, in float32, without a [tokens, vocabulary] tensor in float32.

Logits may be bfloat16: each chunk of rows is turned to float32, reduced, and forgotten; the backward pass computes it again.
Compiled, a chunk is one kernel each way and float32 never leaves the registers.
"""

from functools import cache

import torch
from torch import Tensor

CHUNK_ROWS = 1024
"""Rows turned to float32 at a time: 0.6 GiB with a vocabulary of 152k."""
COMPILED_CHUNK_ROWS = 4096
"""Fewer, larger kernels; a chunk's elements still fit in 32-bit indices up to a vocabulary of 500k."""


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, compiled: bool = False, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` ([R] int64) under softmax(logits / temperature), and the entropy, each [R] float32.

    `logits` [R, V] in any float dtype; their gradient comes in the same dtype. The entropy has no gradient.
    """
    chunk_rows = chunk_rows or (COMPILED_CHUNK_ROWS if compiled else CHUNK_ROWS)
    return _ChunkedLogprobs.apply(logits, targets, 1.0 / temperature, chunk_rows, compiled)


class _ChunkedLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot(target) - softmax) / temperature, row by row."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, inverse_temperature: float, chunk_rows: int, compiled: bool) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        normalisers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        reduce_rows = _compiled_reduce() if compiled else _reduce_rows
        for rows in _chunks(logits.shape[0], chunk_rows):
            logprobs[rows], normalisers[rows], entropies[rows] = reduce_rows(logits[rows], targets[rows], inverse_temperature)
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.settings = (inverse_temperature, chunk_rows, compiled)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        inverse_temperature, chunk_rows, compiled = ctx.settings
        grads = torch.empty_like(logits)
        row_grads = _compiled_grads() if compiled else _write_grads
        for rows in _chunks(logits.shape[0], chunk_rows):
            row_grads(grads[rows], logits[rows], targets[rows], normalisers[rows], grad_logprobs[rows], inverse_temperature)
        return grads, None, None, None, None


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def _reduce_rows(logits: Tensor, targets: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of the target, log of the normaliser, entropy), each [rows] float32."""
    scaled = logits.float() * inverse_temperature
    log_z = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - log_z
    probabilities = torch.exp(scaled - log_z[:, None])
    return logprobs, log_z, log_z - (probabilities * scaled.clamp(min=-1e30)).sum(-1)  # a masked logit is -inf: 0 * -inf


def _write_grads(out: Tensor, logits: Tensor, targets: Tensor, log_z: Tensor, grad_logprobs: Tensor, inverse_temperature: float) -> None:
    scale = (grad_logprobs * inverse_temperature)[:, None]
    chunk = torch.exp(logits.float() * inverse_temperature - log_z[:, None]).mul_(-scale)
    out.copy_(chunk.scatter_add_(-1, targets[:, None], scale))


def _write_grads_in_one_pass(
    out: Tensor, logits: Tensor, targets: Tensor, log_z: Tensor, grad_logprobs: Tensor, inverse_temperature: float
) -> None:
    """The same without a scatter, which would keep the compiler from fusing it."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    probabilities = torch.exp(logits.float() * inverse_temperature - log_z[:, None])
    out.copy_((is_target.float() - probabilities) * (grad_logprobs * inverse_temperature)[:, None])


@cache
def _compiled_reduce():
    return torch.compile(_reduce_rows, dynamic=True)


@cache
def _compiled_grads():
    return torch.compile(_write_grads_in_one_pass, dynamic=True)
