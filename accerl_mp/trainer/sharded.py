"""The trainer's model on its ranks, and the frozen one it started from."""

import hashlib
import logging
import time
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from accerl_mp.config import Config
from accerl_mp.models.build import check_logits_to_keep, load_model, load_weights
from accerl_mp.models.fsdp import compile_layers, fits_unsharded, reshard, shard
from accerl_mp.samples import RLSample
from accerl_mp.trainer.batches import build_micro_batch
from accerl_mp.trainer.forward import micro_batch_logprobs
from accerl_mp.trainer.head import chunk_head
from accerl_mp.trainer.ranks import Ranks

_log = logging.getLogger(__name__)


def build_sharded(config: Config, ranks: Ranks, dtype: torch.dtype, *, is_frozen: bool = False) -> tuple[nn.Module, bool]:
    """(the model with its weights, whether whole parameters fit for the length of a step)."""
    device, started = ranks.device, time.perf_counter()
    model = load_model(config, device, meta=True)
    unsharded = fits_unsharded(model, compute_dtype=dtype, device=device)
    if config.model.compile == "on":
        compile_layers(model)
    shard(model, compute_dtype=dtype, device=device, unsharded=unsharded, is_frozen=is_frozen)
    load_weights(model, Path(config.model.model_path), device, trust_remote_code=config.model.trust_remote_code)
    if not chunk_head(model, device, compiled=config.model.compile == "on") and config.batch.train_logprob_mode == "response_only_lm_head":
        check_logits_to_keep(model, device)
    count, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or not only) for only in (False, True))
    _log.info(
        "model ready in %.1f s: %.2f M parameters, %.2f M of them trained (--train-mode %s), %s compute, attention %s",
        time.perf_counter() - started,
        count / 1e6,
        trained / 1e6,
        config.model.train_mode,
        dtype,
        model.config._attn_implementation,
    )
    return model, unsharded


class Reference:
    """The model of `--model-path` as it was at the start, sharded like the trainer; never trained (`--ref-kl-coef`).

    Each sample's logprobs are computed once, and kept while samples are used again (`--max-sample-reuse` other than 1).
    """

    def __init__(self, config: Config, ranks: Ranks, dtype: torch.dtype) -> None:
        self._model, _ = build_sharded(config, ranks, dtype, is_frozen=True)
        reshard(self._model)
        self._config, self._ranks = config, ranks
        self._known: dict[bytes, Tensor] = {}
        self._most_known = 0 if config.replay.max_sample_reuse == 1 else config.replay.replay_capacity or 1

    @classmethod
    def if_wanted(cls, config: Config, ranks: Ranks, dtype: torch.dtype) -> Self | None:
        """Collective, as all the methods."""
        return cls(config, ranks, dtype) if config.algorithm.ref_kl_coef > 0 else None

    def logprobs(self, micro_batches: list[list[RLSample]]) -> list[Tensor]:
        """[R] float32 on the CPU for each micro-batch, in the order of its trained tokens."""
        keys = [[_key(sample) for sample in samples] for samples in micro_batches]
        is_missing = [float(any(key not in self._known for key in batch)) for batch in keys]
        # A forward is a collective: all ranks make it where one of them needs it.
        is_due = self._ranks.maxima(is_missing) if self._most_known else is_missing
        known = dict(self._known)
        for samples, batch, due in zip(micro_batches, keys, is_due, strict=True):
            if due:
                known |= zip(batch, self._forward(samples), strict=True)
        reshard(self._model)
        self._remember(known)
        return [torch.cat([known[key] for key in batch]) for batch in keys]

    @torch.no_grad()
    def _forward(self, samples: list[RLSample]) -> tuple[Tensor, ...]:
        packed, algorithm = self._config.batch.train_packing == "varlen", self._config.algorithm.rl_algorithm
        batch = build_micro_batch(samples, packed=packed, version=-1, algorithm=algorithm).to(self._ranks.device)
        logprobs, _ = micro_batch_logprobs(self._model, batch, self._config)
        return logprobs.cpu().split([sample.num_trained for sample in samples])

    def _remember(self, known: dict[bytes, Tensor]) -> None:
        """The newest, as many as a ring holds."""
        self._known = dict(list(known.items())[-self._most_known :]) if self._most_known else {}


def _key(sample: RLSample) -> bytes:
    """Equal for samples with the same tokens, the same of them trained: their logprobs are the same too."""
    return hashlib.blake2b(sample.input_ids.tobytes() + sample.labels.tobytes(), digest_size=16).digest()
