"""A full disk costs files, never the run: every place that writes is known and says who bears it; and real full disks."""

import ast
import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accerl_mp import recovery
from accerl_mp.config import Config
from accerl_mp.launcher.torchrun import Launcher
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.best import BestExport
from accerl_mp.trainer.recording import RecordedStep, Recorder, recorded_shape
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE
from tests.saved_states import save_state
from tests.small_disk import SmallDisk

PACKAGE = Path(__file__).parent.parent / "accerl_mp"
WHO_BEARS_IT = {
    # Before anything has been trained an error is right: it is shown, and nothing is lost.
    "config.py": "at the start; later Recorder",
    "files.py": "its callers",
    "games.py": "at the start",
    "log.py": "at the start; a log of that name is there when a role is started again",
    "launcher/claim.py": "at the start; a restart finds the note there",
    "launcher/prepare.py": "at the start",
    "launcher/tokenizer.py": "at the start",
    "launcher/torchrun.py": "at the start; the log file is there already, and its stream needs no room",
    "launcher/rank.py": "at the start; the log file is there already",
    "launcher/children.py": "the log file is there already",
    "trainer/replayed.py": "a tool that a person runs",
    # While a run trains.
    "launcher/environment.py": "itself",
    "launcher/reached.py": "the supervisor's `without_disk`, the launcher does without",
    "launcher/supervisor.py": "at the start; later `without_disk`",
    "launcher/sweep.py": "the supervisor's `without_disk`",
    "transport/errors.py": "`without_disk` of the supervisor and of rank 0; the launcher",
    "transport/process.py": "the log file is there already",
    "transport/board.py": "/dev/shm, at the start",
    "transport/health.py": "/dev/shm, at the start",
    "transport/sockets.py": "the temporary folder, at the start",
    "ingest/conservation.py": "Ingest._save",
    "ingest/evaluation.py": "Ingest._save",
    "ingest/strikes.py": "itself",
    "ingest/restore.py": "/dev/shm",
    "rollout/records.py": "Worker, which logs 'no transcript of group'",
    "stats/collector.py": "stats/writer.py, which appends its texts to the events",
    "stats/writer.py": "itself: AppendFile",
    "stats/status_file.py": "itself",
    "stats/window_file.py": "itself",
    "trainer/best.py": "BestExport.judge",
    "trainer/checkpoint.py": "export, Saver",
    "trainer/recording.py": "itself",
    "trainer/saving.py": "Saver, with _attempt",
    "trainer/witness.py": "itself",
    "recovery.py": "itself (announce), the launcher (Start.save)",
    "debugging.py": "a person is at it",
}
"""Module: who catches the OSError, or why it may rise."""
_WRITES = {"write_text", "write_bytes", "mkdir", "rename", "symlink_to", "write_atomically", "write_over", "save_file"}


def writers() -> set[str]:
    """Modules of a run that write files."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and writes(node):
                found.add(str(path.relative_to(PACKAGE)))
    return {module for module in found if not module.startswith("tools/")}


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open":
        return any(isinstance(word, ast.Constant) and str(word.value)[:1] in ("w", "a", "x") for word in call.args)
    return name in _WRITES


def test_every_module_that_writes_says_who_bears_a_full_disk() -> None:
    assert writers() - WHO_BEARS_IT.keys() == set(), "who catches its OSError?"
    assert WHO_BEARS_IT.keys() - writers() == set(), "reasons for what is no more"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    small = SmallDisk(tmp_path / "disk", size="256k")
    if not small.is_mounted:
        pytest.skip("no right to mount a tmpfs")
    yield small
    small.close()


@contextlib.contextmanager
def full(disk: SmallDisk) -> Iterator[Path]:
    with disk.full():
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "probe").write_text("x")
        (disk.folder / "probe").unlink()
        yield disk.folder


def test_versions_are_announced_on_a_full_disk(disk: SmallDisk) -> None:
    folder = disk.folder / "run/resume"
    recovery.announce(folder, 9)
    with full(disk):
        for version in (10, 11, 1234):
            recovery.announce(folder, version)
        assert recovery.announced_in(folder) == 1234
    assert recovery.announced_in(folder) == 1234


def test_the_first_version_of_a_run_on_a_full_disk_costs_the_note(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    with full(disk) as folder, caplog.at_level(logging.WARNING):
        recovery.announce(folder, 0)
        assert "cannot note version 0: [Errno 28]" in caplog.text
        assert recovery.announced_in(folder) == -1


def test_a_start_is_noted_on_a_full_disk_over_the_one_before(disk: SmallDisk) -> None:
    """The launcher's note when it starts a trainer again: all processes of that start read it."""
    before, after = recovery.Start("/a/state", 4, 0), recovery.Start("/another folder/of a state with a longer näme", 12345, 1)
    with full(disk) as folder, pytest.raises(OSError, match="No space left"):
        before.save(folder / "resume")
    assert list((disk.folder / "resume").iterdir()) == [], "nothing of what found no room"
    before.save(disk.folder / "resume")
    with full(disk) as folder:
        after.save(folder / "resume")
        assert recovery.Start.load(folder / "resume") == after
    assert recovery.Start.load(disk.folder / "resume") == after


def test_a_start_whose_path_is_longer_than_its_room_is_noted_too(tmp_path: Path) -> None:
    for start in (recovery.Start("é" * 4000, 1), recovery.Start("short", 2), recovery.Start("é" * 4000, 3)):
        start.save(tmp_path)
        assert recovery.Start.load(tmp_path) == start


