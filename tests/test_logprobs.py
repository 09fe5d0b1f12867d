"""Chunked log-probabilities: values, gradients and precision against plain float64."""

import pytest
import torch

from accerl_mp.algorithms import logprobs as module
from accerl_mp.algorithms.logprobs import token_logprobs


def _reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 3, 8, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_values_and_gradients_agree_with_log_softmax(chunk_rows: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(8, 50) * 3, torch.randint(0, 50, (8,)), torch.randn(8)
    ours, plain = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropies = token_logprobs(ours, targets, temperature=temperature, chunk_rows=chunk_rows)
    expected, expected_entropies = _reference(plain, targets, temperature)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_give_float32_logprobs() -> None:
    """Against float64 of the same bfloat16 logits: exact to float32, not to bfloat16 (which would be off by 0.005 nats)."""
    torch.manual_seed(1)
    logits, targets = (torch.randn(64, 1000) * 4).bfloat16(), torch.randint(0, 1000, (64,))
    logprobs, _ = token_logprobs(logits, targets)
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - _reference(logits, targets, 1.0)[0]).abs().max() < 1e-5


def test_the_gradient_comes_in_the_logits_dtype() -> None:
    logits = torch.randn(4, 10).bfloat16().requires_grad_()
    token_logprobs(logits, torch.zeros(4, dtype=torch.long))[0].sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_masked_vocabulary_entries_are_allowed() -> None:
    logits = torch.randn(2, 6)
    logits[:, 4:] = float("-inf")
    logits.requires_grad_()
    logprobs, entropies = token_logprobs(logits, torch.tensor([0, 3]))
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropies).all()
    assert torch.isfinite(logits.grad).all()


def test_no_rows_are_no_problem() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 7)


def test_what_is_compiled_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that a GPU compiles, run as they are; tests/gpu runs them compiled."""
    monkeypatch.setattr(module, "_compiled_reduce", lambda: module._reduce_rows)
    monkeypatch.setattr(module, "_compiled_grads", lambda: module._write_grads_in_one_pass)
    torch.manual_seed(0)
    logits, targets, weights = (torch.randn(9, 50) * 3).bfloat16(), torch.randint(0, 50, (9,)), torch.randn(9)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    for tensor, compiled in ((ours, True), (plain, False)):
        logprobs, _ = token_logprobs(tensor, targets, temperature=0.7, compiled=compiled, chunk_rows=4)
        (logprobs * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-6, rtol=1e-2)
