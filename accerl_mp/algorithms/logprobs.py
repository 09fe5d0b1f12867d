"""Log-probabilities of given tokens, in float32, without a [tokens, vocabulary] tensor in float32.

Logits may be bfloat16: each chunk of rows is turned to float32, reduced, and forgotten; the backward pass computes it again.
"""

import torch
from torch import Tensor

CHUNK_ROWS = 1024
"""Rows turned to float32 at a time: 0.6 GiB with a vocabulary of 152k."""


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_rows: int = CHUNK_ROWS) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` ([R] int64) under softmax(logits / temperature), and the entropy, each [R] float32.

    `logits` [R, V] in any float dtype; their gradient comes in the same dtype. The entropy has no gradient.
    """
    return _ChunkedLogprobs.apply(logits, targets, 1.0 / temperature, chunk_rows)


class _ChunkedLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot(target) - softmax) / temperature, row by row."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, inverse_temperature: float, chunk_rows: int) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        normalisers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, min(start + chunk_rows, num_rows))
            scaled = logits[rows].float() * inverse_temperature
            log_z = torch.logsumexp(scaled, dim=-1)
            normalisers[rows] = log_z
            logprobs[rows] = scaled.gather(-1, targets[rows, None]).squeeze(-1) - log_z
            probabilities = torch.exp(scaled - log_z[:, None])
            entropies[rows] = log_z - (probabilities * scaled.clamp(min=-1e30)).sum(-1)  # a masked logit is -inf: 0 * -inf
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.inverse_temperature, ctx.chunk_rows = inverse_temperature, chunk_rows
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        grads = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.chunk_rows):
            rows = slice(start, min(start + ctx.chunk_rows, logits.shape[0]))
            scale = (grad_logprobs[rows] * ctx.inverse_temperature)[:, None]
            probabilities = torch.exp(logits[rows].float() * ctx.inverse_temperature - normalisers[rows, None])
            chunk = probabilities.mul_(-scale)
            chunk.scatter_add_(-1, targets[rows, None], scale.expand(-1, 1))
            grads[rows] = chunk
        return grads, None, None, None
