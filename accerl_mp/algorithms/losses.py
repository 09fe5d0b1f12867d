"""Policy objectives, KL estimate and the loss of an optimizer step. Each objective is one function of tensors [R].

R trained tokens of a micro-batch, whatever its layout (padded rows or a pack), so both layouts have one objective.
lp new logprob, lo old logprob, d = lp - lo clamped, r = exp(d), A advantage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accerl_mp.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""d is clamped to this: exp(20) is 4.9e8, so that r A and r - 1 - d stay finite in float32 (inf * 0 would be NaN)."""
MAX_ADVANTAGE = 1e20
"""Likewise for A; far beyond any real one."""


@dataclass(frozen=True)
class Clipping:
    """Settings of the objectives; each uses those that concern it."""

    clip_eps: float = 0.2
    gipo_sigma: float = 1.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 2.0
    dual_clip: float | None = None


def log_ratio(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """d, float32. No gradient where it is clamped."""
    return (new_logprobs.float() - old_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_objective(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_mode: str,
    clip_eps: float = 0.2,
    gipo_sigma: float = 1.0,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 2.0,
    dual_clip: float | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Objective of each token, to be maximised, [R] float32.

    `sequence_ids` ([R], 0-based sample of each token) matters to gspo only; without it all tokens are one sequence.
    """
    d = log_ratio(new_logprobs, old_logprobs)
    if clip_mode == "gspo":
        d = _sequence_mean(d, sequence_ids)
    clipping = Clipping(clip_eps, gipo_sigma, sapo_tau_pos, sapo_tau_neg, dual_clip)
    bounded = advantages.float().clamp(-MAX_ADVANTAGE, MAX_ADVANTAGE)
    return OBJECTIVES[clip_mode](new_logprobs.float(), d, bounded, clipping)


def ppo_objective(_: Tensor, d: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """min(r A, clip(r) A); with dual clip, where A < 0, at least c A."""
    ratio = d.exp()
    clipped = ratio.clamp(1 - clipping.clip_eps, 1 + clipping.clip_eps)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if clipping.dual_clip is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, clipping.dual_clip * advantages), objective)


def gipo_objective(_: Tensor, d: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """r A w: a gaussian of the log ratio, without gradient, fades tokens out in place of a clip."""
    width = torch.exp(-0.5 * (d.detach() / clipping.gipo_sigma).square())
    return d.exp() * advantages * width


def sapo_objective(_: Tensor, d: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """A (4 / tau) sigmoid(tau (r - 1)): a smooth gate, sharper for tokens that should become rarer."""
    tau = torch.where(advantages > 0, clipping.sapo_tau_pos, clipping.sapo_tau_neg)
    return advantages * (4 / tau) * torch.sigmoid(tau * torch.expm1(d))


def cispo_objective(new_logprobs: Tensor, d: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """clip(r) A lp with the clipped ratio as a weight, without gradient: no token's gradient is cut off."""
    weight = d.detach().exp().clamp(1 - clipping.clip_eps, 1 + clipping.clip_eps)
    return weight * advantages * new_logprobs.clamp(-1e10, 1e10)  # finite for any finite logprob


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, Clipping], Tensor]] = {
    "ppo": ppo_objective,
    "gipo": gipo_objective,
    "sapo": sapo_objective,
    "cispo": cispo_objective,
    "gspo": ppo_objective,  # of the sequence's ratio: d is the mean over its tokens
}


