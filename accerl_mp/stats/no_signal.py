"""What is said while the trainer starves: all rewards of nearly every group are alike, so GRPO leaves the groups out."""

from collections.abc import Mapping, Sequence

from accerl_mp.config import Config
from accerl_mp.stats.bottleneck import MOST_HAVE_NONE

FIRST_S = 60.0
"""A wait for samples this long without signal is worth a line; the next one comes after twice as long."""


class SignalWatch:
    """Counts the groups of one wait for samples. One thread, no waiting; clocks come in as arguments (`time.monotonic`)."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._leaves_out = algorithm.rl_algorithm != "ppo" and not algorithm.keep_zero_std_groups
        self._began_s, self._said_after_s = 0.0, FIRST_S
        self._num_alike = self._num_groups = 0.0

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """The values of one record, as (sum, count, max)."""
        alike, others = (values.get(tag, (0.0,))[0] for tag in ("Ingest/ZeroStdGroups", "Ingest/SampleGroups"))
        self._num_alike += alike
        self._num_groups += alike + others

    def is_due(self, now_s: float, waited_s: float) -> bool:
        """Most groups had no signal since the trainer began to wait, `waited_s` ago (0: it does not wait), which is long."""
        if now_s - waited_s > self._began_s + 1.0:  # another wait, or none; the table's clock and ours differ by less
            self._began_s, self._said_after_s = now_s - waited_s, FIRST_S
            self._num_alike = self._num_groups = 0.0
        has_none = self._num_alike >= MOST_HAVE_NONE * max(1.0, self._num_groups)
        return self._leaves_out and has_none and waited_s >= self._said_after_s

    def line(self, waited_s: float, win_rate: float) -> str:
        """The sentence, which is due again after twice as long. `win_rate`: of the newest episodes.

        Example: `no step for 1:00: 48 of 48 groups ended alike and teach nothing (win 0.00); take easier games (--tw-game-dir) or ...`
        """
        self._said_after_s = 2 * waited_s
        minutes, seconds = divmod(round(waited_s), 60)
        wins_most = win_rate >= 0.5
        hint = "take harder games (--tw-game-dir)" if wins_most else "take easier games (--tw-game-dir) or warm the model up (tools.sft)"
        return (
            f"no step for {minutes}:{seconds:02}: {self._num_alike:.0f} of {self._num_groups:.0f} groups ended alike"
            f" and teach nothing (win {win_rate:.2f}); {hint}"
        )
