"""The fault matrix's light half: real rollouts, ingest, stats and supervisor, broken in every way at rest and at work."""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.ring import SharedRing
from tests.fault_matrix import CELLS, EVENTS, REST, Cell, cells_of, markdown, marks_of
from tests.light_run import LightRun
from tests.poisoned_games import poison
from tests.reported_failures import REPORTED

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::Warning:jericho")]
README = Path(__file__).parent.parent / "README.md"


def marked(cells: list[Cell]) -> list[Any]:
    return [pytest.param(cell, id=cell.case, marks=[pytest.mark.slow] if cell.is_slow else []) for cell in cells]


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In place of conftest's: the shared run lives on from test to test, with ever new processes. Every `finish` and `close` looks."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, games_dir: Path) -> Iterator[Callable[[], LightRun]]:  # noqa: F811
    """One run for all cells, started anew if one of them ended it."""
    runs: list[LightRun] = []

    def live() -> LightRun:
        if not runs or runs[-1].process.poll() is not None:
            runs.append(LightRun(tmp_path_factory.mktemp("faults") / "run", games_dir))
            runs[-1].wait_training()
        return runs[-1]

    yield live
    try:
        for run in runs:
            if run.process.poll() is None:
                run.finish()
    finally:
        for run in runs:
            run.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LightRun]]:
    runs: list[LightRun] = []

    def start_run(games: Path, **flags: Any) -> LightRun:
        runs.append(LightRun(tmp_path / f"run {len(runs)}", games, **flags))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


@pytest.mark.parametrize("cell", marked(cells_of("test_a_role")))
def test_a_role(shared: Callable[[], LightRun], cell: Cell) -> None:
    run, name = shared(), f"{cell.who}/0"
    run.wait_for(lambda: run.runs(name), f"{name} to run")
    before = run.row(name)
    with resting(run) if cell.moment == REST else contextlib.nullcontext():
        if cell.moment != REST:
            wait_for_work(run, cell.who)
        os.kill(before.pid, getattr(signal, EVENTS[cell.event]))
        run.wait_for(lambda: run.row(name).pid not in (0, before.pid) and run.runs(name), f"{name} to run again")
    size = metrics_size(run)
    run.wait_training(4)
    run.wait_for(lambda: metrics_size(run) > size, "a line of metrics")
    if cell.event == "stopped":
        assert f"{name} has had no heartbeat for 6 s, it is stopped (SIGSTOP)" in run.terminal()


@contextlib.contextmanager
def resting(run: LightRun) -> Iterator[None]:
    """The trainer takes nothing: the rings fill up, and then nobody has anything to do."""
    pause = run.paths.run_dir / "pause"
    pause.touch()
    try:
        ring = SharedRing.watch(run.paths.ring(0))
        seen, since = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal seen, since
            now = int(ring.memory.writer[at.COMMITTED])
            if now != seen or any(run.row(f"rollout/{index}").waits_for.startswith("inference/") for index in range(2)):
                seen, since = now, time.monotonic()
            return time.monotonic() - since > 0.3

        run.wait_for(is_quiet, "everybody to rest")
        ring.close()
        yield
    finally:
        pause.unlink()


def wait_for_work(run: LightRun, role: str) -> None:
    """The moment at which this role is in the middle of something."""
    if role == "rollout":
        run.wait_for(lambda: run.row("rollout/0").waits_for.startswith("inference/"), "a turn that is open", every_s=0.001)
    elif role == "stats":
        size = metrics_size(run)
        run.wait_for(lambda: metrics_size(run) > size, "a round's line", every_s=0.001)
    else:
        ring = SharedRing.watch(run.paths.ring(0))
        committed = int(ring.memory.writer[at.COMMITTED])
        run.wait_for(lambda: ring.memory.writer[at.COMMITTED] > committed, "a commit", every_s=0.0)
        ring.close()


