"""The LM head in chunks: the values and gradients of whole logits, at a peak of memory that the chunk bounds, not tokens x vocabulary."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_cases import CPU, LAYOUTS, config_for, gathered, made_sample, made_samples, single_rank

from accerl_mp.models.build import load_model, load_weights
from accerl_mp.models.fsdp import collect_gradients, set_last_micro_batch, shard
from accerl_mp.trainer import head
from accerl_mp.trainer.batches import MicroBatch, build_micro_batch
from accerl_mp.trainer.forward import micro_batch_forward

VOCABULARY, CHUNK_ROWS = 4096, 32
CHUNK_BYTES = CHUNK_ROWS * VOCABULARY * 4
WEIGHT_BYTES = VOCABULARY * 32 * 4
HEAD_BYTES = 6 * CHUNK_BYTES + 2 * WEIGHT_BYTES
"""Bound of what the head adds at its peak: logits, probabilities and temporaries of one chunk, the weight's gradient and a chunk's part."""


class LiveBytes(TorchDispatchMode):
    """Bytes of every storage that an operation makes, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size_bytes)

    def _remove(self, key: int, size_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= size_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    tiny.save_tiny(path, "qwen3", vocab_size=VOCABULARY, num_hidden_layers=1)
    return path


def _long_batch(*, packed: bool) -> MicroBatch:
    """About 1,000 tokens, a quarter of them trained: 30 and 8 chunks."""
    rng = np.random.default_rng(0)
    return build_micro_batch([made_sample(rng, 15, vocab_size=VOCABULARY) for _ in range(4)], packed=packed, version=0, algorithm="grpo")


def _peak(work: Callable[[], torch.Tensor]) -> int:
    """Bytes that live at most during a forward and its backward."""
    with LiveBytes() as live:
        work().backward()
    return live.peak


def _head_peak(folder: Path, layout: dict[str, Any]) -> int:
    """What the head adds to the peak of the model's body."""
    config = config_for(folder, **layout)
    model, batch = load_model(config, CPU), _long_batch(packed=layout["train_packing"] == "varlen")
    assert head.chunk_head(model, CPU, chunk_rows=CHUNK_ROWS)
    arguments = batch.segments.forward_arguments("accerl_segments") if batch.segments else {}
    body = _peak(lambda: model.base_model(batch.input_ids, position_ids=batch.position_ids, **arguments).last_hidden_state.sum())
    model.zero_grad(set_to_none=True)
    return _peak(lambda: micro_batch_forward(model, batch, config).logprobs.sum()) - body


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_heads_peak_is_bounded_by_the_chunk(layout: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would not be without the recomputing, or without the chunks."""
    assert _head_peak(folder, layout) <= HEAD_BYTES
    monkeypatch.setattr(head, "checkpoint", lambda work, *parts, **_: work(*parts))
    assert _head_peak(folder, layout) > HEAD_BYTES
    monkeypatch.undo()
    monkeypatch.setattr(head, "_reduce", lambda reduce_chunk, hidden, targets, chunk_rows: reduce_chunk(hidden, targets))
    assert _head_peak(folder, layout) > HEAD_BYTES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_chunks_have_the_values_and_gradients_of_whole_logits(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Float32 rounding aside (atol 1e-5, gradients rtol 1e-4): sums of the same terms in another order. Gemma 2 caps its logits."""
    options = {"final_logit_softcapping": 5.0} if family == "gemma2" else {}
    tiny.save_tiny(tmp_path, family, **options)
    config = config_for(tmp_path, infer_temperature=0.7, **layout)
    batch = build_micro_batch(made_samples(5), packed=layout["train_packing"] == "varlen", version=0, algorithm="grpo")
    weights = torch.linspace(-1, 1, len(batch.targets))
    whole, chunked = load_model(config, CPU), load_model(config, CPU)
    assert head.chunk_head(chunked, CPU, chunk_rows=7)
    outputs = [micro_batch_forward(model, batch, config, with_balance="moe" in family) for model in (whole, chunked)]
    torch.testing.assert_close(outputs[1].logprobs, outputs[0].logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs[1].entropy, outputs[0].entropy, atol=1e-4, rtol=1e-4)
    if "moe" in family:
        torch.testing.assert_close(outputs[1].balance, outputs[0].balance)
    for output in outputs:
        (output.logprobs * weights).sum().backward()
    for (name, parameter), other in zip(chunked.named_parameters(), whole.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5 * other.grad.abs().max().item(), rtol=1e-3, msg=name)


@pytest.fixture
def scaling(tmp_path: Path) -> torch.nn.Module:
    """A model that does something to its logits that nobody here knows of."""
    tiny.save_tiny(tmp_path)
    model = load_model(config_for(tmp_path), CPU)
    own = model.forward

    def forward(**arguments: Any) -> Any:
        output = own(**arguments)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward  # type: ignore[method-assign,assignment]
    return model


def test_a_head_that_is_more_than_a_matrix_stays_whole(scaling: torch.nn.Module, tmp_path: Path) -> None:
    before = scaling.forward
    assert not head.chunk_head(scaling, CPU)
    assert scaling.forward is before
    config, batch = config_for(tmp_path), build_micro_batch(made_samples(2), packed=True, version=0, algorithm="grpo")
    logits = scaling(input_ids=batch.input_ids, position_ids=batch.position_ids, segment_lengths=batch.lengths).logits[0]
    expected = logits.log_softmax(-1)[batch.prediction_indices, batch.targets]
    torch.testing.assert_close(micro_batch_forward(scaling, batch, config).logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unsharded", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_are_computed_again_from_sharded_weights(unsharded: bool, dtype: str, tmp_path: Path) -> None:
    """Under FSDP2, which frees the head's whole weight between forward and backward, and (`unsharded`) without; over two micro-batches.

    In bfloat16 a chunk's part of the weight's gradient is rounded before it is added: 2 % of the largest entry.
    """
    tiny.save_tiny(tmp_path, tied=True)
    config = config_for(tmp_path, dtype=dtype)
    batches = [build_micro_batch(made_samples(4, seed=seed), packed=True, version=0, algorithm="grpo") for seed in range(2)]
    ranks, gradients = single_rank(), []
    for chunk_rows in (7, 10_000):
        model = load_model(config, CPU, meta=True)
        shard(model, compute_dtype=getattr(torch, dtype), device=CPU, unsharded=unsharded)
        load_weights(model, tmp_path, CPU)
        assert head.chunk_head(model, CPU, chunk_rows=chunk_rows)
        for index, batch in enumerate(batches):
            set_last_micro_batch(model, index == 1, unsharded=unsharded)
            micro_batch_forward(model, batch, config).logprobs.mean().backward()
            collect_gradients(model)
        gradients.append({name: gathered(parameter.grad) for name, parameter in model.named_parameters()})
    ranks.leave()
    chunked, whole = gradients
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, grad in whole.items():
        assert float((chunked[name] - grad).abs().max()) <= tolerance * float(grad.abs().max()), name
