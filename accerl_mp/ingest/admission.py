"""May another group be dealt? So that what is generated is trained before it is too old, and nothing is thrown away.

The design's formula, with what was trained before this round taken off both sides (so it survives a restart, and holds for
packs, whose number of samples is known only afterwards):

    (lag + 1) * samples of a round - trained in this round - still usable in the rings - running >= group size

With --max-sample-reuse r everything counts in uses: a new sample is worth r, one in a ring what is left of it.
"""

from dataclasses import dataclass

from accerl_mp.config import Config


@dataclass(frozen=True)
class Progress:
    """Where the trainer is."""

    version: int
    optimizer_step: int
    num_used: int
    """Samples trained so far over all ranks, each use counted."""
    round_step: int
    """Step at which the weights of `version` were taken: the round that trains on them began there."""
    round_used: int
    """`num_used` at that moment. The push takes a while, and the next step begins meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What there is to train, in samples over all ranks."""

    usable_uses: float
    """Of the samples in the rings that are not too old: uses that are left to them."""
    num_running: float
    """Expected of groups that are dealt and not in a ring."""
    num_missing: int
    """Samples that ranks wait for and do not have."""
    num_waiting: int
    """Ranks that stand still for want of samples."""
    groups_that_fit: int
    """In the rings, beside those that are running."""
    mean_tokens: float
    """Length of a sample; 0: none was seen yet."""


class Admission:
    """The rule, and where in its round the trainer is. Call `follow` often, `admits` where a rollout asks."""

    def __init__(self, config: Config) -> None:
        batch = config.batch
        self.lag: int | None = config.replay.max_policy_lag or None
        self._is_synchronous = config.run.synchronous
        if self._is_synchronous:
            self.lag = 0
        self.uses_of_new = max(1, config.replay.max_sample_reuse)
        """How often a new sample can be trained (1 without a limit: what matters is that it is trained at all)."""
        self._steps_per_round = config.run.sync_every_optimizer_steps
        self._last_step = min(config.optimizer.max_steps, (config.run.max_sync_rounds or 10**12) * self._steps_per_round)
        self._packs_per_step = batch.grad_accum_steps * (config.run.fsdp_world_size or 1)
        self._batch_size = batch.batch_size
        self._token_budget = batch.train_token_budget if batch.train_packing == "varlen" else None
        self._samples_per_step = float(self._packs_per_step * batch.batch_size)
        self._first: Progress | None = None
        self._now = Progress(-1, 0, 0, 0, 0)

    def follow(self, now: Progress) -> None:
        """Take note of the trainer's progress."""
        self._now = now
        if self._first is None and now.version >= 0:  # before that a resumed trainer has not said at which step it is
            self._first = now

    def admits(self, supply: Supply, *, group_size: float) -> bool:
        """Whether one more group of `group_size` samples may be dealt."""
        self._samples_per_step = self._estimate_samples_per_step(supply)
        if supply.num_waiting and self._lets_waiting(supply, group_size):
            return True
        return supply.groups_that_fit >= 1 and self.budget(supply) >= group_size * self.uses_of_new

    def budget(self, supply: Supply) -> float:
        """Uses of samples that may still be dealt."""
        num_steps = self._last_step - self._now.round_step
        if self.lag is not None:
            num_steps = min(num_steps, (self.lag + 1) * self._steps_per_round)
        used_in_round = self._now.num_used - self._now.round_used
        return num_steps * self._samples_per_step - used_in_round - supply.usable_uses - supply.num_running * self.uses_of_new

    def _estimate_samples_per_step(self, supply: Supply) -> float:
        """Over all ranks. Exact for padded batches; for packs what was seen so far, before that an estimate from their length."""
        most = float(self._packs_per_step * self._batch_size)
        if self._token_budget is None:
            return most
        first = self._first or self._now
        num_steps, num_used = self._now.optimizer_step - first.optimizer_step, self._now.num_used - first.num_used
        if num_steps > 0 and num_used > 0:
            # Uses are counted when a step starts, steps when they end: unless a rank waits, one more is under way.
            return min(most, num_used / (num_steps + (supply.num_waiting == 0)))
        if supply.mean_tokens > 0:
            return min(most, self._packs_per_step * max(1.0, self._token_budget / supply.mean_tokens))
        return most

    def _lets_waiting(self, supply: Supply, group_size: float) -> bool:
        """Admission alone can never stop a run: ranks that stand still get what they lack, whatever the formula says.

        Packs may be full with fewer samples than a rank asks for: there, a group a rank at a time. With `--synchronous` a rank that
        has all it asked for lacks nothing: it looks into its ring in a moment, and one group more would be trained a round late.
        """
        lacks = supply.num_missing if self._token_budget is None else min(supply.num_missing, supply.num_waiting * group_size)
        return supply.num_running < lacks or (supply.num_running == 0 and not self._is_synchronous)