def metrics_size(run: LightRun) -> int:
    path = run.paths.run_dir / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize("cell", marked(cells_of("test_a_poisoned_game")))
def test_a_poisoned_game(start: Callable[..., LightRun], games_dir: Path, tmp_path: Path, cell: Cell) -> None:  # noqa: F811
    games = tmp_path / "games"
    shutil.copytree(games_dir, games)
    bad = poison(games / "room-0.z8", games / "poisoned.z8", cell.event)
    # A busy machine takes seconds to open a game: a short limit would blame the good ones, too.
    run = start(games, max_restarts=0, env_step_timeout_s=8.0 if cell.event == "hangs" else 60.0)
    run.wait_for(lambda: "set aside" in run.log("ingest"), "the game to be set aside", 120)
    run.wait_training(10)
    named = [line for line in run.terminal().splitlines() if bad.name in line and "set aside" in line]
    assert len(named) == 1, run.terminal()
    assert "failed 3 times in a row and is set aside, 3 games are left" in named[0]
    run.finish()
    books = json.loads((run.paths.run_dir / "books.json").read_text())
    assert books["groups"]["set_aside"] >= 1
    others = [line for line in run.terminal().splitlines() if bad.name in line and line not in named]
    # A game that hangs is the reason of its process's end, once each time; the other rollout may be in it at the third.
    assert len(others) <= 4 * (cell.event == "hangs"), others


@pytest.mark.parametrize("cell", marked(cells_of("test_a_game_that_changes")))
def test_a_game_that_changes(start: Callable[..., LightRun], games_dir: Path, tmp_path: Path, cell: Cell) -> None:  # noqa: F811
    """Under environments that have played it and are kept for the next time."""
    games = tmp_path / "games"
    shutil.copytree(games_dir, games)
    run, game = start(games, max_restarts=0, env_step_timeout_s=60.0), games / "room-0.z8"
    run.wait_for(lambda: len(beginnings(run)) == 3, "all games to be played", 120)
    rollouts, before = [run.row(f"rollout/{index}").pid for index in range(2)], beginnings(run)
    if cell.event == "replaced":
        for ending in (".z8", ".json"):
            shutil.copy((games_dir / "room-1.z8").with_suffix(ending), tmp_path / "new")
            (tmp_path / "new").rename(game.with_suffix(ending))
        new = before["room-1"]
        run.wait_for(lambda: beginnings(run)["room-0"] >= new, "the new game to be played under the old name", 120)
    else:
        game.with_suffix(cell.event.removeprefix("loses its ")).unlink()
        run.wait_for(lambda: "set aside" in run.log("ingest"), "the game to be set aside", 120)
        assert "room-0" in run.log("ingest").partition("set aside")[0].splitlines()[-1]
    run.wait_training(10)
    rows = [run.row(f"rollout/{index}") for index in range(2)]
    # Gone between the look at it and the interpreter's own opening, it takes that process along: the game's fault, not a restart.
    took_one_along = cell.event == "loses its .z8" and "the game's fault" in run.terminal()
    assert took_one_along or [row.pid for row in rows] == rollouts, run.words()
    assert [row.num_restarts for row in rows] == [0, 0], run.words()
    run.finish()


def beginnings(run: LightRun) -> dict[str, set[str]]:
    """Game -> how its episodes began."""
    found: dict[str, set[str]] = {}
    for path in (run.paths.run_dir / "episodes").glob("train-*.json"):
        with contextlib.suppress(ValueError):  # it is being written
            episode = json.loads(path.read_text())
            found.setdefault(episode["game"], set()).add(episode["turns"][0]["message"])
    return found


@pytest.mark.slow
def test_replies_that_name_no_command_are_trained_like_any_other(start: Callable[..., LightRun], games_dir: Path) -> None:  # noqa: F811
    """Control tokens, half a character, ids that the tokenizer does not know: episodes end at the turn limit."""
    run = start(games_dir, tw_max_episode_steps=2)
    (run.paths.run_dir / "mute").touch()
    run.wait_training(10)
    run.finish()
    assert "ERROR" not in run.terminal()


