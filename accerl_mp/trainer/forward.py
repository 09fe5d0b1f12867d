"""One forward over a micro-batch: what the loss needs of each trained token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accerl_mp.algorithms.logprobs import token_logprobs
from accerl_mp.algorithms.losses import router_balance
from accerl_mp.config import Config
from accerl_mp.trainer.batches import MicroBatch
from accerl_mp.trainer.head import Reduced, Rows


@dataclass
class Forward:
    """R trained tokens."""

    logprobs: Tensor
    """[R] float32, under the sampling temperature."""
    entropy: Tensor
    """[R] float32, without gradient."""
    balance: Tensor | None
    """Scalar: how evenly the router uses the experts, over all real tokens; None where it is not asked for."""


def micro_batch_forward(model: nn.Module, batch: MicroBatch, config: Config, *, with_balance: bool = False) -> Forward:
    """Whatever the layout. `with_balance` is for models with experts (`--router-aux-loss-coef`)."""
    arguments = batch.segments.forward_arguments(model.config._attn_implementation) if batch.segments else {}
    arguments |= {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    if with_balance:
        arguments["output_router_logits"] = True
    only_needed = config.batch.train_logprob_mode == "response_only_lm_head" and batch.is_packed
    reduce = _in_chunks if getattr(model, "has_chunked_head", False) else _from_logits
    logprobs, entropy, router_logits = reduce(model, batch, arguments, only_needed, config)
    balance = router_balance(router_logits, model.config.num_experts_per_tok, _is_real(batch)) if with_balance else None
    return Forward(logprobs, entropy, balance)


def _in_chunks(model: nn.Module, batch: MicroBatch, arguments: dict[str, Any], only_needed: bool, config: Config) -> Reduced:
    """Logits of a chunk of rows at a time; of all rows, or of those that are needed."""
    temperature = config.inference.infer_temperature
    if only_needed:
        return model(**arguments, rows=Rows(batch.prediction_indices, batch.targets, temperature))
    following = batch.input_ids.flatten().roll(-1)
    everywhere = Rows(torch.arange(len(following), device=following.device), following, temperature)
    logprobs, entropy, router_logits = model(**arguments, rows=everywhere)
    return logprobs[batch.prediction_indices], entropy[batch.prediction_indices], router_logits


def _from_logits(model: nn.Module, batch: MicroBatch, arguments: dict[str, Any], only_needed: bool, config: Config) -> Reduced:
    """Of a model whose head can't be taken apart."""
    if only_needed:
        arguments |= {"logits_to_keep": batch.prediction_indices}
    output = model(**arguments)
    rows = output.logits[0] if only_needed else output.logits.flatten(0, 1)[batch.prediction_indices]
    compiled, temperature = config.model.compile == "on", config.inference.infer_temperature
    reduced = token_logprobs(rows, batch.targets, temperature=temperature, compiled=compiled)
    return *reduced, getattr(output, "router_logits", None)


def micro_batch_logprobs(model: nn.Module, batch: MicroBatch, config: Config) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each trained token under the sampling temperature, each [R] float32."""
    forward = micro_batch_forward(model, batch, config)
    return forward.logprobs, forward.entropy


def _is_real(batch: MicroBatch) -> Tensor | None:
    """[B * S] bool, False on padding; None where there is none."""
    if batch.is_packed:
        return None
    lengths = torch.tensor(batch.lengths, device=batch.input_ids.device)
    return (torch.arange(batch.input_ids.shape[1], device=lengths.device) < lengths[:, None]).flatten()
