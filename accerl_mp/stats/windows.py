"""Reductions: the sliding window of episodes, the groups of a round, and the sums between two rounds.

Plain Python on purpose: a record costs a few dictionary operations, a round a few milliseconds.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accerl_mp.config import Config
from accerl_mp.stats.tags import lookup

EpisodeRecord = Mapping[str, Any]
SHARES = "Time/"
MAX_OPEN_GROUPS = 4096
EPISODE_HISTOGRAMS = {"Rollout/EpisodeTokens": "num_tokens", "Rollout/EpisodeTurns": "num_turns"}
"""Histogram: the field of a training episode's record."""


@dataclass(slots=True)
class _Sums:
    """One tag from one process since the last round."""

    total: float = 0.0
    count: float = 0.0
    largest: float = -math.inf
    last: float = math.nan
    last_order: int = 0


class RoundSums:
    """Sums of every tag, by process, between two rounds."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, _Sums]] = {}
        self._order = 0
        self._timed_until: dict[str, float] = {}
        self._newest_times: dict[str, float] = {}

    def add(self, tag: str, source: str, total: float, count: float = 1.0, largest: float | None = None) -> None:
        """One (sum, count, max) record from `source`, a process such as "trainer/0"."""
        self._order += 1
        sums = self._sums.setdefault(tag, {}).setdefault(source, _Sums())
        sums.total += total
        sums.count += count
        sums.largest = max(sums.largest, total if largest is None else largest)
        if count:
            sums.last, sums.last_order = total / count, self._order

    def add_all(self, values: Mapping[str, Sequence[float]], source: str, now_s: float) -> None:
        """The values of one record."""
        for tag, (total, count, largest) in values.items():
            self.add(tag, source, total, count, largest)
            if tag.startswith(SHARES):
                self._newest_times[source] = now_s

    def begin(self) -> None:
        """The first round begins: time that was spent before it is of no round."""
        self._sums = {tag: by_source for tag, by_source in self._sums.items() if not tag.startswith(SHARES)}
        self._timed_until |= self._newest_times
        self._newest_times = {}

    def reduce(self, round_s: float) -> dict[str, float]:
        """Each tag as its row in the table says (unknown ones as means), then start again from nothing.

        round_s: wall time since the last round; a process that reports its times for the first time had as long.
        """
        values: dict[str, float] = {}
        for tag, by_source in self._sums.items():
            row = lookup(tag)
            reduction = row.reduction if row else "mean"
            value = self._share(by_source, round_s) if reduction == "share" else _reduce(reduction, list(by_source.values()))
            if value is not None:
                values[tag] = value
        self._timed_until |= self._newest_times
        self._newest_times, self._sums = {}, {}
        return values

    def _share(self, by_source: Mapping[str, _Sums], round_s: float) -> float | None:
        """A phase's seconds over the wall time that its processes' newest reports cover, at most 1.

        A report may cover more or less than a round, so each process is measured against its own report before.
        Episodes of one rollout wait side by side: their seconds add up to more than the wall time, hence the limit.
        """
        wall_s = 0.0
        for source in by_source:
            newest_s = self._newest_times.get(source, math.nan)
            wall_s += newest_s - self._timed_until[source] if source in self._timed_until else round_s
        return min(1.0, sum(sums.total for sums in by_source.values()) / wall_s) if wall_s > 0 else None


class Histograms:
    """How often each whole number came in a round, by histogram (`tags.HISTOGRAMS`)."""

    def __init__(self) -> None:
        self._counted: dict[str, Counter[int]] = {}

    def add_all(self, numbers: Mapping[str, Sequence[int]]) -> None:
        for tag, values in numbers.items():
            self._counted.setdefault(tag, Counter()).update(map(int, values))

    def take(self) -> dict[str, Counter[int]]:
        """The round's counts, and start again."""
        counted, self._counted = self._counted, {}
        return counted


def _reduce(reduction: str, sums: list[_Sums]) -> float | None:
    """None where there is nothing to divide by."""
    match reduction:
        case "sum":
            return sum(one.total for one in sums)
        case "max":
            return max(one.largest for one in sums)
        case "last":
            return max(sums, key=lambda one: one.last_order).last
        case "rate":
            rates = [one.total / one.count for one in sums if one.count]
            return sum(rates) if rates else None
        case _:
            count = sum(one.count for one in sums)
            return sum(one.total for one in sums) / count if count else None


