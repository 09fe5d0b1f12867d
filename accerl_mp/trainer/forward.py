"""One forward over a micro-batch: what the loss needs of each trained token."""

from torch import Tensor, nn

from accerl_mp.algorithms.logprobs import token_logprobs
from accerl_mp.config import Config
from accerl_mp.trainer.batches import MicroBatch


def micro_batch_logprobs(model: nn.Module, batch: MicroBatch, config: Config) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each trained token under the sampling temperature, each [R] float32."""
    arguments = batch.segments.forward_arguments(model.config._attn_implementation) if batch.segments else {}
    only_needed = config.batch.train_logprob_mode == "response_only_lm_head" and batch.is_packed
    if only_needed:
        arguments["logits_to_keep"] = batch.prediction_indices
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **arguments).logits
    rows = logits[0] if only_needed else logits.flatten(0, 1)[batch.prediction_indices]
    return token_logprobs(rows, batch.targets, temperature=config.inference.infer_temperature)
