"""The one table of metric tags: what each number is, who sends it and how it is reduced within a round.

A tag travels as (sum, count, max). Reductions over the records of one round, from all processes:
    mean   sum of sums / sum of counts
    ratio  the same, where the count on the wire is the denominator (a capacity, a number of actions), not a number of records
    sum    sum of sums
    max    largest max
    last   sum / count of the newest record
    rate   for each process, its sum / its count (tokens / its own seconds, or a ready-made rate), added over the processes
    share  seconds of a phase / wall time of the processes that report it, at most 1 (see `RoundSums`)
`Tag.x_axis` is the optimizer step of rank 0 unless the tag says otherwise. `when` names a condition of `CONDITIONS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accerl_mp.config import Config

Reduction = Literal["mean", "ratio", "sum", "max", "last", "rate", "share", "histogram"]
Axis = Literal["step", "tokens", "samples"]


@dataclass(frozen=True, slots=True)
class Tag:
    name: str
    unit: str
    reduction: Reduction
    source: str
    """Role that sends it (`trainer/0`: rank 0 for all ranks); `stats`: made here from episode records and round times."""
    when: str
    meaning: str
    x_axis: Axis = "step"


CONDITIONS: dict[str, Callable[[Config], bool]] = {
    "always": lambda config: True,
    "grpo": lambda config: config.algorithm.rl_algorithm != "ppo",
    "ppo": lambda config: config.algorithm.rl_algorithm == "ppo",
    "varlen": lambda config: config.batch.train_packing == "varlen",
    "clip": lambda config: config.algorithm.clip_mode == "ppo",
    "kl": lambda config: config.algorithm.old_new_kl_coef > 0,
    "ref": lambda config: config.algorithm.ref_kl_coef > 0,
    "router": lambda config: config.algorithm.router_aux_loss_coef > 0,
    "tis": lambda config: config.algorithm.recompute_old_logprobs,
    "reuse": lambda config: config.replay.max_sample_reuse != 1,
    "gpu": lambda config: config.run.placement != "cpu",
    "event": lambda config: False,
}
"""Name: whether runs with these settings write the tag. `event`: only where something happens (an evaluation, a loss)."""

X_AXES = {"tokens": "Train/CumulativeGlobalValidResponseTokens", "samples": "Train/CumulativeGlobalTrainingSamples"}
"""Where a tag's x axis is not the optimizer step: the tag whose value it is."""

_WINDOW = "over the last --metrics-window-size training episodes"


def _by_length(name: str, source: str) -> tuple[Tag, ...]:
    """Counters of `Replay/<name>` by the samples' length."""
    meaning = "of Replay/{}, samples in quarter {} of --max-length by their tokens"
    return tuple(Tag(f"Replay/{name}Quarter{n}", "samples", "sum", source, "event", meaning.format(name, n)) for n in range(1, 5))