def k3_kl(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r - 1 - d of each token, [R], never negative: an estimate of KL(old || new)."""
    d = log_ratio(new_logprobs, old_logprobs)
    return torch.expm1(d) - d


def normalised_advantages(advantages: Tensor, *, total: float, total_squares: float, count: float, eps: float) -> Tensor:
    """(A - mean) / (std + eps) with the sums over all trained tokens of the optimizer step, all ranks (population std)."""
    mean = total / max(count, 1.0)
    variance = max(total_squares / max(count, 1.0) - mean * mean, 0.0)
    return (advantages - mean) / (variance**0.5 + eps)


@dataclass(frozen=True)
class StepTotals:
    """Counts over every rank and micro-batch of one optimizer step, known before its first backward."""

    num_tokens: float
    num_samples: float


def token_weights(sequence_lengths: Tensor, sequence_ids: Tensor, totals: StepTotals, *, aggregation: str) -> Tensor:
    """Weight of each trained token, [R]: the weighted sum over all ranks and micro-batches is the mean that is asked for.

    `sequence_lengths` [samples]: trained tokens of each. token: the mean over all tokens; sequence: the mean over samples of
    their token means.
    """
    if aggregation == "token":
        return torch.full_like(sequence_ids, 1.0 / max(totals.num_tokens, 1.0), dtype=torch.float32)
    return (1.0 / (sequence_lengths.float() * max(totals.num_samples, 1.0)))[sequence_ids]


def truncated_weights(proximal_logprobs: Tensor, old_logprobs: Tensor, *, cap: float) -> tuple[Tensor, Tensor]:
    """min(exp(lp_prox - lo), cap) of each token and 1 where the cap cut it, both [R] float32, without gradient.

    Truncated importance sampling (design, section 8): corrects for the distance between the policy that sampled and the one that
    the optimizer step starts from; without the cap one unlikely token could outweigh all others.
    """
    ratio = log_ratio(proximal_logprobs, old_logprobs).detach().exp()
    return ratio.clamp(max=cap), (ratio > cap).float()


@dataclass
class TokenLosses:
    """Parts of a micro-batch's loss, each [R]."""

    objective: Tensor
    k3: Tensor
    d: Tensor
    is_capped: Tensor
    """1 where --tis-cap cut the token's weight."""
    ref_k3: Tensor
    """Estimate of KL(new || start model); 0 without one."""


def token_losses(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    config: AlgorithmConfig,
    *,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> TokenLosses:
    """Objective and KL of each token under the run's settings; k3 and d are against the policy that sampled, always.

    With `proximal_logprobs` ([R], `--recompute-old-logprobs`) the objective's ratio is exp(lp - lp_prox), weighted token by token.
    `reference_logprobs` ([R]): the start model's. Its k3 has the *new* policy in the ratio's denominator (as in GRPO's paper): the
    tokens were sampled by a policy near the new one, and only so is the mean an estimate of a KL, that of new from start.
    """
    objective = policy_objective(
        new_logprobs,
        old_logprobs if proximal_logprobs is None else proximal_logprobs.detach(),
        advantages,
        clip_mode=config.clip_mode,
        clip_eps=config.clip_eps,
        gipo_sigma=config.gipo_sigma,
        sapo_tau_pos=config.sapo_tau_pos,
        sapo_tau_neg=config.sapo_tau_neg,
        dual_clip=config.dual_clip,
        sequence_ids=sequence_ids,
    )
    d = log_ratio(new_logprobs, old_logprobs)
    is_capped = torch.zeros_like(d)
    if proximal_logprobs is not None:
        weights, is_capped = truncated_weights(proximal_logprobs, old_logprobs, cap=config.tis_cap)
        objective = objective * weights
    ref_k3 = torch.zeros_like(d) if reference_logprobs is None else k3_kl(reference_logprobs, new_logprobs)
    return TokenLosses(objective=objective, k3=torch.expm1(d) - d, d=d.detach(), is_capped=is_capped, ref_k3=ref_k3)


def weighted_loss(losses: TokenLosses, weights: Tensor, *, kl_coef: float, ref_kl_coef: float = 0.0) -> Tensor:
    """This micro-batch's share of the optimizer step's loss: shares of all ranks add up to it."""
    per_token = -losses.objective if kl_coef == 0 else kl_coef * losses.k3 - losses.objective
    if ref_kl_coef:
        per_token = per_token + ref_kl_coef * losses.ref_k3
    return (per_token * weights).sum()


def router_balance(router_logits: Sequence[Tensor], top_k: int, is_real: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e: f_e how often expert e is among a token's `top_k`, P_e its mean router probability; a scalar, float32.

    Switch Transformer (arXiv 2101.03961), equations 4 to 6, means over all layers' tokens as in Transformers. `top_k` at the least,
    where experts are used evenly. `router_logits`: [N, E] a layer; `is_real` [N] leaves padding out. Gradient through P alone.
    """
    logits = torch.cat([layer if is_real is None else layer[is_real] for layer in router_logits]).float()
    probabilities = torch.softmax(logits, dim=-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    return logits.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()


def _sequence_mean(d: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Mean of d over each token's own sequence, [R]."""
    if sequence_ids is None:
        return d.mean().expand_as(d)
    sums = torch.zeros_like(d).index_add(0, sequence_ids, d)  # as many rows as tokens: counting sequences would stop a GPU
    counts = torch.zeros_like(d).index_add(0, sequence_ids, torch.ones_like(d))
    return (sums / counts.clamp(min=1))[sequence_ids]
