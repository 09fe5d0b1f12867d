"""A run folder in which something else lies where a file or folder belongs: refused in words before anything opens it, or read past."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accerl_mp.files import MOST_BYTES, open_file, read_file, read_text
from accerl_mp.launcher.causes import last_lines
from accerl_mp.launcher.run_folder_check import misplaced
from accerl_mp.launcher.summary import failure_lines, resume_command, success_lines
from accerl_mp.tools.run_folder import RunFolder
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE

FILES = (
    *("lock", "command.txt", "versions.json", "stop", "ended", "status.json", "metrics.jsonl", "strikes.json", "failure.txt"),
    *(".failure.txt", "shared.txt", "books.json", "args.json", "claim.json", "games.json", "reached.json", "tty", "debugger.pid"),
    *("logs/trainer-0.log", "logs/torchrun.log", "resume/current", "resume/announced", "resume/start.json"),
)
FOLDERS = ("logs", "resume", "episodes", "eval", "checkpoints", "samples", "tokenizer")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NODES: dict[str, Callable[[Path], None]] = {"a fifo": _fifo, "a socket": _socket, "a device": _device}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_whatever_lies_in_its_place_is_named_with_the_flag(name: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    place = paths.run_dir / name
    place.parent.mkdir(parents=True)
    others = NODES | ({"a folder": Path.mkdir} if name in FILES else {"a file": Path.touch})
    others["a link to nowhere"] = lambda path: path.symlink_to(tmp_path / "nowhere")
    for put in others.values():
        put(place)
        if put is not others["a link to nowhere"] or name in FOLDERS or "/" not in name:
            [said] = misplaced(paths)
            assert said.startswith(f"--log-dir {paths.run_dir}: {place} is ")
            assert said.endswith("; move it away, or name another folder")
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    place.touch() if name in FILES else place.mkdir()
    assert list(misplaced(paths)) == []


def test_a_run_folder_as_runs_leave_it_is_fine(tmp_path: Path) -> None:
    assert list(misplaced(RunPaths(Path(__file__).parent / "finished_run"))) == []
    assert list(misplaced(RunPaths(tmp_path / "not there yet"))) == []


@pytest.mark.parametrize("put", NODES.values(), ids=NODES)
def test_readers_of_a_folder_wait_for_nobody(put: Callable[[Path], None], tmp_path: Path) -> None:
    """The summary, top and report of a run folder that came from elsewhere."""
    run = RunFolder(tmp_path)
    for name in (*FILES, "eval/step-000001.json", "episodes/train-1.json", "episodes/train-1.trained.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        put(tmp_path / name)
    began = time.monotonic()
    assert (run.flags(), run.status(), run.versions(), run.command(), run.metrics()) == ({}, {}, {}, "", [])
    assert (run.evaluations(), run.restarts(), run.transcript("train-1.json")) == ([], [], None)
    assert success_lines(run.paths, {})
    assert failure_lines(run.paths)
    assert resume_command(run.paths) == ""
    assert "cannot be read" in PeerLost.load(tmp_path / FAILURE_FILE).detail
    assert last_lines(tmp_path / "logs/trainer-0.log") == []
    for read in (read_file, read_text, open_file):
        with pytest.raises(OSError, match=r"regular file|No such device"):
            read(tmp_path / "status.json")
    assert time.monotonic() - began < 60, "a FIFO holds its reader for ever"


def test_a_file_that_no_memory_holds_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(OSError, match="File too large"):
        read_text(tmp_path / "huge")