class EpisodeWindow:
    """The newest `size` training episodes, and when each rollout process last ended an episode.

    An episode that is played again counts once, as it went the last time: a run that goes on from a state repeats what came after it.
    Evaluation episodes never enter the window; they do show that their process is active.
    """

    def __init__(self, size: int, active_timeout_s: float) -> None:
        self._size = size
        self._episodes: OrderedDict[int, EpisodeRecord] = OrderedDict()
        """By number, oldest first."""
        self._active_timeout_s = active_timeout_s
        self._last_seen: dict[Any, float] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def add(self, episode: EpisodeRecord, now_s: float) -> None:
        self._last_seen[episode["worker"]] = now_s
        if episode["kind"] == "train":
            self.restore(episode)

    def restore(self, episode: EpisodeRecord) -> None:
        """One of an earlier process: it says nothing about who is active now."""
        self._episodes[episode["episode_id"]] = episode
        self._episodes.move_to_end(episode["episode_id"])
        while len(self._episodes) > self._size:
            self._episodes.popitem(last=False)

    def episodes(self) -> list[EpisodeRecord]:
        """Oldest first."""
        return list(self._episodes.values())

    def num_active(self, now_s: float) -> int:
        return sum(now_s - seen <= self._active_timeout_s for seen in self._last_seen.values())

    def values(self, now_s: float) -> dict[str, float]:
        """Every tag of the window; without episodes only the number of active processes."""
        active = {"Rollout/ActiveWorkers": float(self.num_active(now_s)), "Rollout/WindowEpisodes": float(len(self))}
        if not self._episodes:
            return active
        ratios = {
            "TextWorld/WinRate": (self._sum("won"), len(self)),
            "TextWorld/NormalizedScore": (self._sum("score"), self._sum("max_score")),
            "TextWorld/InvalidActionRate": (self._sum("num_invalid"), self._sum("num_turns")),
            "TextWorld/EnvStepsMean": (self._sum("num_env_steps"), len(self)),
            "Rollout/TruncatedRate": (self._sum("truncated"), len(self)),
            "Rollout/LostRate": (self._sum("lost"), len(self)),
            "Rollout/TurnsMean": (self._sum("num_turns"), len(self)),
            "Rollout/EpisodeTokensMean": (self._sum("num_tokens"), len(self)),
            "Rollout/EpisodeSecondsMean": (self._sum("seconds"), len(self)),
        }
        return active | {tag: total / count for tag, (total, count) in ratios.items() if count}

    def _sum(self, field: str) -> float:
        return math.fsum(episode[field] for episode in self._episodes.values())


class GroupRewards:
    """Rewards of groups whose episodes are still coming in; a group counts when its last episode has come."""

    def __init__(self, config: Config, sums: RoundSums) -> None:
        self._sums = sums
        self._is_grpo = config.algorithm.rl_algorithm != "ppo"
        self._size = config.group_size
        self._eps = config.algorithm.grpo_adv_eps
        self._open: dict[int, dict[int, float]] = {}

    def add(self, episode: EpisodeRecord) -> None:
        """One training episode, into the round's sums."""
        self._sums.add("Rollout/GlobalRewardSumMean", "stats", episode["episode_return"])
        invalid = "GRPO/InvalidActionsMean" if self._is_grpo else "PPO/RolloutInvalidActionsMean"
        self._sums.add(invalid, "stats", episode["num_invalid"])
        if not self._is_grpo:
            return
        rewards = self._open.setdefault(episode["group_id"], {})
        # By episode: a group whose rollout died is played again from the start.
        rewards[episode["episode_id"]] = episode["reward"]
        if len(rewards) == self._size:
            del self._open[episode["group_id"]]
            self._close(list(rewards.values()))
        elif len(self._open) > MAX_OPEN_GROUPS:
            del self._open[next(iter(self._open))]

    def _close(self, rewards: list[float]) -> None:
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        self._sums.add("GRPO/GroupRewardMean", "stats", mean)
        self._sums.add("GRPO/GroupRewardStd", "stats", std)
        self._sums.add("GRPO/ZeroStdGroups", "stats", float(std <= self._eps))
        self._sums.add("GRPO/ZeroStdRate", "stats", float(std <= self._eps))
