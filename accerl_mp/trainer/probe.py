"""Log-probabilities of a given sequence under the trainer's weights, to compare with vLLM's."""

import numpy as np
import torch
from torch import nn

from accerl_mp.algorithms.logprobs import token_logprobs
from accerl_mp.models.attention import Segments
from accerl_mp.models.fsdp import reshard


@torch.no_grad()
def forced_logprobs(model: nn.Module, ids: list[int], device: torch.device) -> np.ndarray:
    """[T] float32: each token's logprob given those before it, temperature 1; 0 for the first. Collective if sharded."""
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids), device=device)
    segments = Segments.of([len(ids)], device).forward_arguments(model.config._attn_implementation)  # the attention that trains
    with torch.compiler.set_stance("force_eager"):  # a forward without gradients would be compiled apart
        logits = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **segments).logits[0, :-1]
    logprobs, _ = token_logprobs(logits, tokens[1:])
    reshard(model)
    return np.concatenate([[0.0], logprobs.cpu().numpy()]).astype(np.float32)
