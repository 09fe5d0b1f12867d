"""One evaluation: the held-out games' episodes as they come in, and what becomes of them."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accerl_mp.files import write_atomically
from accerl_mp.ingest.dealer import Deal

Episode = Mapping[str, Any]
Value = float | tuple[float, float, float]


class Evaluation:
    """Results by group. A group that arrives twice counts once."""

    def __init__(self, eval_id: int, deals: Sequence[Deal], games: Sequence[Path], *, step: int, version: int) -> None:
        self.eval_id, self.step, self.version = eval_id, step, version
        """`step` and `version` are the trainer's when the evaluation began; tokens of a later version may be in it."""
        self._games = games
        self._open = {deal.group_id: deal for deal in deals}
        self._episodes: dict[int, list[Episode]] = {}
        self._failed: list[Path] = []
        self._started = time.monotonic()

    def add(self, group_id: int, episodes: Sequence[Episode]) -> bool:
        """Take a group's episodes; False if it is not one that is still open."""
        deal = self._open.pop(group_id, None)
        if deal is None:
            return False
        self._episodes[deal.game_id] = list(episodes)
        return True

    def give_up(self, group_id: int) -> None:
        """Its game cannot be played: it is named, and counts in no mean."""
        deal = self._open.pop(group_id, None)
        if deal is not None:
            self._failed.append(self._games[deal.game_id])

    @property
    def is_complete(self) -> bool:
        return not self._open

    def values(self) -> dict[str, Value]:
        """Tags for stats, as (sum, count, max)."""
        episodes = [episode for group in self._episodes.values() for episode in group]
        if not episodes:
            return {"Eval/Episodes": 0.0}
        values: dict[str, Value] = {
            "Eval/WinRate": _ratio(episodes, "won"),
            "Eval/NormalizedScore": _ratio(episodes, "score", "max_score"),
            "Eval/InvalidActionRate": _ratio(episodes, "num_invalid", "num_turns"),
            "Eval/EnvStepsMean": _ratio(episodes, "num_env_steps"),
            "Eval/TruncatedRate": _ratio(episodes, "truncated"),
            "Eval/Episodes": float(len(episodes)),
            "Eval/Seconds": time.monotonic() - self._started,
        }
        # A ratio over nothing (games without a score) is no number.
        return {tag: value for tag, value in values.items() if not isinstance(value, tuple) or value[1] > 0}

    def save(self, folder: Path) -> Path:
        """Write `step-XXXXXX.json`: means, then every game."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.step:06d}.json"
        write_atomically(path, json.dumps(self._report(), indent=1) + "\n")
        return path

    def _report(self) -> dict[str, Any]:
        means = {tag: _mean(value) for tag, value in self.values().items()}
        games = [self._game(game_id, episodes) for game_id, episodes in sorted(self._episodes.items())]
        head = {"eval_id": self.eval_id, "step": self.step, "version": self.version, "time": time.time()}
        return head | means | {"games": games, "failed_games": [str(path) for path in self._failed]}

    def _game(self, game_id: int, episodes: Sequence[Episode]) -> dict[str, Any]:
        return {
            "game": str(self._games[game_id]),
            "win_rate": sum(bool(episode["won"]) for episode in episodes) / max(1, len(episodes)),
            "score": sum(episode["score"] for episode in episodes),
            "max_score": sum(episode["max_score"] for episode in episodes),
            "episodes": list(episodes),
        }


def _ratio(episodes: Sequence[Episode], field: str, over: str | None = None) -> tuple[float, float, float]:
    values = [float(episode[field]) for episode in episodes]
    count = sum(float(episode[over]) for episode in episodes) if over else len(episodes)
    return sum(values), float(count), max(values)


def _mean(value: Value) -> float:
    return value[0] / value[1] if isinstance(value, tuple) else value
