"""Compiled decoder layers, traced for real and run without a code generator: one trace serves every layer and every length."""

from functools import partialmethod
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from trainer_cases import CPU, config_for, made_samples, single_rank, train_steps

from accerl_mp.algorithms import logprobs
from accerl_mp.models import attention, cudnn_attention
from accerl_mp.trainer.probe import forced_logprobs
from accerl_mp.trainer.sharded import build_sharded


def _varlen_without_a_gpu(module: nn.Module, query, key, value, mask, *, cu_seq_lens_q=None, max_length_q=None, **options):
    """In place of the kernel: its arguments, plain causal attention over the pack."""
    return attention.segment_attention(module, query, key, value, mask, scaling=options["scaling"])


def _attend_without_a_gpu(query, key, value, *, segment_ends, segment_sizes, longest, stats_rows, scale, window):
    """In place of cuDNN's operators, likewise."""
    rows = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return attention.segment_attention(nn.Module(), *rows, None, scaling=scale)[0][0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("chosen", [attention.VARLEN, attention.CUDNN])
def test_one_trace_serves_every_layer_and_length(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past eight traces of one function the compiler gives up and the rest runs eager: a model of nine layers would tell."""
    from torch._dynamo.utils import counters

    tiny.save_tiny(tmp_path, num_hidden_layers=9)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(attention, "varlen_attention", _varlen_without_a_gpu)
    monkeypatch.setattr(cudnn_attention, "attend", _attend_without_a_gpu)
    monkeypatch.setattr(attention, "choose", lambda *_, **__: attention.register() or chosen)
    monkeypatch.setattr("accerl_mp.models.build.choose", attention.choose)
    monkeypatch.setattr(logprobs, "_compiled_reduce", lambda: logprobs._reduce_rows)
    monkeypatch.setattr(logprobs, "_compiled_grads", lambda: logprobs._write_grads_in_one_pass)
    torch._dynamo.reset()
    counters.clear()
    ranks = single_rank()
    config = config_for(tmp_path, compile="on", train_logprob_mode="response_only_lm_head")
    model, unsharded = build_sharded(config, ranks, torch.float32)
    before = counters["stats"]["unique_graphs"]
    forced_logprobs(model, [5, 6, 7], CPU)
    assert counters["stats"]["unique_graphs"] == before  # what runs rarely is not compiled
    samples = made_samples(12)
    train_steps(model, config, ranks, [[samples[:2], samples[2:5]]], unsharded=unsharded)
    traced = counters["stats"]["unique_graphs"]
    train_steps(model, config, ranks, [[samples[5:6], samples[6:12]]], unsharded=unsharded)
    forced_logprobs(model, [8, 9], CPU)
    ranks.leave()
    torch._dynamo.reset()
    assert before < traced <= 6, counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == traced