def test_a_full_disk_costs_files_and_not_the_run(shared: Callable[[], LightRun]) -> None:
    """Transcripts cannot be written: a file is in their folder's place (to fill a small tmpfs needs rights; tests/soak.py does)."""
    run = shared()
    folder, before = run.paths.run_dir / "episodes", run.row("rollout/0").num_restarts
    run.wait_for(folder.exists, "transcripts")
    for number in itertools.count():
        folder.rename(folder.with_name(f"moved-{number}"))
        with contextlib.suppress(IsADirectoryError):  # a rollout was faster
            folder.write_text("no folder")
            break
    run.wait_training(4)
    run.wait_for(lambda: "no transcript of group" in run.log("rollout"), "its words")
    assert run.row("rollout/0").num_restarts == before, run.words()
    folder.unlink()


@pytest.mark.slow
def test_two_runs_side_by_side(start: Callable[..., LightRun], games_dir: Path) -> None:  # noqa: F811
    first, second = start(games_dir), start(games_dir)
    first.wait_training(3)
    second.wait_training(3)
    first.finish()
    second.wait_training(5)
    assert all(second.row(name).num_restarts == 0 for name in second.table.names)
    second.finish()


@pytest.fixture
def nobodys(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs Python code as the user nobody, in a folder that is his; returns what it prints."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user, with setpriv")
    folder = Path("/tmp") / f"accerl-nobody-{os.getpid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    modules = os.pathsep.join(filter(None, (str(README.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": modules, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder)}
    becomes = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    shows = shown_to_others([Path(sys.base_prefix), Path(sys.prefix), README.parent], tmp_path / "stage")

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [*shows, *becomes, sys.executable, "-c", code, str(folder)]
        return subprocess.run(command, cwd=README.parent, env=environment, capture_output=True, text=True, timeout=200, check=False)

    def output_of(code: str) -> str:
        done = run(code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        probe = run("import subprocess, sys, zmq, accerl_mp.topology; subprocess.run([sys.executable, '-c', ''], check=True)")
        if probe.returncode:
            pytest.skip(f"nobody cannot use this checkout or its Python: {probe.stderr.strip()[-300:]}")
        yield output_of
    finally:
        shutil.rmtree(folder)


def shown_to_others(folders: list[Path], stage: Path) -> list[str]:
    """Words before a command; it then sees `folders` although one above them (such as /root) is shut.

    In a mount namespace of its own an empty folder covers each one that is shut, with what is needed mounted in it again.
    """
    # Of several that are shut the topmost, which comes last.
    shut = {folder: above for folder in folders for above in folder.parents if not above.stat().st_mode & 0o001}
    if not shut:
        return []
    stage.mkdir()
    lines = ["set -e"]
    for number, folder in enumerate(shut):
        (stage / str(number)).mkdir()
        lines.append(f"mount --bind {shlex.quote(str(folder))} {shlex.quote(str(stage / str(number)))}")
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(above))}" for above in set(shut.values())]
    for number, folder in enumerate(shut):
        there = shlex.quote(str(folder))
        lines.append(f"(umask 022; mkdir -p {there}); mount --bind {shlex.quote(str(stage / str(number)))} {there}")
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh"]


def test_another_users_run_of_the_same_folder_name_is_not_touched(nobodys: Callable[..., str]) -> None:
    """The socket folder has the user in its name, and shared files are his alone."""
    code = (
        "from pathlib import Path; from accerl_mp.topology import RunPaths; from accerl_mp.transport.board import Board\n"
        "from accerl_mp.transport import sockets; import sys; paths = RunPaths(Path(sys.argv[1]))\n"
        "Board.create(paths.board); sockets.make_folder(paths); print(paths.board, paths.sockets)"
    )
    board, folder = map(Path, nobodys(code).split())
    try:
        assert (board.stat().st_uid, board.stat().st_mode & 0o077) == (65534, 0)
        assert "-65534-" in folder.name
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        board.unlink()
        folder.rmdir()


