"""Tiny real TextWorld games, made once a session: `from games_fixture import games_dir` in a test file, or `make_games(folder)`.

room-0.z8   one room, one command wins
room-1.z8   two rooms, two commands win
room-2.z8   one room, eating the food loses, taking the coin wins
"""

from pathlib import Path

import pytest
import textworld
from textworld import GameMaker, GameOptions
from textworld.generator.game import Event, Quest


def make_games(folder: Path) -> list[Path]:
    """Make them in `folder`, about 0.6 s each (the first of a process 2 s)."""
    folder.mkdir(parents=True, exist_ok=True)
    games = [_make_random(folder / f"room-{index}.z8", seed=index, num_rooms=1 + index) for index in range(2)]
    return [*games, _make_losable(folder / "room-2.z8")]


@pytest.fixture(scope="session")
def games_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three games. Made once, also where several test files import this fixture."""
    folder = tmp_path_factory.getbasetemp() / "tiny-games"
    if not folder.exists():
        make_games(folder)
    return folder


def _make_random(path: Path, *, seed: int, num_rooms: int) -> Path:
    options = GameOptions()
    options.seeds, options.path = seed, str(path)
    options.nb_rooms, options.nb_objects, options.quest_length = num_rooms, 2, num_rooms
    textworld.make(options)
    return path


def _make_losable(path: Path) -> Path:
    maker = GameMaker()
    room = maker.new_room("pantry")
    maker.set_player(room)
    coin, bread = maker.new(type="o", name="coin"), maker.new(type="f", name="bread")
    room.add(coin, bread)
    win = Event(conditions=[maker.new_fact("in", coin, maker.inventory)])
    lose = Event(conditions=[maker.new_fact("eaten", bread)])
    maker.quests = [Quest(win_events=[win], fail_events=[lose], reward=3)]
    maker.compile(str(path))
    return path
