"""One sentence a round: what bounds the run, by measured waiting, and the flag to change."""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from accerl_mp.config import Config

FREE_CORES = "Run/FreeCores"
FILL = "Replay/FillRatio"
NO_SIGNAL = "GRPO/ZeroStdRate"
ROUND_SECONDS = "Run/RoundSeconds"

IS_MUCH = 0.25
"""Share of the trainer's time from which waiting or pushing is worth a word."""

IS_FULL = 0.5
"""Fill of the rings from which they may have no room for one more group."""

MOST_HAVE_NONE = 0.75
"""Share of groups without signal from which their want is what the trainer waits for: the games are too easy for the model, or too hard."""

NO_CORE_IS_FREE = 0.5
"""Idle cores below which one more busy process would only take time from the others."""

NUM_ROUNDS = 4
"""A sentence stands for the mean of so many rounds, by their time: in a single one the trainer happens to wait or not."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Shares of wall time, 0 to 1, mean over the processes of a role."""

    trainer_wait: float = 0.0
    """Trainer ranks wait for samples."""
    trainer_push: float = 0.0
    """Trainer ranks gather and wait for a weight push."""
    trainer_other: float = 0.0
    """Trainer ranks wait for an evaluation or write an export."""
    rollout_reply: float = 0.0
    """Rollouts do nothing but wait for replies of vLLM."""
    rollout_own: float = 0.0
    """Rollouts work themselves: game steps above all, which hold up all episodes of their process."""
    rollout_work: float = 0.0
    """Rollouts have nothing to play: admission (lag limit, full rings) gives no group."""
    placement: str = "dedicated"
    is_synchronous: bool = False
    has_lag_limit: bool = True
    ring_fill: float = 0.0
    """Of the trainer's rings, 0 to 1."""
    free_cores: float = math.inf
    """Of those that the run may use, what nobody used."""
    no_signal: float = 0.0
    """Share of the groups that are left out because all of their rewards are alike."""


def situation(values: Mapping[str, float], config: Config) -> Situation:
    """From the reduced values of a round."""
    return Situation(
        trainer_wait=values.get("Time/trainer/wait", 0.0),
        trainer_push=values.get("Time/trainer/push", 0.0),
        trainer_other=values.get("Time/trainer/evaluation", 0.0) + values.get("Time/trainer/export", 0.0),
        rollout_reply=values.get("Time/rollout/reply", 0.0),
        rollout_own=sum(values.get(f"Time/rollout/{phase}", 0.0) for phase in ("env", "encode", "build", "write")),
        rollout_work=values.get("Time/rollout/work", 0.0),
        placement=config.run.placement,
        is_synchronous=config.run.synchronous,
        has_lag_limit=config.replay.max_policy_lag > 0,
        ring_fill=values.get(FILL, 0.0),
        free_cores=values.get(FREE_CORES, math.inf),
        no_signal=0.0 if config.algorithm.keep_zero_std_groups else values.get(NO_SIGNAL, 0.0),
    )


class Doctor:
    """The sentence of each round of a run, in their order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._newest: deque[Mapping[str, float]] = deque(maxlen=NUM_ROUNDS)
        self.alike: float | None = None
        """Share of groups whose rewards are all alike, in the rounds that the last sentence stands for; None: none closed a group."""

    def say(self, values: Mapping[str, float]) -> str:
        """For the round with these values and those before it."""
        if "Time/trainer/wait" not in values:
            return "the trainer has not said how long it waited"
        self._newest.append(values)
        means = _means(self._newest)
        self.alike = means.get(NO_SIGNAL)
        return bottleneck(situation(means, self._config))


def _means(rounds: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Of the tags of a situation over the time of the rounds that have them: one of 40 s counts twenty times one of 2 s.

    A phase counts 0 in a round in which its role named others only.
    """
    means: dict[str, float] = {}
    for tag in {tag for values in rounds for tag in values if tag.startswith("Time/") or tag in (FILL, FREE_CORES, NO_SIGNAL)}:
        role = tag.rpartition("/")[0] + "/" if tag.startswith("Time/") else tag
        said = [values for values in rounds if any(other.startswith(role) for other in values)]
        seconds = [values.get(ROUND_SECONDS, 1.0) for values in said]
        means[tag] = sum(values.get(tag, 0.0) * round_s for values, round_s in zip(said, seconds, strict=True)) / sum(seconds)
    return means


def bottleneck(now: Situation) -> str:
    """The sentence. Pushing first: a trainer that pushes all the time also makes rollouts wait.

    A full CPU comes before what more processes would mend: they would take from each other what the one has too little of.
    """
    if now.trainer_other >= max(IS_MUCH, now.trainer_wait, now.trainer_push):
        return f"neither: evaluation and exports took {_percent(now.trainer_other)}; lower --eval-episodes-per-game"
    if now.trainer_push >= max(IS_MUCH, now.trainer_wait):
        return f"sync-bound: pushes took {_percent(now.trainer_push)} of the time; raise --sync-every-optimizer-steps"
    if now.trainer_wait >= IS_MUCH and now.no_signal >= MOST_HAVE_NONE:
        waited = f"trainer waited {_percent(now.trainer_wait)}"
        return f"signal-bound: {waited}, {_percent(now.no_signal)} of groups end alike; change --tw-game-dir"
    if now.placement == "cpu" and now.free_cores < NO_CORE_IS_FREE:
        return f"CPU-bound: no core free, trainer computed {_percent(_computed(now))}; a GPU (--placement) or more cores help"
    if now.trainer_wait < IS_MUCH:
        return _trainer_bound(now)
    waited = f"trainer waited {_percent(now.trainer_wait)}"
    if now.is_synchronous:
        return f"synchronous: {waited}; leave out --synchronous to generate meanwhile"
    return _sample_bound(now, waited)


def _sample_bound(now: Situation, waited: str) -> str:
    """The trainer waits for samples: because of what its rollouts do most of their time."""
    lag_flag = " or --max-policy-lag" if now.has_lag_limit else ""
    # Without a lag limit only full rings hold groups back; at the end of a run there is nothing left to play.
    held_back = now.rollout_work if now.has_lag_limit or now.ring_fill >= IS_FULL else 0.0
    most = max(now.rollout_own, now.rollout_reply, held_back)
    if now.free_cores < NO_CORE_IS_FREE and most in (0, now.rollout_own):
        return f"CPU-bound: no core free, {waited}; more cores or --max-sample-reuse help"
    if most == 0:  # a short round: rollouts report every few seconds
        return f"rollout-bound: {waited}; raise --num-rollout-workers or --infer-size"
    if now.rollout_own == most:
        return f"env-bound: {waited}, games and prompts {_percent(most)}; raise --num-rollout-workers"
    if held_back == most:
        flag = "--max-policy-lag" if now.has_lag_limit else "--replay-capacity"
        return f"admission-bound: {waited}, rollouts idle {_percent(most)}; raise {flag}"
    flag = "--rollout-batch-size" if now.placement == "colocated" else "--infer-size"
    return f"generation-bound: {waited}; raise {flag}{lag_flag}"


def _trainer_bound(now: Situation) -> str:
    flags = "use more GPUs with --placement dedicated" if now.placement == "colocated" else "raise --fsdp-world-size"
    return f"trainer-bound: trainer computed {_percent(_computed(now))}; {flags}"


def _computed(now: Situation) -> float:
    return max(0.0, 1.0 - now.trainer_wait - now.trainer_push - now.trainer_other)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
