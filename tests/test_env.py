"""Real TextWorld games through the Env protocol, and the pool that reuses them."""

from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.rollout.env import EnvError, EnvPool, TextWorldEnv, game_name
from accerl_mp.rollout.prompt import SYSTEM, invalid_message, turn_message

pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")


def test_the_games_own_commands_win_it(games_dir: Path) -> None:  # noqa: F811
    env = TextWorldEnv(games_dir / "room-1.z8", policy_commands=True)
    observation = env.reset(0)
    assert not observation.done
    assert observation.score == 0
    num_steps = 0
    while not observation.done:
        assert observation.policy_commands[0] in observation.commands
        observation = env.step(observation.policy_commands[0])
        num_steps += 1
    assert observation.won
    assert not observation.lost
    assert observation.score == observation.max_score == 1
    assert num_steps == 2
    env.close()


def test_a_game_can_be_lost_and_played_again(games_dir: Path) -> None:  # noqa: F811
    env = TextWorldEnv(games_dir / "room-2.z8")
    env.reset(5)
    env.step("take bread")
    lost = env.step("eat bread")
    assert (lost.won, lost.lost, lost.done, lost.score, lost.max_score) == (False, True, True, 0, 3)
    again = env.reset(5)
    assert not again.done
    assert "take bread" in again.commands
    won = env.step("take coin")
    assert (won.won, won.lost, won.score) == (True, False, 3)
    env.close()


def test_the_text_has_no_banner_status_line_or_empty_line(games_dir: Path) -> None:  # noqa: F811
    for name in ("room-0", "room-1", "room-2"):
        env = TextWorldEnv(games_dir / f"{name}.z8")
        first = env.reset(0)
        second = env.step("look")
        for observation in (first, second):
            assert "$$" not in observation.text
            assert ">" not in observation.text
            assert "\n\n" not in observation.text
            assert observation.text.startswith("-= ")
        assert first.objective not in first.text or not first.objective
        assert first.text == second.text
        env.close()


def test_the_same_seed_gives_the_same_game_after_anything(games_dir: Path) -> None:  # noqa: F811
    env = TextWorldEnv(games_dir / "room-0.z8")
    first = env.reset(7)
    for command in first.commands[:3]:
        env.step(command)
    assert env.reset(7) == first
    env.close()


def test_a_game_without_its_json_is_refused_by_name(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    lonely = tmp_path / "lonely.z8"
    lonely.write_bytes((games_dir / "room-0.z8").read_bytes())
    with pytest.raises(EnvError, match=r"lonely\.z8: no \.json"):
        TextWorldEnv(lonely)


def test_a_broken_json_is_named(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    game = tmp_path / "cut.z8"
    game.write_bytes((games_dir / "room-0.z8").read_bytes())
    game.with_suffix(".json").write_text('{"version": ')
    with pytest.raises(EnvError, match=r"cut\.z8: JSONDecodeError"):
        TextWorldEnv(game)


@pytest.mark.parametrize("damage", ["empty", "text", "zeros", "garbage", "cut", "flipped", "missing"])
def test_a_damaged_story_is_named_and_does_not_end_the_process(games_dir: Path, tmp_path: Path, damage: str) -> None:  # noqa: F811
    story = (games_dir / "room-0.z8").read_bytes()
    flipped = story[:100_000] + bytes([story[100_000] ^ 1]) + story[100_001:]
    contents = {"empty": b"", "text": b"hello", "zeros": bytes(300_000), "garbage": bytes(range(256)) * 999}
    contents |= {"cut": story[:99_999], "flipped": flipped}
    game = tmp_path / "bad.z8"
    if damage != "missing":
        game.write_bytes(contents[damage])
    game.with_suffix(".json").write_bytes((games_dir / "room-0.json").read_bytes())
    with pytest.raises(EnvError, match=r"bad\.z8"):
        TextWorldEnv(game)


def test_the_pool_reuses_an_environment_of_the_same_game(games_dir: Path) -> None:  # noqa: F811
    pool = EnvPool(2)
    path = str(games_dir / "room-0.z8")
    first = pool.acquire(path)
    pool.release(first)
    assert pool.acquire(path) is first
    assert pool.acquire(path) is not first  # the first is being played
    assert len(pool) == 2
    pool.close()
    first.close()


def test_the_pool_closes_the_one_that_was_used_longest_ago(games_dir: Path) -> None:  # noqa: F811
    pool = EnvPool(2)
    paths = [str(games_dir / f"room-{index}.z8") for index in range(3)]
    envs = [pool.acquire(path) for path in paths[:2]]
    pool.release(envs[1])
    pool.release(envs[0])
    third = pool.acquire(paths[2])  # no room: room-1 goes
    assert len(pool) == 2
    assert pool.acquire(paths[0]) is envs[0]
    assert pool.acquire(paths[1]) is not envs[1]
    assert third.reset(0).commands
    pool.close()


def test_a_failed_environment_is_not_reused(games_dir: Path) -> None:  # noqa: F811
    pool = EnvPool(2)
    path = str(games_dir / "room-0.z8")
    env = pool.acquire(path)
    pool.discard(env)
    assert len(pool) == 0
    assert pool.acquire(path) is not env


def test_the_message_of_a_turn_holds_the_whole_state(games_dir: Path) -> None:  # noqa: F811
    env = TextWorldEnv(games_dir / "room-0.z8")
    observation = env.reset(0)
    message = turn_message(observation)
    assert observation.objective in message
    assert observation.text in message
    assert observation.inventory in message
    assert [line[2:] for line in message.split("\n") if line.startswith("- ")] == list(observation.commands)
    rejected = invalid_message("fly " * 100, observation)
    notice, _, rest = rejected.partition("\n")
    assert rest == message
    assert notice.startswith('"fly fly')
    assert len(notice) < 120
    assert len(SYSTEM) < 100
    env.close()


def test_a_games_name_is_its_files() -> None:
    assert game_name("/games/easy/one.z8") == "one"
