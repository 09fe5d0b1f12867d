"""One optimizer step: forward and backward of its micro-batches, clip, update. The loss is exact over all ranks.

B rows, S columns, R trained tokens, V vocabulary. The counts of the whole step are known before its first backward, so each
micro-batch's loss is already its share of the step's mean and gradients are only ever added, over micro-batches and ranks.
"""

import logging
import math
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accerl_mp.algorithms.losses import StepTotals, normalised_advantages, token_losses, token_weights, weighted_loss
from accerl_mp.config import Config
from accerl_mp.models.fsdp import collect_gradients, note_update, reshard, set_last_micro_batch
from accerl_mp.samples import UNTRAINED, RLSample
from accerl_mp.trainer.batches import MicroBatch, build_micro_batch
from accerl_mp.trainer.forward import micro_batch_forward
from accerl_mp.trainer.prefetch import built_ahead
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.schedule import learning_rate
from accerl_mp.trainer.sharded import Reference
from accerl_mp.trainer.witness import Witness

_log = logging.getLogger(__name__)

SUMS = (
    "loss",
    "policy_loss",
    "k3",
    "entropy",
    "num_clipped",
    "num_capped",
    "ref_k3",
    "balance",
    "num_tokens",
    "on_policy_k3",
    "num_on_policy",
)
"""Of a rank's step, added up on the device; `loss` is the rank's share of the step's loss, the others sums over its tokens."""


class BadStepsError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class LocalTotals:
    """What a rank adds to the agreement that precedes a step."""

    num_tokens: float = 0.0
    num_samples: float = 0.0
    advantage: float = 0.0
    advantage_squares: float = 0.0

    @classmethod
    def of(cls, samples: list[RLSample]) -> "LocalTotals":
        advantages = [sample.token_advantages[sample.labels != UNTRAINED].astype("float64") for sample in samples]
        squares = sum(float((values * values).sum()) for values in advantages)
        num_tokens = sum(sample.num_trained for sample in samples)
        return cls(num_tokens, len(samples), sum(float(values.sum()) for values in advantages), squares)

    def numbers(self) -> list[float]:
        return [self.num_tokens, self.num_samples, self.advantage, self.advantage_squares]


@dataclass
class StepResult:
    """One rank's view; `sums` is its own, `grad_norm` and `is_bad` are the same on all ranks."""

    sums: dict[str, float]
    ratio_max: float
    grad_norm: float
    learning_rate: float
    is_bad: bool
    totals: LocalTotals
    """Over all ranks."""
    packs: list["PackShape"] = field(default_factory=list)
    compute_seconds: float = 0.0
    update_seconds: float = 0.0
    """On a GPU of the update before: this one goes on there while the host is with the next step."""


@dataclass(frozen=True)
class PackShape:
    num_tokens: int
    num_samples: int
    longest: int
    build_seconds: float


