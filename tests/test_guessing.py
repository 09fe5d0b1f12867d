"""Another task through `--env`: the number-guessing example, played by the code that plays TextWorld; what is no task is refused."""

import asyncio
import math
from pathlib import Path

import pytest
from chat_fixture import build_tokenizer
from scripted import build_player

from accerl_mp.checks import check
from accerl_mp.config import Config, resolve
from accerl_mp.rollout.env import EnvError, EnvPool, TextWorldEnv, find_env
from accerl_mp.rollout.guessing import GuessingEnv

NAME = "accerl_mp.rollout.guessing:GuessingEnv"


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "to-16.txt"
    path.write_text("16\n")
    return path


def test_halving_finds_the_number(game: Path) -> None:
    env = GuessingEnv(str(game))
    for seed in range(40):
        low, high, seen = 1, 16, env.reset(seed)
        for _ in range(int(math.log2(16)) + 1):
            guess = (low + high) // 2
            seen = env.step(f"guess {guess}")
            if seen.done:
                break
            low, high = (guess + 1, high) if seen.text.endswith("low.") else (low, guess - 1)
        assert seen.won
        assert seen.score == seen.max_score == 1


def test_the_same_seed_is_the_same_number(game: Path) -> None:
    env = GuessingEnv(str(game))

    def answers(seed: int) -> list[str]:
        env.reset(seed)
        return [env.step(f"guess {number}").text for number in range(1, 17)]

    assert answers(3) == answers(3)
    assert len({tuple(answers(seed)) for seed in range(40)}) > 8


def test_an_episode_of_it_is_played_like_any_other(game: Path) -> None:
    player = build_player(build_tokenizer(), lambda _episode, turn: "dance" if turn == 0 else f"guess {turn}", tw_max_episode_steps=20)
    player.envs = EnvPool(2, find_env(NAME))
    episode = asyncio.run(player.play(path=str(game), episode_id=0, seed=5, temperature=1.0))
    assert episode.won
    assert episode.num_invalid == 1
    assert episode.episode_return == 2  # its score and --tw-win-bonus
    assert "Objective: Find the number." in episode.turns[0].message
    assert "- guess 16" in episode.turns[0].message


def test_a_broken_game_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("many")
    with pytest.raises(EnvError, match=r"bad\.txt: must hold a number"):
        GuessingEnv(str(tmp_path / "bad.txt"))


def test_a_task_is_found_by_name() -> None:
    assert find_env("textworld") is TextWorldEnv
    assert find_env(NAME) is GuessingEnv


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alfworld", "neither 'textworld' nor module:Class"),
        ("no_such_module:Env", "cannot be imported.*PYTHONPATH"),
        ("accerl_mp.rollout.guessing:Nothing", "has no Nothing"),
        ("pathlib:Path", "has no reset, step, close"),
    ],
)
def test_what_is_no_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_env(name)


def test_games_of_another_task_need_no_json(game: Path) -> None:
    flags = {"tw_game_dir": str(game.parent), "tw_game_pattern": "*.txt", "placement": "cpu"}

    def problems(**more: str) -> str:
        return "\n".join(check(resolve(Config.from_flat(flags | more), num_gpus=0, log_dir=str(game.parent / "run")), num_gpus=0))

    assert ".json" in problems()
    assert ".json" not in problems(env=NAME)
