"""Files and folders whose names are no UTF-8: to the system they are names like any other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.files import read_text, write_atomically, write_over
from accerl_mp.launcher.claim import claim, taken_by_another
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.summary import failure_lines, resume_command, success_lines
from accerl_mp.recovery import Start
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE
from tests.light_run import LightRun
from tests.poisoned_games import poison

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
def test_a_run_in_such_a_folder_plays_games_of_such_names(tmp_path: Path, games_dir: Path) -> None:  # noqa: F811
    games, whole = tmp_path / os.fsdecode(b"games \xff"), os.fsdecode(b"whole \xff.z8")
    shutil.copytree(games_dir, games)
    for ending in (".z8", ".json"):
        (games / "room-1.z8").with_suffix(ending).rename((games / whole).with_suffix(ending))
    bad = poison(games / "room-0.z8", games / os.fsdecode(b"broken \xff.z8"), "damaged")
    run = LightRun(tmp_path / NAME, games)
    try:
        run.wait_for(lambda: "set aside" in run.log("ingest"), "the broken game to be set aside", 120)
        run.wait_training(6)
        run.finish()
        output = (run.paths.run_dir / "output.txt").read_bytes()
        assert output.count(b"game " + os.fsencode(bad) + b" failed 3 times in a row and is set aside, 3 games are left") == 1
        assert b"Traceback" not in output
    finally:
        run.close()


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
