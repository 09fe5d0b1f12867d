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

from accerl_mp.config import Config
from accerl_mp.games import games_of_run, list_games, note_games
from accerl_mp.recovery import identity
from tests.light_run import LightRun

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
