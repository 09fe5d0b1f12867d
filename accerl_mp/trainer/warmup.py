"""One micro-batch of the largest size, thrown away: before vLLM is ready kernels are compiled and memory is seen to suffice."""

import logging
import time

import torch
from torch import nn

from accerl_mp.config import Config
from accerl_mp.models.attention import Segments
from accerl_mp.models.fsdp import collect_gradients, set_last_micro_batch
from accerl_mp.trainer.batches import MicroBatch
from accerl_mp.trainer.forward import micro_batch_forward
from accerl_mp.trainer.ranks import Ranks

_TRAINED_EVERY = 4
"""Every fourth token trains."""

_log = logging.getLogger(__name__)


def warm_up(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """A forward and a backward where layers are compiled (else nothing); weights and gradients stay as they were. Collective."""
    if config.model.compile != "on":
        return
    started = time.perf_counter()
    batch = largest_micro_batch(config).to(ranks.device)
    set_last_micro_batch(model, True, unsharded=True)
    forward = micro_batch_forward(model, batch, config, with_balance=config.algorithm.router_aux_loss_coef > 0)
    forward.logprobs.sum().backward()
    collect_gradients(model)
    model.zero_grad(set_to_none=True)
    _log.info("warmed up with %d tokens in %.1f s%s", sum(batch.lengths), time.perf_counter() - started, peak_memory(ranks.device))


def largest_micro_batch(config: Config) -> MicroBatch:
    """As many tokens as one may hold, in samples of --max-length and what is left; on the CPU."""
    settings = config.batch
    if is_packed := settings.train_packing == "varlen":
        whole, rest = divmod(settings.train_token_budget or 1, settings.max_length)
        lengths = ([settings.max_length] * whole + [rest] * (rest > 1))[: settings.batch_size]
    else:
        lengths = [settings.max_length] * settings.batch_size
    total = sum(lengths)
    predictions = torch.arange(0, total, _TRAINED_EVERY)
    counts = torch.zeros(len(lengths), dtype=torch.int64)
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[predictions]
    positions = torch.cat([torch.arange(length) for length in lengths])
    shape = (1, total) if is_packed else (len(lengths), settings.max_length)
    return MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=positions.view(shape),
        prediction_indices=predictions,
        targets=torch.zeros_like(predictions),
        old_logprobs=torch.zeros(len(predictions)),
        advantages=torch.zeros(len(predictions)),
        sequence_ids=sequence_ids,
        sequence_lengths=counts.index_add(0, sequence_ids, torch.ones_like(sequence_ids)),
        is_on_policy=torch.zeros(len(predictions)),
        lengths=lengths,
        is_packed=is_packed,
        segments=Segments.of(lengths, "cpu") if is_packed else None,
    )


def peak_memory(device: torch.device) -> str:
    """The most that this process has allocated on a GPU, for the end of a log line; empty on CPU."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize(device)
    return f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of GPU memory at most"
