"""Rank 0's judgement of a push that failed: whether a new group and all weights again would mend it, and for how long it tries."""

import time

from accerl_mp.transport.errors import DeadlineExpired
from accerl_mp.transport.health import Health
from accerl_mp.weight_sync.protocol import GroupBroken, WrongWeights
from accerl_mp.weight_sync.replicas import Replicas

_DEATH_SHOWS_S = 10.0
"""A connection breaks before its process is seen to be gone: a front first takes what is left of its vLLM apart."""
_MAX_BREAKS = 3
"""Groups that may break in one push although every process lives."""


class Patience:
    """One for all pushes; `reset` after each that succeeds.

    Deaths have two limits: `limit_s` from the first sign of trouble on, here, and `--max-restarts` at the supervisor, which ends
    every wait with PeerLost.
    """

    def __init__(self, replicas: Replicas, health: Health, *, limit_s: float) -> None:
        self._replicas, self._health, self._limit_s = replicas, health, limit_s
        self.reset()

    def reset(self) -> None:
        """Inference has taken a push."""
        self._until: float | None = None
        self._num_breaks = 0

    @property
    def remaining_s(self) -> float:
        """Until inference must take a push; the first look after a `reset` starts the clock."""
        now = self._health.table.clock()
        if self._until is None:
            self._until = now + self._limit_s
        return self._until - now

    def allows(self, failure: Exception) -> bool:
        """Whether to begin the push again. Wrong weights never; a death always; a broken group of living processes a few times.

        waits for      the death behind a failure to show, at most 10 s
        """
        if isinstance(failure, WrongWeights) or self.remaining_s <= 0:
            return False
        if isinstance(failure, DeadlineExpired):
            return bool(self._replicas.lost())
        if self._sees_a_death():
            return True
        self._num_breaks += isinstance(failure, GroupBroken)
        return isinstance(failure, GroupBroken) and self._num_breaks <= _MAX_BREAKS

    def _sees_a_death(self) -> bool:
        with self._health.waiting("inference to show whether it lives after a push broke", 0, peer="inference") as wait:
            while not (lost := self._replicas.lost()) and wait.waited_s < _DEATH_SHOWS_S:
                wait.check()
                time.sleep(0.05)
        return bool(lost)
