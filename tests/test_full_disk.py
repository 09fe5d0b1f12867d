"""A full disk costs files, never the run: every place that writes is known and says who bears it; and real full disks."""

import ast
import contextlib
import errno
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accerl_mp import recovery
from accerl_mp.config import Config
from accerl_mp.trainer.best import BestExport
from accerl_mp.trainer.recording import RecordedStep, Recorder, recorded_shape

PACKAGE = Path(__file__).parent.parent / "accerl_mp"
WHO_BEARS_IT = {
    # Before anything has been trained an error is right: it is shown, and nothing is lost.
    "config.py": "at the start, or by Recorder at the start",
    "log.py": "at the start; a log of that name is there when a role is started again",
    "launcher/prepare.py": "at the start",
    "launcher/tokenizer.py": "at the start",
    "launcher/torchrun.py": "at the start",
    "launcher/rank.py": "at the start",
    "launcher/children.py": "the log file is there already",
    "trainer/replayed.py": "a tool that a person runs",
    # While a run trains.
    "launcher/supervisor.py": "at the start; later `without_disk`",
    "launcher/sweep.py": "the supervisor's `without_disk`",
    "transport/errors.py": "the supervisor's `without_disk`",
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
    "stats/writer.py": "itself: AppendFile, write_status",
    "trainer/best.py": "BestExport.judge",
    "trainer/checkpoint.py": "export, Saver",
    "trainer/recording.py": "itself",
    "trainer/saving.py": "Saver, with _attempt",
    "trainer/witness.py": "itself",
    "recovery.py": "itself (announce), its callers (write_atomically)",
    "debugging.py": "a person is at it",
}
"""Module: who catches the OSError, or why it may rise."""
_WRITES = {"write_text", "write_bytes", "mkdir", "rename", "write_atomically", "save_file"}


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
def full_disk(tmp_path: Path) -> Iterator[Callable[[], contextlib.AbstractContextManager[Path]]]:
    """A small tmpfs at `tmp_path / "disk"`; full in the block."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a tmpfs")

    @contextlib.contextmanager
    def fill() -> Iterator[Path]:
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(OSError, match="No space left"):
            (folder / "probe").write_text("x")
        (folder / "probe").unlink()
        yield folder
        (folder / "ballast").unlink()

    yield fill
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_versions_are_announced_on_a_full_disk(full_disk: Callable[[], contextlib.AbstractContextManager[Path]], tmp_path: Path) -> None:
    recovery.announce(tmp_path / "disk/run/resume", 9)
    with full_disk() as disk:
        for version in (10, 11, 1234):
            recovery.announce(disk / "run/resume", version)
        assert recovery.announced_in(disk / "run/resume") == 1234
    assert recovery.announced_in(tmp_path / "disk/run/resume") == 1234


def test_the_first_version_of_a_run_on_a_full_disk_costs_the_note(
    full_disk: Callable[[], contextlib.AbstractContextManager[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk() as disk, caplog.at_level(logging.WARNING):
        recovery.announce(disk, 0)
        assert "cannot note version 0: [Errno 28]" in caplog.text
        assert recovery.announced_in(disk) == -1


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


def test_samples_that_cannot_be_recorded_end_what_can_be_replayed(full_disk: Callable[[], contextlib.AbstractContextManager[Path]]) -> None:
    with full_disk() as disk:
        (disk / "ballast").unlink()
        recorder = Recorder(disk / "samples", Config(), rank=0)
        recorder.add(0, RecordedStep([[]], 0))
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        recorder.add(1, RecordedStep([[]], 0))
        assert recorded_shape(disk / "samples") == (1, 1)
        assert sorted(path.name for path in (disk / "samples").iterdir()) == ["args.json", "step-000000-rank-0.samples"]


def test_a_best_export_that_finds_no_room_leaves_the_next_one_whole(
    full_disk: Callable[[], contextlib.AbstractContextManager[Path]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (disk / "eval").mkdir()
    best = BestExport(disk / "checkpoints", disk / "eval", rank=0, is_resumed=False)

    def ask(eval_id: int) -> None:
        assert best.takes(eval_id)
        best.candidate.mkdir(parents=True, exist_ok=True)
        (best.candidate / "trainer_state.json").write_text(json.dumps({"optimizer_step": eval_id}))
        report = {"eval_id": eval_id, "step": eval_id, "time": best._asked_at + 1, "Eval/WinRate": 0.5}
        (disk / f"eval/step-{eval_id:06d}.json").write_text(json.dumps(report))

    ask(1)
    with full_disk():
        best.judge(1)
    assert json.loads((best.candidate / "trainer_state.json").read_text()) == {"optimizer_step": 1}
    ask(2)
    best.judge(2)
    assert json.loads((disk / "checkpoints/best/trainer_state.json").read_text())["optimizer_step"] == 2
