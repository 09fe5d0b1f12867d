"""What a round of training adds to the metrics: each rank's sums, brought together once a round, sent by rank 0.

Tags and their reductions stand in `stats/tags.py`. Values travel as (sum, count, max).
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from accerl_mp.config import Config
from accerl_mp.samples import RLSample, count_quarters
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.replay import ReplayCounts
from accerl_mp.trainer.step import SUMS, StepResult
from accerl_mp.weight_sync.report import PushReport

Triple = tuple[float, float, float]

BY_LENGTH = ("expired", "reused")
"""Samples that are counted by their length, so that a bias against long episodes shows."""
QUARTERS = tuple(f"_quarter{number}" for number in range(1, 5))
ADDED = (
    *SUMS,
    *("num_samples", "returns", "pack_tokens", "pack_samples", "pack_longest", "pack_seconds", "num_packs"),
    *("fetched", "valid", "invalid", "consumed", "torn", "uses", "lag_newest", "lag_oldest"),
    *(f"{reason}{part}" for reason in BY_LENGTH for part in ("", "_tokens", *QUARTERS)),
)
"""Summed over ranks at the end of a round."""
LARGEST = ("ratio", "lag_oldest", "memory_gib")
"""The largest over ranks."""


class RoundMetrics:
    """One rank's sums since the last round."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self.all_tokens = self.all_samples = 0.0
        self.start()

    def add_step(self, result: StepResult, samples: list[RLSample], *, choose_seconds: float) -> None:
        """One optimizer step of this rank. A skipped one counts as bad and adds nothing to the means."""
        self._num_steps += 1
        self._num_bad += result.is_bad
        self._learning_rate = result.learning_rate
        sums = self._sums
        if result.is_bad:
            return
        sums["pack_seconds"] += choose_seconds + sum(pack.build_seconds for pack in result.packs)
        sums["num_packs"] += len(result.packs)
        sums["pack_tokens"] += sum(pack.num_tokens for pack in result.packs)
        sums["pack_samples"] += sum(pack.num_samples for pack in result.packs)
        sums["pack_longest"] += sum(pack.longest for pack in result.packs)
        sums["num_samples"] += len(samples)
        sums["returns"] += sum(sample.episode_return for sample in samples)
        self._grad_norms.append(result.grad_norm)
        for name, value in result.sums.items():
            sums[name] += value
        self._largest["ratio"] = max(self._largest["ratio"], result.ratio_max)

    def add_replay(self, counts: ReplayCounts) -> None:
        """What the ring gave since the last round."""
        for name in ("fetched", "valid", "invalid", "consumed", "torn", "uses"):
            self._sums[name] += getattr(counts, name)
        for reason, lengths in zip(BY_LENGTH, (counts.expired_lengths, counts.reused_lengths), strict=True):
            self._sums[reason] += len(lengths)
            self._sums[f"{reason}_tokens"] += sum(lengths)
            for quarter, number in zip(QUARTERS, count_quarters(lengths, self._config.batch.max_length), strict=True):
                self._sums[f"{reason}{quarter}"] += number
        self._sums["lag_newest"] += sum(counts.lags_newest)
        self._sums["lag_oldest"] += sum(counts.lags_oldest)
        self._largest["lag_oldest"] = max([self._largest["lag_oldest"], *counts.lags_oldest])

    def close_round(self) -> dict[str, Triple]:
        """The round's values over all ranks, and start again. Collective."""
        if self._ranks.device.type == "cuda":
            self._largest["memory_gib"] = torch.cuda.max_memory_allocated(self._ranks.device) / 2**30
        sums = dict(zip(ADDED, self._ranks.sums([self._sums[name] for name in ADDED]), strict=True))
        largest = dict(zip(LARGEST, self._ranks.maxima([self._largest[name] for name in LARGEST]), strict=True))
        seconds = time.perf_counter() - self._started
        self.all_tokens += sums["num_tokens"]
        self.all_samples += sums["num_samples"]
        values = self._loss_values(sums, largest) | self._rate_values(sums, seconds) | self._replay_values(sums, largest)
        if self._config.batch.train_packing == "varlen":
            values |= self._pack_values(sums)
        if largest["memory_gib"] > 0:
            values["Train/PeakMemoryGiB"] = (largest["memory_gib"], 1, largest["memory_gib"])
        self.start()
        return {tag: value for tag, value in values.items() if value[1] > 0}  # a mean of nothing is no number

    @property
    def has_steps(self) -> bool:
        """Since the last round."""
        return self._num_steps > 0

    def state(self) -> dict[str, Any]:
        """Of a round that is not over."""
        names = ("_sums", "_largest", "_grad_norms", "_num_steps", "_num_bad", "_learning_rate")
        return {name: dict(value) if isinstance(value := getattr(self, name), dict) else value for name in names}

    def restore(self, states: list[dict[str, Any]], *, all_tokens: float, all_samples: float) -> None:
        """Go on with the round of the ranks that gave `states`; what one adds to the sums over ranks may come from several of them."""
        self.all_tokens, self.all_samples = all_tokens, all_samples
        for state in states:
            for name, value in state["_sums"].items():
                self._sums[name] += value
            for name, value in state["_largest"].items():
                self._largest[name] = max(self._largest[name], value)
            self._grad_norms, self._learning_rate = list(state["_grad_norms"]), state["_learning_rate"]
            self._num_steps, self._num_bad = state["_num_steps"], state["_num_bad"]

    def start(self) -> None:
        """Begin a round: nothing summed, the clock at 0."""
        self.start_clock()
        self._sums: dict[str, float] = defaultdict(float)
        self._largest: dict[str, float] = defaultdict(float)
        self._grad_norms: list[float] = []
        self._num_steps = self._num_bad = 0
        self._learning_rate = 0.0

    def start_clock(self) -> None:
        """The round's time counts from now on."""
        self._started = time.perf_counter()

    def _loss_values(self, sums: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, Triple]:
        algorithm = self._config.algorithm
        good, tokens = self._num_steps - self._num_bad, sums["num_tokens"]
        values = {
            "Train/Loss": _mean(sums["loss"], good),
            "Train/LossMeanAcrossRanks": _mean(sums["loss"], good),
            "Train/PolicyLossTokenMean": _mean(sums["policy_loss"], tokens),
            "Train/Entropy": _mean(sums["entropy"], tokens),
            "Train/RouterAuxLoss": _mean(sums["balance"], tokens),
            "Train/GradNorm": (sum(self._grad_norms), good, max(self._grad_norms, default=0.0)),
            "Train/RatioMax": (largest["ratio"], 1, largest["ratio"]),
            "KL/OldNewK3TokenMean": _mean(sums["k3"], tokens),
            "KL/OldNewK3SampleSumMean": _mean(sums["k3"], sums["num_samples"]),
            "KL/OldNewK3Loss": _mean(algorithm.old_new_kl_coef * sums["k3"], tokens),
            "KL/RefK3TokenMean": _mean(sums["ref_k3"], tokens),
            "KL/TrainerInferK3": _mean(sums["on_policy_k3"], sums["num_on_policy"]),
            "Clip/PPOClipFrac": _mean(sums["num_clipped"], tokens),
            "Clip/TisCapFrac": _mean(sums["num_capped"], tokens),
        }
        if algorithm.clip_mode != "ppo":
            del values["Clip/PPOClipFrac"]
        if algorithm.router_aux_loss_coef == 0:
            del values["Train/RouterAuxLoss"]
        if algorithm.ref_kl_coef == 0:
            del values["KL/RefK3TokenMean"]
        if not algorithm.recompute_old_logprobs:
            del values["Clip/TisCapFrac"]
        if algorithm.old_new_kl_coef == 0:
            del values["KL/OldNewK3Loss"]
        if self._num_bad:
            values["Train/BadSteps"] = _total(self._num_bad)
        return values

    def _rate_values(self, sums: Mapping[str, float], seconds: float) -> dict[str, Triple]:
        tokens, samples, steps = sums["num_tokens"], sums["num_samples"], self._num_steps
        good = steps - self._num_bad
        group = "PPO" if self._config.algorithm.rl_algorithm == "ppo" else "GRPO"
        return {
            "Train/LearningRate": _total(self._learning_rate),
            "Train/TokensPerSec": (tokens, seconds, tokens),
            "Train/ValidResponseTokensPerSec": (tokens, seconds, tokens),
            "Train/SamplesPerSec": (samples, seconds, samples),
            "Train/OptimizerStepsPerSec": (steps, seconds, steps),
            "Train/SegmentGlobalValidResponseTokens": _total(tokens),
            "Train/SegmentGlobalTrainingSamples": _total(samples),
            "Train/GlobalValidResponseTokensPerOptimizerStep": _mean(tokens, good),
            "Train/GlobalTrainingSamplesPerOptimizerStep": _mean(samples, good),
            "Train/CumulativeGlobalValidResponseTokens": _total(self.all_tokens),
            "Train/CumulativeGlobalTrainingSamples": _total(self.all_samples),
            f"{group}/TrainEpisodeReturnMeanAcrossRanks": _mean(sums["returns"], samples),
        }

    def _replay_values(self, sums: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, Triple]:
        values = {
            "Replay/CandidatesFetched": _total(sums["fetched"]),
            "Replay/ValidSamplesPrepared": _total(sums["valid"]),
            "Replay/TrainingSamplesConsumed": _total(sums["consumed"]),
            "Replay/InvalidCandidates": _total(sums["invalid"]),
            "Replay/TrainSampleTrainerVersionLagMean": _mean(sums["lag_newest"], sums["consumed"]),
            "Replay/PolicyLagOldestMean": _mean(sums["lag_oldest"], sums["consumed"]),
            "Replay/PolicyLagOldestMax": (largest["lag_oldest"], 1, largest["lag_oldest"]),
        }
        if self._config.replay.max_sample_reuse != 1:
            values["Replay/SampleUsesMean"] = _mean(sums["uses"], sums["consumed"])
        for reason in BY_LENGTH:
            if sums[reason]:
                tag = f"Replay/{reason.capitalize()}"
                values |= {tag: _total(sums[reason]), f"{tag}TokensMean": _mean(sums[f"{reason}_tokens"], sums[reason])}
                values |= {f"{tag}Quarter{n}": _total(sums[f"{reason}_quarter{n}"]) for n in range(1, 5)}
        if sums["torn"]:
            values["Replay/Torn"] = _total(sums["torn"])
        return values

    def _pack_values(self, sums: Mapping[str, float]) -> dict[str, Triple]:
        packs, budget = sums["num_packs"], self._config.batch.train_token_budget or 1
        return {
            "Train/PackTokenUtilization": _mean(sums["pack_tokens"], packs * budget),
            "Train/PackSampleCount": _mean(sums["pack_samples"], packs),
            "Train/PackMaxSequenceLength": _mean(sums["pack_longest"], packs),
            "Train/PackCpuMilliseconds": _mean(1000 * sums["pack_seconds"], packs),
        }


def push_values(report: PushReport) -> dict[str, float]:
    values = {
        "Sync/ElapsedSeconds": report.standstill_s,
        "Sync/PushSeconds": report.seconds,
        "Sync/PushMiB": report.num_bytes / 2**20,
    }
    return values | ({"Sync/VerifiedPushes": 1.0} if report.verified else {})


def _mean(total: float, count: float) -> Triple:
    return total, count, total / count if count else 0.0


def _total(value: float) -> Triple:
    return value, 1, value
