"""Which game files a run plays, in which order. Looks at names only: playing them is rollout's."""

import random
from pathlib import Path

from accerl_mp.config import Config


def list_games(config: Config) -> list[Path]:
    """Training games, shuffled by `--seed`, then limited. A game's id is its place in this list."""
    games = find_games(config.games.tw_game_dir, config.games.tw_game_pattern)
    random.Random(config.run.seed).shuffle(games)
    return games[: config.games.tw_game_limit]


def list_eval_games(config: Config) -> list[Path]:
    """Held-out games, sorted; none without `--eval-game-dir`."""
    if not config.metrics.eval_game_dir:
        return []
    return find_games(config.metrics.eval_game_dir, config.games.tw_game_pattern)


def find_games(folder: str, pattern: str) -> list[Path]:
    """Game files in `folder` and below, sorted by path."""
    return sorted(path for path in Path(folder).rglob(pattern) if path.is_file())


def without_json(games: list[Path]) -> list[Path]:
    """Games whose `.json` is not beside them: TextWorld then knows no commands, score or end."""
    return [game for game in games if not game.with_suffix(".json").is_file()]