@pytest.mark.slow
def test_another_user_runs_it_from_a_checkout_that_is_not_his(nobodys: Callable[..., str]) -> None:
    code = (
        "from pathlib import Path; from tests.games_fixture import make_games; from tests.light_run import LightRun; import sys\n"
        "folder = Path(sys.argv[1]); make_games(folder / 'games'); run = LightRun(folder / 'run', folder / 'games')\n"
        "try:\n    run.wait_training(4); run.finish(); print('trained', run.paths.sockets.exists())\n"
        "finally:\n    run.close()"
    )
    assert nobodys(code).split()[-2:] == ["trained", "False"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a folder read-only")
def test_a_read_only_checkout_in_a_path_with_spaces_prepares_a_run_elsewhere(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    checkout = tmp_path / "a read-only clone"
    checkout.mkdir()
    source = README.parent
    mounts = [["mount", "--bind", str(source), str(checkout)], ["mount", "-o", "remount,bind,ro", str(checkout)]]
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in mounts):
        subprocess.run(["umount", str(checkout)], capture_output=True, check=False)
        pytest.skip("no right to mount")
    try:
        assert not os.access(checkout, os.W_OK)
        flags = ["--model-path", "accerl_mp/presets/demo_model", "--tw-game-dir", str(games_dir), "--log-dir", str(tmp_path / "a run")]
        command = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(tmp_path / "answer"), "--", *flags]
        environment = os.environ | {"PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "a run/args.json").exists()
        run = LightRun(tmp_path / "light run", games_dir, root=checkout)
        try:
            run.wait_training(2)
            run.finish()
        finally:
            run.close()
    finally:
        subprocess.run(["umount", str(checkout)], check=True)


def test_in_a_container_whose_dev_shm_is_small_the_start_says_what_it_needs(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """docker gives 64 MiB by default; in a mount namespace of its own /dev/shm is as small."""
    small = ["unshare", "--mount", "--propagation", "private", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if os.getuid() != 0 or not shutil.which("unshare") or subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a tmpfs in a namespace of its own")
    flags = ["--model-path", "accerl_mp/presets/demo_model", "--tw-game-dir", str(games_dir), "--log-dir", str(tmp_path / "a run")]
    command = [*small, sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(tmp_path / "answer"), "--", *flags]
    environment = os.environ | {"PYTHONPATH": str(README.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--replay-bytes", "104857600"],
        cwd=README.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "/dev/shm has 64 MiB free, but the rings need" in done.stderr + done.stdout
    assert "docker run --shm-size" in done.stderr + done.stdout
    assert not (tmp_path / "a run").exists()


# The table


def test_the_readmes_table_is_the_matrix() -> None:
    assert markdown() in README.read_text(), "PYTHONPATH=. python -m tests.fault_matrix"


def test_every_cell_names_a_test_that_is_there_and_says_when_it_is_played() -> None:
    marks = {cell: marks_of(cell, Path(__file__).parent) for cell in CELLS}
    assert [cell.test for cell in CELLS if marks[cell] is None] == []
    chosen = [cell for cell in CELLS if "marked(cells_of" not in marks[cell]]  # those of this file have the marks of their cells
    assert [cell.test for cell in chosen if ("mark.slow" in marks[cell]) != cell.is_slow] == []
    assert len(CELLS) >= 40
    assert len({cell.case for cell in CELLS}) == len(CELLS)


def test_every_reported_failure_has_its_tests() -> None:
    named = {test for tests in REPORTED.values() for test in tests}
    missing = [
        test for test in named if f"def {test.partition('::')[2]}" not in (Path(__file__).parent / test.partition("::")[0]).read_text()
    ]
    assert not missing
    assert all(REPORTED.values())
