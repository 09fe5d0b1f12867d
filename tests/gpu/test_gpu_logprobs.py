"""The compiled logprob kernels: against float64, and what they take of memory. Checksums: the same sum as on the CPU."""

import pytest
import torch

from accerl_mp.algorithms.logprobs import token_logprobs
from accerl_mp.weight_sync.layout import checksum

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("rows", "vocabulary", "temperature"), [(5000, 1504, 1.0), (700, 151_936, 0.7), (1, 50, 1.0)])
def test_values_and_gradients_agree_with_float64(rows: int, vocabulary: int, temperature: float, compiled: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device=GPU) * 3).bfloat16()
    targets, weights = torch.randint(0, vocabulary, (rows,), device=GPU), torch.randn(rows, device=GPU)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropy = token_logprobs(ours, targets, temperature=temperature, compiled=compiled)
    (logprobs * weights).sum().backward()
    logs = torch.log_softmax(exact / temperature, dim=-1)
    expected = logs.gather(-1, targets[:, None]).squeeze(-1)
    (expected * weights).sum().backward()
    assert (logprobs.double() - expected).abs().max() < 1e-4
    assert (entropy.double() + (logs.exp() * logs).sum(-1)).abs().max() < 1e-3
    assert (ours.grad.double() - exact.grad).norm() / exact.grad.norm() < 5e-3  # rounded to bfloat16


def test_nothing_of_the_vocabulary_is_ever_float32() -> None:
    rows, vocabulary = 8192, 151_936
    logits = torch.randn(rows, vocabulary, device=GPU, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), device=GPU)
    size = logits.numel() * 2
    token_logprobs(logits[:64], targets[:64], compiled=True)[0].sum().backward()
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = token_logprobs(logits, targets, compiled=True)
    logprobs.sum().backward()
    # The gradient, and a chunk of it on the way there.
    assert torch.cuda.max_memory_allocated() - before < 1.6 * size


def test_checksums_do_not_depend_on_the_device() -> None:
    torch.manual_seed(0)
    for tensor in (torch.randn(1_300_007), torch.randn(3, 5).bfloat16(), torch.arange(7, dtype=torch.uint8)):
        assert checksum(tensor) == checksum(tensor.to(GPU))