class Stepper:
    """Owns the optimizer. `run` is collective: every rank calls it with as many micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        ranks: Ranks,
        *,
        unsharded: bool,
        reference: Reference | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._model, self._config, self._ranks = model, config, ranks
        self._unsharded, self._reference, self._witness = unsharded, reference, witness
        reshard(model)  # after a forward without backward `parameters()` would give the whole ones
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(model, config, ranks.device)
        self.num_bad_in_a_row = 0
        self._clock: _UpdateClock | None = None

    def run(self, micro_batches: list[list[RLSample]], totals: LocalTotals, *, step: int, version: int) -> StepResult:
        """Train on this rank's samples. `totals` are those of all ranks; `version` is that of the trainer's weights.

        A non-finite loss or gradient on any rank skips the update on all. On one GPU the update may still be running on return:
        whatever is launched on this stream comes after it.
        """
        started = time.perf_counter()
        device = self._ranks.device
        sums, ratio_max = torch.zeros(len(SUMS), device=device), torch.zeros((), device=device)
        shapes: list[PackShape] = []
        seen: list[tuple[list[RLSample], Tensor]] = []
        references = self._reference.logprobs(micro_batches) if self._reference else [None] * len(micro_batches)
        with closing(built_ahead(micro_batches, partial(self._build, version=version), device=device)) as packs:
            for index, (batch, shape) in enumerate(packs):
                set_last_micro_batch(self._model, index == len(micro_batches) - 1, unsharded=self._unsharded)
                batch_sums, batch_ratio, logprobs = self._backward(batch.to(device), totals, references[index])
                seen.append((micro_batches[index], logprobs))
                sums += batch_sums
                ratio_max = torch.maximum(ratio_max, batch_ratio)
                shapes.append(shape)
        rate = self._learning_rate(step)
        values, grad_norm, is_bad, update_seconds = self._update(sums, ratio_max, rate)
        if self._witness:  # only now: all that the step computes has been launched, so that its copies hold up nothing
            self._witness.see(seen, step=step)
        return StepResult(
            sums=dict(zip(SUMS, values, strict=False)),
            ratio_max=values[-1],
            grad_norm=grad_norm,
            learning_rate=rate,
            is_bad=is_bad,
            totals=totals,
            packs=shapes,
            compute_seconds=time.perf_counter() - started - update_seconds,
            update_seconds=update_seconds,
        )

    def _build(self, samples: list[RLSample], version: int) -> tuple[MicroBatch, PackShape]:
        """On a thread, while the micro-batch before it computes."""
        started = time.perf_counter()
        packed = self._config.batch.train_packing == "varlen"
        batch = build_micro_batch(samples, packed=packed, version=version, algorithm=self._config.algorithm.rl_algorithm)
        if self._ranks.device.type == "cuda":
            batch = batch.pinned()
        shape = PackShape(sum(batch.lengths), len(batch.lengths), max(batch.lengths), time.perf_counter() - started)
        return batch, shape

    def _backward(self, batch: MicroBatch, totals: LocalTotals, reference: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Add the micro-batch's gradients. Returns its SUMS, the largest ratio and [R] logprobs, on the device."""
        config = self._config.algorithm
        forward = micro_batch_forward(self._model, batch, self._config, with_balance=config.router_aux_loss_coef > 0)
        logprobs, balance = forward.logprobs, forward.balance
        advantages = batch.advantages
        if config.ppo_normalize_advantages:
            advantages = normalised_advantages(
                advantages,
                total=totals.advantage,
                total_squares=totals.advantage_squares,
                count=totals.num_tokens,
                eps=config.ppo_adv_norm_eps,
            )
        # The weights stand still until the step's one update, so the logprobs of this forward *are* those of the step's start.
        proximal = logprobs.detach() if config.recompute_old_logprobs else None
        losses = token_losses(
            logprobs,
            batch.old_logprobs,
            advantages,
            batch.sequence_ids,
            config,
            proximal_logprobs=proximal,
            reference_logprobs=None if reference is None else reference.to(logprobs.device),
        )
        step_totals = StepTotals(totals.num_tokens, totals.num_samples)
        weights = token_weights(batch.sequence_lengths, batch.sequence_ids, step_totals, aggregation=config.loss_aggregation)
        loss = weighted_loss(losses, weights, kl_coef=config.old_new_kl_coef, ref_kl_coef=config.ref_kl_coef)
        if balance is not None:  # a mean over the step's micro-batches, by their trained tokens
            loss = loss + config.router_aux_loss_coef * balance * len(logprobs) / max(totals.num_tokens, 1.0)
        loss.backward()
        collect_gradients(self._model)
        with torch.no_grad():
            ratio, k3 = losses.d.exp(), losses.k3.detach()
            is_clipped = ((ratio - 1).abs() > config.clip_eps).float()
            parts = [-losses.objective.detach(), k3, forward.entropy, is_clipped, losses.is_capped, losses.ref_k3.detach()]
            parts.append(torch.zeros_like(k3) if balance is None else balance.detach().expand_as(k3))
            parts += [torch.ones_like(k3), k3 * batch.is_on_policy, batch.is_on_policy]
            sums = torch.cat([loss.detach()[None], torch.stack(parts).sum(1)])
            return sums, ratio.max(), logprobs.detach()

    @torch.no_grad()
    def _update(self, sums: Tensor, ratio_max: Tensor, rate: float) -> tuple[list[float], float, bool, float]:
        """(SUMS and the largest ratio, gradient norm before clipping, whether the step was skipped, seconds). The norm is of all ranks."""
        clock = _UpdateClock(self._ranks.device)
        grads = [_local(parameter.grad) for parameter in self._trainable if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum() if grads else torch.zeros((), device=self._ranks.device)
        numbers = Numbers(torch.cat([sums, ratio_max[None], squares[None]]))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        is_updated = self._ranks.size == 1 and self._ranks.device.type == "cuda"
        if is_updated:
            self._update_on_device(sums[0], squares)
        *values, own_squares = numbers.values()
        loss_sum, square_sum = self._ranks.sums([values[0], own_squares])
        grad_norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        is_bad = not (math.isfinite(loss_sum) and math.isfinite(grad_norm))
        self._note_bad(is_bad, loss_sum, grad_norm)
        if not is_bad and not is_updated:
            limit = self._config.optimizer.max_grad_norm
            if 0 < limit < grad_norm:
                torch._foreach_mul_(grads, limit / (grad_norm + 1e-6))
            self.optimizer.step()
            note_update(self._model)
        self.optimizer.zero_grad(set_to_none=True)
        clock.stop()
        before, self._clock = self._clock or clock, clock
        return values, grad_norm, is_bad, (clock if self._ranks.device.type == "cpu" else before).seconds()

    def _update_on_device(self, loss_share: Tensor, squares: Tensor) -> None:
        """Clip and update, or skip, with nothing to agree on: the host has launched it before it knows what the gradient is.

        The fused kernels divide gradients by `grad_scale`, and leave everything as it is where `found_inf` is 1.
        """
        limit = self._config.optimizer.max_grad_norm
        self.optimizer.found_inf = 1.0 - (loss_share.isfinite() & squares.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.grad_scale = ((squares.sqrt() + 1e-6) / limit).clamp(min=1.0) if limit > 0 else None  # type: ignore[attr-defined]
        self.optimizer.step()
        note_update(self._model)
        del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]

    def _note_bad(self, is_bad: bool, loss: float, grad_norm: float) -> None:
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if is_bad else 0
        if is_bad:
            _log.warning("optimizer step skipped: loss %s, gradient norm %s (%d in a row)", loss, grad_norm, self.num_bad_in_a_row)

    def check_bad_steps(self) -> None:
        """BadStepsError after `--max-bad-steps` in a row; the same on all ranks. Call it once a step is counted."""
        limit = self._config.optimizer.max_bad_steps
        if self.num_bad_in_a_row >= limit > 0:
            raise BadStepsError(f"{limit} optimizer steps in a row had a non-finite loss or gradient (--max-bad-steps {limit})")

    def _learning_rate(self, step: int) -> float:
        settings = self._config.optimizer
        return learning_rate(
            step,
            peak=settings.learning_rate,
            warmup_steps=settings.lr_warmup_steps,
            max_steps=settings.max_steps,
            min_lr_ratio=settings.min_lr_ratio,
        )


class _UpdateClock:
    """How long an update takes: on a GPU by its own clock, since the host is far ahead when it launches it and far away when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._events = None if device.type == "cpu" else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._started = time.perf_counter()
        self._seconds = 0.0
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """On a GPU 0.0 until it has ended there."""
        if self._events is None:
            return self._seconds
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events[1].query() else 0.0


class Numbers:
    """A few numbers of the device, as they are at this place in its work: to wait for them is not to wait for what is launched later."""

    def __init__(self, tensor: Tensor) -> None:
        """`tensor` [N]; the copy is launched here."""
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def values(self) -> list[float]:
        """waits for the device to reach that place."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose kernels see a rank's shards as plain tensors; parameters and state stay DTensors.

    Element by element it is the same; through DTensor the host takes 7 ms to launch the update of 300 parameters.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [_local(tensor) for tensor in tensors]
        return has_complex


def build_optimizer(model: nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over what trains; weight decay on matrices only, not on norms and biases."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return ShardAdamW(groups, lr=config.optimizer.learning_rate, fused=device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