_ROWS: tuple[Tag, ...] = (
    # Games: the sliding window
    Tag("TextWorld/WinRate", "share", "ratio", "stats", "always", f"episodes won, {_WINDOW}"),
    Tag("TextWorld/NormalizedScore", "share", "ratio", "stats", "always", f"sum of scores / sum of highest possible scores, {_WINDOW}"),
    Tag("TextWorld/InvalidActionRate", "share", "ratio", "stats", "always", f"replies that are no admissible command, {_WINDOW}"),
    Tag("TextWorld/EnvStepsMean", "steps", "mean", "stats", "always", f"valid env steps of an episode, {_WINDOW}"),
    Tag("TextWorld/NormalizedScoreByValidResponseToken", "share", "ratio", "stats", "always", "NormalizedScore", "tokens"),
    Tag("TextWorld/NormalizedScoreByTrainingSample", "share", "ratio", "stats", "always", "NormalizedScore", "samples"),
    # Held-out games
    Tag("Eval/WinRate", "share", "ratio", "ingest", "event", "held-out episodes won, at the step whose weights played"),
    Tag("Eval/NormalizedScore", "share", "ratio", "ingest", "event", "held-out sum of final scores / sum of highest possible scores"),
    Tag("Eval/InvalidActionRate", "share", "ratio", "ingest", "event", "held-out replies that are no admissible command"),
    Tag("Eval/EnvStepsMean", "steps", "mean", "ingest", "event", "valid env steps of a held-out episode"),
    Tag("Eval/TruncatedRate", "share", "ratio", "ingest", "event", "held-out episodes cut by the turn limit or the window"),
    Tag("Eval/Episodes", "episodes", "sum", "ingest", "event", "episodes of the evaluation"),
    Tag("Eval/Seconds", "s", "last", "ingest", "event", "wall time of the evaluation, training goes on meanwhile"),
    # Rollout
    Tag("Rollout/ActiveWorkers", "processes", "last", "stats", "always", "ended an episode within --metrics-active-timeout-seconds"),
    Tag("Rollout/WindowEpisodes", "episodes", "last", "stats", "always", "training episodes in the sliding window"),
    Tag("Rollout/TruncatedRate", "share", "ratio", "stats", "always", f"episodes cut by the turn limit or the window, {_WINDOW}"),
    Tag("Rollout/LostRate", "share", "ratio", "stats", "always", f"episodes that the game ended as lost, {_WINDOW}"),
    Tag("Rollout/TurnsMean", "turns", "mean", "stats", "always", f"model replies of an episode, {_WINDOW}"),
    Tag("Rollout/EpisodeTokensMean", "tokens", "mean", "stats", "always", f"tokens of an episode's transcript, {_WINDOW}"),
    Tag("Rollout/EpisodeSecondsMean", "s", "mean", "stats", "always", f"wall time of an episode, {_WINDOW}"),
    Tag("Rollout/EpisodesPerSec", "episodes/s", "rate", "stats", "always", "training episodes that ended in the round / its wall time"),
    Tag("Rollout/GlobalRewardSumMean", "reward", "mean", "stats", "always", "sum of step rewards of an episode, episodes of the round"),
    Tag("Rollout/RejectedGroups", "groups", "sum", "ingest", "event", "groups that gave no sample (no trained token, too long)"),
    Tag("Rollout/RedealtGroups", "groups", "sum", "ingest", "event", "groups dealt again because their rollout died or failed"),
    Tag("Rollout/DoubleGroups", "groups", "sum", "ingest", "event", "groups that arrived twice and were dropped once"),
    Tag("Rollout/GamesSetAside", "games", "last", "ingest", "event", "games that failed three times and are no longer dealt"),
    Tag("Rollout/ResubmittedTurns", "turns", "sum", "rollout", "event", "turns submitted again: aborted reply or lost engine"),
    Tag("Ingest/SampleGroups", "groups", "sum", "ingest", "event", "groups whose samples went into a ring"),
    Tag("Ingest/ZeroStdGroups", "groups", "sum", "ingest", "event", "groups without signal, not stored (--keep-zero-std-groups)"),
    Tag("Ingest/Imbalance", "groups", "max", "ingest", "always", "groups and samples that the books miss or have twice: 0"),
    Tag("Ingest/BrokenGroups", "groups", "sum", "ingest", "event", "groups damaged on the way or too large for a ring"),
    # Groups and advantages
    Tag("GRPO/GroupRewardMean", "reward", "mean", "stats", "grpo", "mean reward of a group, mean over the groups of the round"),
    Tag("GRPO/GroupRewardStd", "reward", "mean", "stats", "grpo", "population std of a group's rewards, mean over groups"),
    Tag("GRPO/AdvantageStd", "-", "mean", "rollout", "grpo", "population std of a group's advantages, mean over groups"),
    Tag("GRPO/InvalidActionsMean", "replies", "mean", "stats", "grpo", "invalid replies of an episode, episodes of the round"),
    Tag("GRPO/TrainEpisodeReturnMeanAcrossRanks", "reward", "mean", "trainer", "grpo", "episode return of the samples trained"),
    Tag("GRPO/ZeroStdGroups", "groups", "sum", "stats", "grpo", "groups of the round whose rewards are all alike: no signal"),
    Tag("GRPO/ZeroStdRate", "share", "ratio", "stats", "grpo", "share of such groups in the round"),
    Tag("PPO/RolloutTokenRewardMean", "reward", "mean", "rollout", "ppo", "reward of a trained token"),
    Tag("PPO/RolloutRawAdvantageMean", "-", "mean", "rollout", "ppo", "advantage of a trained token before normalisation"),
    Tag("PPO/RolloutRawAdvantageStd", "-", "mean", "rollout", "ppo", "std of the trained tokens' advantages within an episode"),
    Tag("PPO/RolloutInvalidActionsMean", "replies", "mean", "stats", "ppo", "invalid replies of an episode, episodes of the round"),
    Tag("PPO/TrainEpisodeReturnMeanAcrossRanks", "reward", "mean", "trainer", "ppo", "episode return of the samples trained"),
    # Replay
    Tag("Replay/FillRatio", "share", "ratio", "ingest", "always", "samples in the rings / their capacity, over all ranks"),
    Tag("Replay/TrainSampleTrainerVersionLagMean", "pushes", "mean", "trainer", "always", "trainer's version - that of the newest token"),
    Tag("Replay/PolicyLagOldestMean", "pushes", "mean", "trainer", "always", "the same for its oldest token"),
    Tag("Replay/PolicyLagOldestMax", "pushes", "max", "trainer", "always", "the largest of those lags in the round"),
    Tag("Replay/SampleUsesMean", "uses", "mean", "trainer", "reuse", "times that a trained sample has been trained, this one included"),
    Tag("Replay/CandidatesFetched", "samples", "sum", "trainer", "always", "samples read from the rings"),
    Tag("Replay/ValidSamplesPrepared", "samples", "sum", "trainer", "always", "of those, samples that passed the trainer's checks"),
    Tag("Replay/TrainingSamplesConsumed", "samples", "sum", "trainer", "always", "samples trained, each use counted"),
    Tag("Replay/InvalidCandidates", "samples", "sum", "trainer", "always", "samples that the trainer's checks refused"),
    Tag("Replay/Expired", "samples", "sum", "trainer", "event", "samples dropped because their oldest token passed --max-policy-lag"),
    Tag("Replay/ExpiredTokensMean", "tokens", "mean", "trainer", "event", "length of those: above Rollout/EpisodeTokensMean: bias"),
    Tag("Replay/Evicted", "samples", "sum", "ingest", "event", "used samples that made room for new ones"),
    Tag("Replay/EvictedTokensMean", "tokens", "mean", "ingest", "event", "length of those"),
    Tag("Replay/Reused", "samples", "sum", "trainer", "event", "samples trained that had been trained before"),
    Tag("Replay/ReusedTokensMean", "tokens", "mean", "trainer", "event", "length of those"),
    *_by_length("Expired", "trainer"),
    *_by_length("Evicted", "ingest"),
    *_by_length("Reused", "trainer"),
    Tag("Replay/Torn", "samples", "sum", "trainer", "event", "records that a writer left unfinished or changed while they were read"),
    # Trainer
    Tag("Train/Loss", "nats", "mean", "trainer", "always", "loss, mean over the round's optimizer steps, exact over ranks and packs"),
    Tag("Train/LossMeanAcrossRanks", "nats", "mean", "trainer", "always", "the same under the reference's older name"),
    Tag("Train/PolicyLossTokenMean", "nats", "mean", "trainer", "always", "policy term of the loss, a trained token"),
    Tag("Train/LearningRate", "-", "last", "trainer", "always", "learning rate of the round's last optimizer step"),
    Tag("Train/GradNorm", "-", "mean", "trainer", "always", "gradient norm before clipping"),
    Tag("Train/Entropy", "nats", "mean", "trainer", "always", "entropy of the policy at trained tokens"),
    Tag("Train/RouterAuxLoss", "-", "mean", "trainer", "router", "router's load-balancing loss before its coefficient; even use: top-k"),
    Tag("Train/RatioMax", "-", "max", "trainer", "always", "largest new / old probability of a trained token"),
    Tag("Train/BadSteps", "steps", "sum", "trainer", "event", "optimizer steps skipped for a non-finite loss or gradient"),
    Tag("Train/TokensPerSec", "tokens/s", "rate", "trainer", "always", "trained tokens / wall time of the train segment, waiting included"),
    Tag("Train/ValidResponseTokensPerSec", "tokens/s", "rate", "trainer", "always", "the same under the reference's older name"),
    Tag("Train/SamplesPerSec", "samples/s", "rate", "trainer", "always", "trained samples / wall time of the train segment"),
    Tag("Train/OptimizerStepsPerSec", "steps/s", "rate", "trainer", "always", "optimizer steps / wall time of the train segment"),
    Tag("Train/PeakMemoryGiB", "GiB", "max", "trainer", "gpu", "most GPU memory that a rank had allocated"),
    Tag("Train/PackTokenUtilization", "share", "ratio", "trainer", "varlen", "real tokens of a pack / --train-token-budget"),
    Tag("Train/PackSampleCount", "samples", "mean", "trainer", "varlen", "samples of a pack"),
    Tag("Train/PackMaxSequenceLength", "tokens", "mean", "trainer", "varlen", "longest sequence of a pack"),
    Tag("Train/PackCpuMilliseconds", "ms", "mean", "trainer", "varlen", "CPU time to choose and build a pack"),
    Tag("Train/SegmentGlobalValidResponseTokens", "tokens", "sum", "trainer", "always", "tokens trained in the round, all ranks"),
    Tag("Train/SegmentGlobalTrainingSamples", "samples", "sum", "trainer", "always", "samples trained in the round, all ranks"),
    Tag("Train/GlobalValidResponseTokensPerOptimizerStep", "tokens", "mean", "trainer", "always", "of an optimizer step, all ranks"),
    Tag("Train/GlobalTrainingSamplesPerOptimizerStep", "samples", "mean", "trainer", "always", "of an optimizer step, all ranks"),
    Tag("Train/CumulativeGlobalValidResponseTokens", "tokens", "last", "trainer", "always", "tokens trained so far, all ranks"),
    Tag("Train/CumulativeGlobalTrainingSamples", "samples", "last", "trainer", "always", "samples trained so far, all ranks"),
    # Distance between the policies that sample and train
    Tag("KL/OldNewK3TokenMean", "nats", "mean", "trainer", "always", "k3 of new_logprobs against old_logprobs, a trained token"),
    Tag("KL/OldNewK3SampleSumMean", "nats", "mean", "trainer", "always", "the same, summed over a sample's tokens"),
    Tag("KL/OldNewK3Loss", "nats", "mean", "trainer", "kl", "--old-new-kl-coef times KL/OldNewK3TokenMean, as in the loss"),
    Tag("KL/RefK3TokenMean", "nats", "mean", "trainer", "ref", "k3 of the start model's logprobs against the new ones: KL from it"),
    Tag("KL/TrainerInferK3", "nats", "mean", "trainer", "event", "k3 where the token's version is the trainer's: kernels alone"),
    Tag("Clip/PPOClipFrac", "share", "ratio", "trainer", "clip", "trained tokens with new / old probability outside 1 +- --clip-eps"),
    Tag("Clip/TisCapFrac", "share", "ratio", "trainer", "tis", "trained tokens whose weight --tis-cap cut"),
    # Inference and weight sync
    Tag("Infer/TokensPerSec", "tokens/s", "rate", "inference", "always", "tokens of completed requests / time between pushes, all engines"),
    Tag("Infer/RequestsPerSec", "requests/s", "rate", "inference", "event", "completed requests a second, all engines"),
    Tag("Infer/ReplyTokensMean", "tokens", "mean", "inference", "event", "tokens of a completed request"),
    Tag("Infer/ReplySecondsMean", "s", "mean", "inference", "event", "time from a request's arrival to its reply"),
    Tag("Infer/RunningRequestsMean", "requests", "mean", "inference", "event", "requests in an engine"),
    Tag("Infer/PrefixCacheHitRate", "share", "ratio", "inference", "event", "prompt tokens found in the prefix cache"),
    Tag("Infer/AbortedReplies", "requests", "sum", "inference", "event", "requests cut short, to be submitted again"),
    Tag("Infer/FailedRequests", "requests", "sum", "inference", "event", "requests answered with an error"),
    Tag("Sync/ElapsedSeconds", "s", "mean", "trainer/0", "always", "pause to resume of a push; without a pause: the load alone"),
    Tag("Sync/PushSeconds", "s", "mean", "trainer/0", "always", "a whole push, most of which overlaps generation"),
    Tag("Sync/PushMiB", "MiB", "mean", "trainer/0", "event", "weights of a push"),
    Tag("Sync/VerifiedPushes", "pushes", "sum", "trainer/0", "event", "pushes checked by --verify-sync, and right"),
    # The run
    Tag(
        "Run/TrainerRestarts", "restarts", "last", "trainer/0", "event", "times that the run was started again because a trainer rank died"
    ),
    Tag("Run/FreeCores", "cores", "mean", "stats", "always", "of the cores that the run may use, those that nobody used"),
    Tag("Run/RoundSeconds", "s", "mean", "stats", "always", "wall time of a round, from the last one's end to its own"),
    # The metrics themselves
    Tag("Stats/DroppedRecords", "records", "sum", "every role", "event", "records that senders dropped: stats was slow or away"),
    Tag("Stats/NonFinite", "tags", "last", "stats", "event", "tags that were NaN or infinite in the round (left out of metrics.jsonl)"),
    Tag("Stats/Restarts", "restarts", "last", "stats", "always", "processes that the supervisor had to start again, so far"),
)

