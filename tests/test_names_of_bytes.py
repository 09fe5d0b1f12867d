"""Files and folders whose names are no UTF-8: to the system they are names like any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.config import Config
from accerl_mp.files import read_text, write_atomically, write_over
from accerl_mp.launcher.claim import claim, taken_by_another
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.summary import failure_lines, resume_command, success_lines
from accerl_mp.path_checks import game_folder
from accerl_mp.recovery import Start
from accerl_mp.stats import events
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE
from tests.light_run import LightRun

NAME = os.fsdecode(b"a run \xff\xfe of M\xfcller")
ROOT = Path(__file__).parent.parent


def test_notes_hold_them(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / NAME)
    paths.run_dir.mkdir()
    assert len(paths.run_id) == 10
    assert claim(paths, is_preparing=True) == taken_by_another(paths) == ""
    write_atomically(paths.run_dir / "note", NAME)
    write_over(paths.run_dir / "spare", NAME, 64)
    write_over(paths.run_dir / "spare", NAME, 64)
    assert [read_text(paths.run_dir / name, errors="surrogateescape").strip() for name in ("note", "spare")] == [NAME, NAME]
    Start(str(paths.resume / "step-1"), 1).save(paths.resume)
    assert Start.load(paths.resume).state == str(paths.resume / "step-1")
    lost = PeerLost("trainer/0", 1, str(paths.log("trainer", 0)), f"no room for {NAME}")
    lost.save(paths.run_dir / FAILURE_FILE)
    assert vars(PeerLost.load(paths.run_dir / FAILURE_FILE)) == vars(lost)
    Reached(1, 1, 1).save(paths.reached)
    (paths.run_dir / "command.txt").write_text(f"bash launch.sh --log-dir '{NAME}'\n", errors="surrogateescape")
    assert str(paths.run_dir) in resume_command(paths)
    assert any(NAME in line for line in success_lines(paths, {}) + failure_lines(paths))


def test_tensorboard_gets_them_as_letters() -> None:
    [text, *hparams] = events.flag_events({"tw_game_dir": NAME, "seed": 1}, started_s=1.0)
    assert "a run \ufffd\ufffd of M\ufffdller" in text.summary.value[0].tensor.string_val[0].decode()
    assert events.as_records([text, *hparams])


def test_a_terminal_and_a_log_get_their_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from accerl_mp import log; from accerl_mp.topology import RunPaths; import logging\n"
        "log.setup(RunPaths(Path(sys.argv[1])), 'ingest', 0, 'info')\n"
        "logging.getLogger('accerl_mp.x').warning('game %s is set aside', sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / NAME)], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )
    expected = b"game " + os.fsencode(tmp_path / NAME) + b" is set aside\n"
    assert expected in done.stderr
    assert expected in RunPaths(tmp_path / NAME).log("ingest", 0).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::Warning:jericho")
def test_a_run_in_such_a_folder_trains(tmp_path: Path, games_dir: Path) -> None:  # noqa: F811
    run = LightRun(tmp_path / NAME, games_dir)
    try:
        run.wait_training(6)
        run.finish()
        assert b"Traceback" not in (run.paths.run_dir / "output.txt").read_bytes()
    finally:
        run.close()


@pytest.mark.parametrize("game", ["broken \udcff.z8", "games \udcff/a.z8"])
def test_games_of_such_names_are_refused(tmp_path: Path, game: str) -> None:
    """Messages between processes carry texts."""
    for ending in (".z8", ".json"):
        path = (tmp_path / game).with_suffix(ending)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    [said] = game_folder("--tw-game-dir", str(tmp_path), Config())
    assert said.startswith(f"--tw-game-dir {tmp_path}: 1 games have names that are no UTF-8 (")
    assert said.isprintable()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_preparing_such_a_run_tells_launch_sh_its_bytes(tmp_path: Path, games_dir: Path) -> None:  # noqa: F811
    folder = tmp_path / NAME
    flags = ["--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(games_dir), "--placement", "cpu"]
    command = [
        sys.executable,
        "-m",
        "accerl_mp.launcher.prepare",
        "--answer",
        str(tmp_path / "answer"),
        "--",
        *flags,
        "--log-dir",
        str(folder),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(["bash", "-c", '. ./answer; printf %s "$RUN_DIR"'], cwd=tmp_path, capture_output=True, check=True).stdout
    assert shown == os.fsencode(folder)
    assert (folder / "args.json").exists()
