"""What status.json says: how the run stands now, for `launcher/summary.py`, `tools.top` and whoever looks in.

The document survives restarts of the stats process and of the run: the first evaluation and the start time stay. `started` is the
run's first start, `training_s` the rounds of all starts; `wall_s` and `start_training_s` are of the newest start alone, from `begun`
on, as every clock is (`RunPaths.begun`).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accerl_mp.stats.status_file import read_status, write_status
from accerl_mp.topology import RunPaths

_HEADLINES = {
    "win_rate": "TextWorld/WinRate",
    "normalized_score": "TextWorld/NormalizedScore",
    "invalid_action_rate": "TextWorld/InvalidActionRate",
    "window_episodes": "Rollout/WindowEpisodes",
    "active_workers": "Rollout/ActiveWorkers",
    "loss": "Train/Loss",
    "policy_lag_mean": "Replay/TrainSampleTrainerVersionLagMean",
    "policy_lag_oldest_max": "Replay/PolicyLagOldestMax",
    "restarts": "Stats/Restarts",
}
_THROUGHPUT = {
    "samples_per_s": "Train/SamplesPerSec",
    "trained_tokens_per_s": "Train/TokensPerSec",
    "optimizer_steps_per_s": "Train/OptimizerStepsPerSec",
    "generated_tokens_per_s": "Infer/TokensPerSec",
    "episodes_per_s": "Rollout/EpisodesPerSec",
}
_EVAL = {
    "win_rate": "Eval/WinRate",
    "normalized_score": "Eval/NormalizedScore",
    "invalid_action_rate": "Eval/InvalidActionRate",
    "episodes": "Eval/Episodes",
    "seconds": "Eval/Seconds",
}


class Status:
    """The document of one run, and its file.

    Example (some fields; a field without a value yet is missing):
        {"step": 24, "version": 12, "round": 12, "time": 1790000000.0, "started": 1789999000.0, "begun": 1789999000.0,
         "wall_s": 1000.0, "training_s": 610.0, "start_training_s": 610.0, "has_ended": false,
         "episodes": 4096, "win_rate": 0.61, "window_episodes": 1000,
         "throughput": {"samples_per_s": 12.3, ...}, "shares": {"trainer": {"wait": 0.61, ...}, ...},
         "bottleneck": "generation-bound: ...", "groups_alike": 0.4,
         "eval_first": {"step": 0, "version": 0, "time": ..., "win_rate": 0.4, ...},
         "eval_last": {...}, "eval_best": {...}, "restarts": 0}
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, begun = run_dir, RunPaths(run_dir).begun()
        self._fields: dict[str, Any] = {"step": 0, "version": -1, "round": 0, "started": time.time(), "training_s": 0.0, "episodes": 0}
        self._fields |= read_status(run_dir)
        if self._fields.get("begun") != begun:  # else the stats process was started again
            self._fields |= {"begun": begun, "start_training_s": 0.0}
        self._fields["has_ended"] = False

    @property
    def round(self) -> int:
        return self._fields["round"]

    @property
    def step(self) -> int:
        return self._fields["step"]

    @property
    def version(self) -> int:
        return self._fields["version"]

    @property
    def started(self) -> float:
        """Of the run's first start, `time.time()`."""
        return self._fields["started"]

    def close_round(
        self,
        *,
        number: int,
        step: int,
        version: int,
        round_s: float,
        values: Mapping[str, float],
        sentence: str,
        alike: float | None = None,
    ) -> None:
        """What a round gave, and the doctor's sentence and share for it. What was not measured in it keeps its last value."""
        fields = self._fields
        if alike is not None:
            fields["groups_alike"] = alike
        fields |= {"round": number, "step": step, "version": version, "bottleneck": sentence}
        for name in ("training_s", "start_training_s"):
            fields[name] = round(fields[name] + round_s, 3)
        fields |= _pick(_HEADLINES, values)
        fields["throughput"] = fields.get("throughput", {}) | _pick(_THROUGHPUT, values)
        fields["shares"] = _shares(values)

    def add_evaluation(self, *, step: int, version: int, time_s: float, values: Mapping[str, float]) -> None:
        result = {"step": step, "version": version, "time": time_s} | _pick(_EVAL, values)
        self._fields.setdefault("eval_first", result)
        self._fields["eval_last"] = result
        best = self._fields.get("eval_best", result)
        self._fields["eval_best"] = result if result.get("win_rate", 0) >= best.get("win_rate", 0) else best

    def count_episode(self) -> None:
        self._fields["episodes"] += 1

    def save(self, *, has_ended: bool = False) -> None:
        now = time.time()
        self._fields |= {"time": round(now, 3), "wall_s": round(now - self._fields["begun"], 3), "has_ended": has_ended}
        write_status(self._run_dir, self._fields)


def _pick(names: Mapping[str, str], values: Mapping[str, float]) -> dict[str, float]:
    return {field: values[tag] for field, tag in names.items() if tag in values}


def _shares(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    shares: dict[str, dict[str, float]] = {}
    for tag, value in values.items():
        match tag.split("/"):
            case ["Time", role, phase]:
                shares.setdefault(role, {})[phase] = round(value, 4)
    return shares
