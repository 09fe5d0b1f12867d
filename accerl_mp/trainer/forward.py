"""One forward over a micro-batch: what the loss needs of each trained token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accerl_mp.algorithms.logprobs import token_logprobs
from accerl_mp.algorithms.losses import router_balance
from accerl_mp.config import Config
from accerl_mp.trainer.batches import MicroBatch


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
    only_needed = config.batch.train_logprob_mode == "response_only_lm_head" and batch.is_packed
    if only_needed:
        arguments["logits_to_keep"] = batch.prediction_indices
    if with_balance:
        arguments["output_router_logits"] = True
    output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **arguments)
    logits = output.logits
    rows = logits[0] if only_needed else logits.flatten(0, 1)[batch.prediction_indices]
    compiled = config.model.compile == "on"
    logprobs, entropy = token_logprobs(rows, batch.targets, temperature=config.inference.infer_temperature, compiled=compiled)
    balance = router_balance(output.router_logits, model.config.num_experts_per_tok, _is_real(batch)) if with_balance else None
    return Forward(logprobs, entropy, balance)


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
