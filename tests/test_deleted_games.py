"""Games that are deleted under a run: those that are left keep their numbers, and a run that has none left says that and nothing else."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp import recovery
from accerl_mp.config import Config
from accerl_mp.games import games_of_run, list_games, note_games
from accerl_mp.launcher.resuming import games_of, plan_start
from accerl_mp.recovery import identity
from accerl_mp.topology import RunPaths
from tests.light_run import LightRun
from tests.saved_states import save_state

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::Warning:jericho")]


@pytest.fixture
def games(games_dir: Path, tmp_path: Path) -> Path:  # noqa: F811
    shutil.copytree(games_dir, tmp_path / "games")
    return tmp_path / "games"


@pytest.fixture
def start(games: Path, tmp_path: Path) -> Iterator[Callable[..., LightRun]]:
    runs: list[LightRun] = []

    def start_run(**flags: Any) -> LightRun:
        runs.append(LightRun(tmp_path / "run", games, **flags))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def kill_ingest(run: LightRun) -> None:
    before = run.row("ingest/0").pid
    os.kill(before, signal.SIGKILL)
    run.wait_for(lambda: run.row("ingest/0").pid != before and run.runs("ingest/0"), "another ingest")


def game_ids(run: LightRun) -> set[tuple[str, int]]:
    found = set()
    for path in (run.paths.run_dir / "episodes").glob("train-*.json"):
        episode = json.loads(path.read_text())
        found.add((episode["game"], episode["game_id"]))
    return found


@pytest.mark.slow
def test_games_keep_their_numbers_when_some_are_deleted_and_ingest_is_started_again(start: Callable[..., LightRun], games: Path) -> None:
    run = start(env_step_timeout_s=60.0)
    run.wait_for(lambda: len(list((run.paths.run_dir / "episodes").glob("train-*.json"))) > 12, "all games to be played", 120)
    gone = list_games(run.config)[0]
    gone.unlink()
    kill_ingest(run)
    run.wait_for(lambda: "set aside" in run.log("ingest"), "the game to be set aside", 120)
    run.wait_training(10)
    run.finish()
    num_games = len(list(games.glob("*.json")))
    assert f"game {gone} failed 3 times in a row and is set aside, {num_games - 1} games are left" in run.terminal()
    assert len(game_ids(run)) == len({game_id for _, game_id in game_ids(run)}) == num_games, "one number each, before and after"


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_without_any_game_left_ends_with_that_sentence(start: Callable[..., LightRun], games: Path, is_killed: bool) -> None:
    run = start(env_step_timeout_s=60.0)
    run.wait_training(2)
    for game in games.iterdir():
        game.unlink()
    if is_killed:
        kill_ingest(run)
    assert run.process.wait(120) == 1, run.words()
    errors = [line for line in run.terminal().splitlines() if "the run ends: " in line]
    assert len(errors) == 1, run.terminal()
    assert "NothingToPlay: all " in errors[0]
    assert errors[0].endswith("games failed 3 times in a row: nothing is left to play")
    assert run.terminal().count("starts again") == is_killed, run.terminal()
    assert "ZeroDivisionError" not in run.log("ingest")
    assert run.left() == []


@pytest.fixture
def before(tmp_path: Path) -> Config:
    """Of a run with five games and a saved state."""
    folder, paths = tmp_path / "five", RunPaths(tmp_path / "run")
    (folder / "below").mkdir(parents=True)
    for name in ("a", "b", "c", "below/d", "below/a"):
        (folder / f"{name}.z8").touch()
    config = Config.from_flat({"tw_game_dir": str(folder), "log_dir": str(paths.run_dir), "resume": "auto"})
    paths.run_dir.mkdir()
    note_games(paths.games, config)
    config.save(paths.args)
    save_state(paths.resume, 4, config)
    return config


def test_a_run_goes_on_with_what_is_left_of_its_games_and_each_keeps_its_number(before: Config, tmp_path: Path) -> None:
    games = list_games(before)
    assert plan_start(before)[1:] == ([], [])
    assert games_of(plan_start(before)[0], before) == games
    games[1].unlink()
    start, problems, warnings = plan_start(before)
    assert (Path(start.state).name, problems) == (recovery.folder_name(4, 4), [])
    name = games[1].relative_to(tmp_path / "five")
    assert warnings == [
        f"--tw-game-dir {tmp_path / 'five'}: 1 of this run's 5 games is gone ({name}): set aside when its turn comes, "
        "the others keep their numbers"
    ]
    assert games_of(start, before) == games
    (tmp_path / "five").rename(tmp_path / "moved")
    moved = before.replace(tw_game_dir=str(tmp_path / "moved"))
    assert plan_start(moved)[1] == []
    assert games_of(start, moved) == [tmp_path / "moved" / game.relative_to(tmp_path / "five") for game in games]
    for game in games[2:]:
        (tmp_path / "moved" / game.relative_to(tmp_path / "five")).unlink()
    assert "4 of this run's 5 games are gone" in plan_start(moved)[2][0]
    assert " and 1 more)" in plan_start(moved)[2][0]


def test_a_run_that_plays_some_of_a_folders_games_keeps_those_whichever_are_deleted(before: Config) -> None:
    paths, limited = RunPaths(Path(before.metrics.log_dir)), before.replace(tw_game_limit=3)
    everything = list_games(before)
    for path in (paths.games, paths.args):
        path.unlink()
    note_games(paths.games, limited)
    limited.save(paths.args)
    save_state(paths.resume, 5, limited)
    games = list_games(limited)
    for gone in [game for game in everything if game not in games] + [games[0]]:
        gone.unlink()
        start, problems, _ = plan_start(limited)
        assert (problems, games_of(start, limited)) == ([], games)


def without(name: str) -> Callable[[Config, Path], Config]:
    def take(config: Config, run_dir: Path) -> Config:
        (run_dir / name).unlink()
        return config

    return take


def with_another_game(config: Config, _: Path) -> Config:
    (Path(config.games.tw_game_dir) / "e.z8").touch()
    return config


def with_the_list_of_another_run(config: Config, run_dir: Path) -> Config:
    note_games(run_dir / "games.json", config)
    return config


@pytest.mark.parametrize(
    "change",
    [
        without("games.json"),
        without("args.json"),
        with_another_game,
        with_the_list_of_another_run,
        lambda config, _: config.replace(tw_game_limit=3),
        lambda config, _: config.replace(tw_game_pattern="*"),
        lambda config, _: config.replace(seed=43),
    ],
)
def test_a_folder_in_which_more_has_changed_is_refused_still(before: Config, change: Callable[[Config, Path], Config]) -> None:
    """Or else an episode's number would mean another game."""
    list_games(before)[1].unlink()
    config = change(before, Path(before.metrics.log_dir))
    problems = plan_start(config)[1]
    assert [problem.split()[0] for problem in problems][:1] == ["--tw-game-dir"], problems
    assert "differs from the saved state's" in problems[0]


def test_a_list_of_games_is_what_it_was_and_a_damaged_one_costs_a_warning(games: Path, tmp_path: Path, caplog: Any) -> None:
    config, note = Config.from_flat({"tw_game_dir": str(games), "eval_game_dir": str(games)}), tmp_path / "games.json"
    (games / os.fsdecode(b"not utf-8 \xff.z8")).touch()
    note_games(note, config)
    noted, before = games_of_run(note, config), identity(config)
    assert (noted[0], noted[1]) == (list_games(config), sorted(games.glob("*.z8")))
    next(games.glob("room*.z8")).unlink()
    assert games_of_run(note, config) == noted
    assert identity(config, note) == before != identity(config)
    for damaged in (b"", b"[1]", b'{"train": [1], "eval": []}', b'{"train": []}', b"[" * 100_000, b"\xff\xfe"):
        note.write_bytes(damaged)
        caplog.clear()
        assert games_of_run(note, config)[0] == list_games(config)
        assert "games are listed anew" in caplog.text
    note.unlink()
    os.mkfifo(note)
    assert games_of_run(note, config)[0] == list_games(config)
