"""Real TextWorld games through the Env protocol, and the pool that reuses them."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.rollout.env import EnvError, EnvPool, Observation, TextWorldEnv, game_name
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


def put(game: Path, at: Path) -> None:
    for ending in (".z8", ".json"):
        at.with_suffix(ending).write_bytes(game.with_suffix(ending).read_bytes())


def play(env: TextWorldEnv, seed: int) -> list[Observation]:
    """What it shows, by the first command that is not the last one's."""
    seen = [env.reset(seed)]
    while len(seen) < 6 and not seen[-1].done:
        seen.append(env.step(seen[-1].commands[len(seen) % len(seen[-1].commands)]))
    return seen


def test_a_switched_environment_shows_what_a_new_one_does(games_dir: Path) -> None:  # noqa: F811
    paths = [str(games_dir / f"room-{index}.z8") for index in range(3)]
    fresh = {}
    for path in paths:
        env = TextWorldEnv(path)
        fresh[path] = play(env, 5)
        env.close()
    assert len({seen[0].text for seen in fresh.values()}) == 3, "games that look alike would show nothing"
    env = TextWorldEnv(paths[0])
    for path in [*paths, *reversed(paths), paths[0], paths[0]]:
        env.go_to_game(path)
        assert env.path == path
        assert play(env, 5) == fresh[path]
    env.close()


def test_two_environments_of_one_game_know_nothing_of_each_other(games_dir: Path) -> None:  # noqa: F811
    path = games_dir / "room-2.z8"
    alone = TextWorldEnv(path)
    expected = play(alone, 3)
    one, other = TextWorldEnv(path), TextWorldEnv(path)
    one.reset(3)
    other.reset(3)
    one.step("take bread")
    one.step("eat bread")  # lost: the other's game goes on
    assert play(other, 3) == expected
    for env in (alone, one, other):
        env.close()


def test_a_game_whose_files_were_replaced_is_read_again(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "game.z8"
    put(games_dir / "room-0.z8", path)
    env = TextWorldEnv(path)
    before = env.reset(1)
    put(games_dir / "room-1.z8", path)
    env.go_to_game(path)
    after = env.reset(1)
    assert (before.text, before.objective) != (after.text, after.objective)
    env.close()


@pytest.mark.parametrize("gone", [".z8", ".json"])
def test_an_idle_environment_of_a_game_whose_files_are_gone_is_not_handed_out(games_dir: Path, tmp_path: Path, gone: str) -> None:  # noqa: F811
    """Its interpreter would find no story and end the process, so a process of its own plays."""
    path = tmp_path / "game.z8"
    put(games_dir / "room-0.z8", path)
    code = f"""
from pathlib import Path
from accerl_mp.rollout.env import EnvError, EnvPool
pool = EnvPool(2)
env = pool.acquire({str(path)!r})
env.reset(1)
pool.release(env)
Path({str(path.with_suffix(gone))!r}).unlink()
try:
    pool.acquire({str(path)!r}).reset(1)
except EnvError as error:
    print("refused:", error, len(pool))
"""
    words = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"refused: game {path}: ")
    assert done.stdout.endswith(" 0\n"), "the environment is closed"


@pytest.mark.parametrize("by", ["another game", "a text"])
def test_an_idle_environment_of_a_game_whose_files_were_replaced_plays_the_new_ones(games_dir: Path, tmp_path: Path, by: str) -> None:  # noqa: F811
    path = tmp_path / "game.z8"
    put(games_dir / "room-0.z8", path)
    pool = EnvPool(2)
    env = pool.acquire(str(path))
    before = env.reset(1)
    pool.release(env)
    if by == "a text":
        path.write_text("hello")
        with pytest.raises(EnvError, match="no Z-machine story"):
            pool.acquire(str(path))
        return
    put(games_dir / "room-1.z8", path)
    again = pool.acquire(str(path))
    fresh = TextWorldEnv(path)
    assert again is env
    assert play(again, 1) == play(fresh, 1)
    assert again.reset(1) != before
    fresh.close()
    pool.discard(again)


def test_switching_between_games_takes_no_memory(games_dir: Path) -> None:  # noqa: F811
    env = TextWorldEnv(games_dir / "room-0.z8")

    def switch(times: int) -> int:
        for number in range(times):
            env.go_to_game(games_dir / f"room-{number % 3}.z8")
            env.reset(number)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = switch(60)
    grown_mib = (switch(240) - before) / 2**20
    env.close()
    assert grown_mib < 24, "a start beside the old game's memory loses 0.4 MiB, here 96"


def test_the_pool_switches_an_idle_environment_to_another_game(games_dir: Path) -> None:  # noqa: F811
    pool = EnvPool(2)
    first = pool.acquire(str(games_dir / "room-0.z8"))
    pool.release(first)
    other = str(games_dir / "room-1.z8")
    assert pool.acquire(other) is first
    assert (first.path, len(pool)) == (other, 1)
    pool.release(first)
    with pytest.raises(EnvError, match="none"):
        pool.acquire(str(games_dir / "none.z8"))
    assert len(pool) == 0, "one that could not switch is closed"


def test_an_environment_that_cannot_switch_is_opened_for_each_game() -> None:
    class Fixed:
        def __init__(self, path: str) -> None:
            self.path, self.closed = path, False

        def close(self) -> None:
            self.closed = True

        def switch(self, path: str) -> None:
            raise AssertionError("a method of the user's own that means something else")

    pool = EnvPool(1, Fixed)  # type: ignore[arg-type]
    first = pool.acquire("a")
    pool.release(first)
    second = pool.acquire("b")
    assert second is not first
    assert (first.closed, second.closed, second.path) == (True, False, "b")


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