def test_who_failed_is_known_on_a_full_disk_time_and_again(disk: SmallDisk) -> None:
    """Supervisor: `clear`; a rank dies: `save`; launcher: `load`, `clear`; and so on, without a byte of room."""
    PeerLost.clear(disk.folder / FAILURE_FILE)
    [room] = disk.folder.iterdir()
    inode = room.stat().st_ino
    with full(disk) as folder:
        for restart in range(3):
            lost = PeerLost(f"trainer/{restart}", -9, f"{folder}/logs/trainer-{restart}.log", "x" * (544 - 100 * restart))
            lost.save(folder / FAILURE_FILE)
            assert vars(PeerLost.load(folder / FAILURE_FILE)) == vars(lost), "nothing is left of a longer one before it"
            PeerLost.clear(folder / FAILURE_FILE)
            assert not (folder / FAILURE_FILE).exists()
            assert room.stat().st_ino == inode, "what is given back for a moment somebody else may take"


def test_a_failure_that_cannot_be_noted_says_so(disk: SmallDisk) -> None:
    """The folder's first start on a disk that is full already."""
    with full(disk) as folder:
        with pytest.raises(OSError, match="No space left"):
            PeerLost.clear(folder / FAILURE_FILE)
        with pytest.raises(OSError, match="No space left"):
            PeerLost("trainer/0", None, "").save(folder / FAILURE_FILE)
        assert PeerLost.load(folder / FAILURE_FILE).role == "a process of the run"


def test_a_start_that_cannot_be_noted_ends_the_run_in_words_with_its_states_kept(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher whose note was never there, as on a disk that copies on write."""
    paths = RunPaths(disk.folder / "run")
    paths.run_dir.mkdir()
    Config().save(paths.args)
    state = save_state(paths.resume, 4, Config())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take pytest's own
    launcher = Launcher(paths, [])
    with full(disk):
        assert not launcher._prepare_restart(PeerLost("trainer/1", -9, "trainer-1.log"), 1)
    said = capfd.readouterr().err
    assert "lost trainer/1 (exit code -9)" in said
    assert "cannot start the run again: [Errno 28]" in said
    assert "its saved states are kept for --resume auto" in said
    assert [path.name for path in recovery.states_in(paths.resume)] == [state.name]


def test_a_recorder_that_starts_on_a_full_disk_leaves_the_settings_that_are_there(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    samples = disk.folder / "samples"
    Recorder(samples, Config(), rank=0)
    with full(disk):
        Recorder(samples, Config(), rank=0).add(0, RecordedStep([[]], 0))
    assert Config.load(samples / "args.json") == Config()
    assert "settings of the samples are not recorded: [Errno 28]" in caplog.text


def test_an_end_whose_last_words_find_no_room_is_no_failure() -> None:
    code = "from accerl_mp.transport.process import exit_now\nprint('last words')\nexit_now(0)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=nowhere, stderr=nowhere, check=False, timeout=60)
    assert done.returncode == 0


def test_what_torchrun_says_of_a_failed_rank_needs_no_room() -> None:
    """Its exit code stays its own; Python's for a stream that cannot be flushed is 120."""
    code = (
        "import sys\nfrom accerl_mp.launcher.torchrun import _LogStream\n"
        "sys.stdout = sys.stderr = _LogStream(open('/dev/full', 'wb', buffering=0))\n"
        "print('a rank has failed', flush=True)\nraise RuntimeError('ChildFailedError')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_folder_of_an_older_build_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / recovery.ANNOUNCED).write_text("7\n")
    assert recovery.announced_in(tmp_path) == 7
    recovery.announce(tmp_path, 8)
    assert recovery.announced_in(tmp_path) == 8


def test_a_disk_that_refuses_to_write_over_costs_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that copies on write."""
    recovery.announce(tmp_path, 3)

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    recovery.announce(tmp_path, 4)


def test_samples_that_cannot_be_recorded_end_what_can_be_replayed(disk: SmallDisk) -> None:
    samples = disk.folder / "samples"
    recorder = Recorder(samples, Config(), rank=0)
    recorder.add(0, RecordedStep([[]], 0))
    with full(disk):
        recorder.add(1, RecordedStep([[]], 0))
        assert recorded_shape(samples) == (1, 1)
        assert sorted(path.name for path in samples.iterdir()) == ["args.json", "step-000000-rank-0.samples"]


def test_a_best_export_that_finds_no_room_leaves_the_next_one_whole(disk: SmallDisk) -> None:
    folder = disk.folder
    (folder / "eval").mkdir()
    best = BestExport(folder / "checkpoints", folder / "eval", rank=0, is_resumed=False)

    def ask(eval_id: int) -> None:
        assert best.takes(eval_id)
        best.candidate.mkdir(parents=True, exist_ok=True)
        (best.candidate / "trainer_state.json").write_text(json.dumps({"optimizer_step": eval_id}))
        report = {"eval_id": eval_id, "step": eval_id, "time": best._asked_at + 1, "Eval/WinRate": 0.5}
        (folder / f"eval/step-{eval_id:06d}.json").write_text(json.dumps(report))

    ask(1)
    with full(disk):
        best.judge(1)
    assert json.loads((best.candidate / "trainer_state.json").read_text()) == {"optimizer_step": 1}
    ask(2)
    best.judge(2)
    assert json.loads((folder / "checkpoints/best/trainer_state.json").read_text())["optimizer_step"] == 2