TAGS: dict[str, Tag] = {tag.name: tag for tag in _ROWS}


HISTOGRAMS: dict[str, Tag] = {
    tag.name: tag
    for tag in (
        Tag("Rollout/EpisodeTokens", "tokens", "histogram", "stats", "always", "tokens of an episode's transcript, episodes of the round"),
        Tag("Rollout/EpisodeTurns", "turns", "histogram", "stats", "always", "model replies of an episode, episodes of the round"),
        Tag("Replay/PolicyLagOldest", "pushes", "histogram", "trainer", "always", "lag of a trained sample's oldest token"),
    )
}
"""Distributions of whole numbers, for TensorBoard alone."""


def lookup(name: str) -> Tag | None:
    """The row of a tag; every `Time/<role>/<phase>` has one; None for a name that nobody declared."""
    if tag := TAGS.get(name) or HISTOGRAMS.get(name):
        return tag
    match name.split("/"):
        case ["Time", role, phase]:
            return Tag(name, "share", "share", role, "event", f"share of the time of {role} spent in {phase}")
    return None


def expected(config: Config) -> set[str]:
    """Tags that a run of a few rounds with these settings always writes, most of them every round."""
    return {tag.name for tag in TAGS.values() if CONDITIONS[tag.when](config)}


def markdown() -> str:
    """The table of accerl_mp/docs/metrics.md."""
    lines = ["| tag | unit | reduction | from | when | meaning |", "|---|---|---|---|---|---|"]
    for tag in (*TAGS.values(), *HISTOGRAMS.values()):
        axis = "" if tag.x_axis == "step" else f" (x axis: {tag.x_axis})"
        lines.append(f"| `{tag.name}` | {tag.unit} | {tag.reduction} | {tag.source} | {tag.when} | {tag.meaning}{axis} |")
    lines.append("| `Time/<role>/<phase>` | share | share | every role | always | share of wall time in a phase, waits included |")
    return "\n".join(lines)
