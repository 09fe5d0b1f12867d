"""One episode of a real game, with scripted replies: rewards, ends, cuts, and what the model is shown."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_fixture import build_tokenizer
from games_fixture import games_dir  # noqa: F401
from scripted import Policy, build_player, reply

from accerl_mp.rollout.env import EnvError
from accerl_mp.rollout.episode import Episode, Player

pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")
TOKENIZER = build_tokenizer()
WINNING = ["take coin"]
LOSING = ["take bread", "eat bread"]


def scripted(*replies: str) -> Policy:
    """These replies, then "look" for ever."""
    return lambda _episode, turn: replies[turn] if turn < len(replies) else "look"


def play(player: Player, games: Path, game: str = "room-2") -> Episode:
    return asyncio.run(player.play(path=str(games / f"{game}.z8"), episode_id=3, seed=1, temperature=0.5))


def run(games: Path, *replies: str, **flags: Any) -> tuple[Episode, Player]:
    player = build_player(TOKENIZER, scripted(*replies), **flags)
    return play(player, games), player


def test_a_won_episode_gets_score_and_bonus(games_dir: Path) -> None:  # noqa: F811
    episode, player = run(games_dir, "look", *WINNING, tw_step_penalty=0.125, tw_win_bonus=2.0)
    assert (episode.won, episode.lost, episode.truncated) == (True, False, False)
    assert [turn.reward for turn in episode.turns] == [-0.125, 3 - 0.125 + 2]
    assert episode.episode_return == pytest.approx(4.75)
    assert (episode.num_env_steps, episode.num_invalid, len(episode.turns)) == (2, 0, 2)
    assert (episode.observation.score, episode.observation.max_score) == (3, 3)
    assert len(player.envs) == 1


def test_a_lost_episode_gets_the_penalty_and_is_no_truncation(games_dir: Path) -> None:  # noqa: F811
    episode, _ = run(games_dir, *LOSING, tw_lost_penalty=0.5)
    assert (episode.won, episode.lost, episode.truncated) == (False, True, False)
    assert [turn.reward for turn in episode.turns] == [0, -0.5]


def test_the_turn_limit_cuts_without_a_penalty(games_dir: Path) -> None:  # noqa: F811
    episode, _ = run(games_dir, tw_max_episode_steps=3, tw_lost_penalty=5.0)
    assert episode.truncated
    assert not episode.lost
    assert len(episode.turns) == 3
    assert episode.episode_return == 0


def test_winning_on_the_last_turn_is_no_truncation(games_dir: Path) -> None:  # noqa: F811
    episode, _ = run(games_dir, "look", *WINNING, tw_max_episode_steps=2)
    assert episode.won
    assert not episode.truncated


def test_a_turn_starts_only_if_a_whole_reply_still_fits(games_dir: Path) -> None:  # noqa: F811
    full, player = run(games_dir, tw_max_episode_steps=4)
    last_prompt = len(player.inference.asked[-1]["prompt"])
    for window, num_turns in ((last_prompt + 16, 4), (last_prompt + 15, 3)):
        episode, player = run(games_dir, tw_max_episode_steps=4, tw_history_token_window=window)
        assert (len(episode.turns), episode.truncated) == (num_turns, True)
        assert all(len(request["prompt"]) + request["max_tokens"] <= window for request in player.inference.asked)
        assert {request["max_tokens"] for request in player.inference.asked} == {16}  # never shrunk: no command is cut
    assert full.truncated


def test_each_prompt_continues_the_one_before_and_names_the_salt(games_dir: Path) -> None:  # noqa: F811
    episode, player = run(games_dir, "look", "nonsense", *WINNING)
    asked = player.inference.asked
    grown: list[int] = []
    for request, turn in zip(asked, episode.turns, strict=True):
        grown += turn.new_ids
        assert request["prompt"] == grown
        grown += turn.reply.ids.tolist()
    assert [request["salt_version"] for request in asked] == [-1, 7, 7]
    assert {request["temperature"] for request in asked} == {0.5}
    assert {request["episode_id"] for request in asked} == {3}


def test_an_invalid_reply_costs_a_turn_and_is_quoted(games_dir: Path) -> None:  # noqa: F811
    episode, _ = run(games_dir, "Fly  Away!", *WINNING, tw_invalid_action_penalty=0.25)
    first, second = episode.turns
    assert (episode.num_invalid, episode.num_env_steps, len(episode.turns)) == (1, 1, 2)
    assert first.command is None
    assert second.message == '"fly away" is not listed.\n' + first.message
    assert first.reward == 0  # relative to a group the penalty is the episode's


def test_with_ppo_the_penalty_belongs_to_the_turn(games_dir: Path) -> None:  # noqa: F811
    episode, _ = run(games_dir, "fly", *WINNING, tw_invalid_action_penalty=0.25, rl_algorithm="ppo")
    assert [turn.reward for turn in episode.turns] == [-0.25, 4]


def test_an_aborted_reply_is_never_executed(games_dir: Path) -> None:  # noqa: F811
    def policy(_episode: int, turn: int) -> Any:
        return reply(TOKENIZER, "take coin", finish_reason="abort") if turn == 0 else "look"

    player = build_player(TOKENIZER, policy, tw_max_episode_steps=2, tw_invalid_action_penalty=1.0, rl_algorithm="ppo")
    episode = play(player, games_dir)
    assert not episode.won
    aborted = episode.turns[0]
    assert (aborted.command, aborted.reward, aborted.is_trained) == (None, 0, False)
    assert (episode.num_invalid, episode.num_env_steps) == (0, 1)
    assert episode.turns[1].message == aborted.message


def test_a_first_message_that_does_not_fit_gives_an_episode_without_turns(games_dir: Path) -> None:  # noqa: F811
    episode, player = run(games_dir, tw_history_token_window=50)
    assert episode.truncated
    assert episode.turns == []
    assert player.inference.asked == []


def test_an_environment_whose_episode_failed_is_not_used_again(games_dir: Path) -> None:  # noqa: F811
    def policy(_episode: int, _turn: int) -> str:
        raise RuntimeError("the engine is gone")

    player = build_player(TOKENIZER, policy)
    with pytest.raises(RuntimeError, match="engine is gone"):
        play(player, games_dir)
    assert len(player.envs) == 0


def test_a_game_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"room-2\.z8"):
        play(build_player(TOKENIZER, scripted()), tmp_path)


def test_in_window_mode_each_turn_sees_only_the_last_ones(games_dir: Path) -> None:  # noqa: F811
    episode, player = run(games_dir, tw_max_episode_steps=4, history_mode="window", history_window_turns=2)
    lengths = [len(request["prompt"]) for request in player.inference.asked]
    assert lengths[0] < lengths[1]
    assert max(lengths[2:]) < lengths[0] + lengths[1]
    assert [turn.new_ids for turn in episode.turns] == [request["prompt"] for request in player.inference.asked]
