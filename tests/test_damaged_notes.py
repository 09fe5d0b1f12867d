"""Every file that a start reads of an earlier one, damaged in every way: the older whole state is taken, in words; never an exception."""

import contextlib
import json
import math
import mmap
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accerl_mp import recovery
from accerl_mp.config import Config, resolve
from accerl_mp.ingest.dealer import Dealer, Schedule
from accerl_mp.ingest.strikes import StrikesFile
from accerl_mp.launcher.resuming import plan_restart, plan_start
from accerl_mp.launcher.summary import failure_lines, success_lines
from accerl_mp.launcher.sweep import note_foreign, sweep
from accerl_mp.recovery import Start, StateError
from accerl_mp.stats.status import Status
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import HealthTable
from tests.saved_states import FILES, save_state

NEWEST, OLDER = recovery.folder_name(2, 2), recovery.folder_name(1, 1)


def _keep(size: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def _put(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _node(kind: int) -> Callable[[Path], None]:
    """Who opens a FIFO waits for the other side."""

    def replace(path: Path) -> None:
        path.unlink()
        os.mknod(path, kind | 0o600)

    return replace


def _device(path: Path) -> None:
    """One that can be read for ever."""
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink, "empty": _keep(0), "one byte": _keep(1), "half": _half, "zeros": _zeros, "flip": _flip,
    "a fifo": _node(stat.S_IFIFO), "a socket": _node(stat.S_IFSOCK), "a device": _device,
    "bytes": _put(bytes(range(256)) * 4), "a folder": _folder, "json null": _put(b"null"), "json list": _put(b"[]"),
    "json map": _put(b"{}"), "json number": _put(b"7e999"), "json text": _put(b'"format"'), "json nested": _put(b"[" * 100_000),
    "json of another": _put(b'{"format": 2, "files": {}, "state": 3, "strikes": 5, "set_aside": {}, "step": "x", "eval_first": []}'),
    "json of wrong entries": _put(b'{"strikes": [["train", 1e999, 1]], "set_aside": [null], "step": null, "state": []}'),
}  # fmt: skip
NOTES = ("resume/current", "resume/announced", "resume/start.json", "strikes.json", "failure.txt", "status.json", "shared.txt")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    typed = Config.from_flat({"model_path": str(tmp_path / "model"), "log_dir": str(tmp_path / "run"), "resume": "auto"})
    return resolve(typed, num_gpus=0, log_dir="")


@pytest.fixture
def run_dir(config: Config, tmp_path: Path) -> Path:
    """Of a run that was killed: two states, and every note that a later start reads."""
    paths = RunPaths(tmp_path / "run")
    for step in (1, 2):
        save_state(paths.resume, step, config)
    recovery.announce(paths.resume, 4)
    Start(str(paths.resume / OLDER), 2, 0).save(paths.resume)
    PeerLost("trainer/1", -9, "its log", "killed").save(paths.run_dir / "failure.txt")
    paths.strikes.write_text(json.dumps({"strikes": [["train", 0, 2]], "set_aside": [1]}))
    status = {
        "step": 2,
        "version": 2,
        "round": 2,
        "started": 1.0,
        "training_s": 3.0,
        "episodes": 8,
        "eval_first": {"win_rate": 0.5, "step": 0},
    }
    (paths.run_dir / "status.json").write_text(json.dumps(status))
    (paths.run_dir / "shared.txt").write_text("/dev/shm/psm_gone\n")
    (paths.run_dir / "command.txt").write_text("bash launch.sh\n")
    return paths.run_dir


def read_all(run_dir: Path, config: Config) -> tuple[Start, list[str]]:
    """What each process of a start does with them. (the start, warnings of the launcher)."""
    paths = RunPaths(run_dir)
    with contextlib.suppress(StateError):
        plan_restart(paths, num_restarts=1)
    PeerLost.load(paths.run_dir / "failure.txt")
    failure_lines(paths)
    sweep(paths)
    start, problems, warnings = plan_start(config)
    assert problems == []
    with contextlib.suppress(OSError):  # a folder stands in its place
        start.save(paths.resume)
        assert Start.load(paths.resume) == start
    recovery.announce(paths.resume, start.first_version)
    status = Status(run_dir)
    status.count_episode()
    status.close_round(number=1, step=3, version=1, round_s=1.0, values={}, sentence="")
    status.add_evaluation(step=3, version=1, time_s=2.0, values={})
    with contextlib.suppress(IsADirectoryError):
        status.save()
    success_lines(paths, {})
    StrikesFile(paths.strikes, Dealer(Schedule(seed=0, num_games=3, group_size=1), 1), start).save_if_changed()
    return start, warnings


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", NOTES)
def test_a_damaged_note_costs_no_state_and_no_exception(run_dir: Path, config: Config, file: str, damage: str) -> None:
    DAMAGES[damage](run_dir / file)
    start, warnings = read_all(run_dir, config)
    assert start.state == str(run_dir / "resume" / NEWEST)
    is_read = file in ("resume/current", "resume/announced") and damage != "missing"
    if file == "resume/announced":
        assert start.first_version >= 3, "above every version that a state has"
        is_read &= damage != "half"  # blanks only are gone
    else:
        assert start.first_version == 5
    assert ["it is left out" in warning and str(run_dir / file) in warning for warning in warnings] == [True] * is_read, warnings


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["state.json", *FILES])
def test_a_state_with_a_damaged_file_is_left_out(run_dir: Path, config: Config, file: str, damage: str) -> None:
    DAMAGES[damage](run_dir / "resume" / NEWEST / file)
    start, warnings = read_all(run_dir, config)
    assert start.state == str(run_dir / "resume" / OLDER)
    assert start.first_version == 5
    assert len(warnings) == 1
    assert NEWEST in warnings[0]
    assert warnings[0].endswith("it is left out")


def _spoilt(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """Valid JSON, each with one key that is gone or holds something else."""
    others = [None, [], {}, "x", -1, 10**30, True, [[1]], {"x": None}]
    gone = [(f"no {key}", {name: value for name, value in content.items() if name != key}) for key in content]
    return gone + [(f"{key}: {other}", content | {key: other}) for key in content for other in others if other != content[key]]


def test_a_state_json_with_any_key_gone_or_of_another_kind_is_left_out(run_dir: Path, config: Config) -> None:
    file = run_dir / "resume" / NEWEST / "state.json"
    content = json.loads(file.read_text())
    assert {"files", "identity", "groups", "num_ranks", "next_version"} <= content.keys()
    for what, spoilt in _spoilt(content):
        file.write_text(json.dumps(spoilt))
        start, problems, warnings = plan_start(config)
        assert (start.state, problems) == (str(run_dir / "resume" / OLDER), []), what
        assert [warning.endswith("it is left out") for warning in warnings] == [True], what
    file.write_text(json.dumps(content))
    assert plan_start(config)[0].state == str(run_dir / "resume" / NEWEST), "else nothing was shown"


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    """Of every entry in it, nested ones too."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*place, key) for key, _ in entries] + [found for key, entry in entries for found in _places(entry, (*place, key))]


def _with(content: Any, place: tuple, put: Any) -> Any:
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = put
    return copy


ABSURD = (None, {}, "x", [[1]], {"x": None}, True, -5, 10**30, 1.5, float("nan"))


def _is_as_good(place: tuple, put: Any) -> bool:
    """What a state may hold there, too."""
    if place[-1] in ("all_tokens", "all_samples"):
        return type(put) in (int, float) and math.isfinite(put)
    if place in (("strikes",), ("identity",)):
        return put == {"strikes": None, "identity": {}}[place[0]]
    is_text = place[0] == "identity" or (place[:2] == ("strikes", "strikes") and len(place) == 4 and place[-1] == 0)
    return (is_text and isinstance(put, str)) or (place[-1] == "is_evaluating" and put is True)


def test_a_state_json_with_a_valid_checksum_and_wrong_fields_is_left_out_and_names_one(run_dir: Path, config: Config) -> None:
    """Another build's, or one that somebody has made."""
    file = run_dir / "resume" / NEWEST / "state.json"
    content = recovery.SavedState.open(file.parent).content
    content["groups"]["done_above"], content["strikes"] = [2], {"strikes": [["train", 0, 2]], "set_aside": [1]}
    content["trainer"] |= {"round": 1, "version": 2, "num_bad_in_a_row": 0, "all_tokens": 1.0, "all_samples": 2.0, "is_evaluating": False}
    file.write_text(recovery.state_text(content))
    assert plan_start(config)[0].state == str(file.parent), "else nothing was shown"
    places = [place for place in _places(content) if place[0] != "time"]
    assert len(places) > 30
    for place in places:
        for put in ABSURD:
            if _is_as_good(place, put):
                continue
            spoilt = _with(content, place, put)
            file.write_text(recovery.state_text(spoilt))
            start, problems, warnings = plan_start(config)
            assert (start.state, problems) == (str(run_dir / "resume" / OLDER), []), (place, put)
            assert [warning.endswith("it is left out") for warning in warnings] == [True], (place, put)
            if len(place) == 1 and place != ("format",) and put != {}:
                assert f"holds what no state does ({place[0]}: " in warnings[0], (place, put)
    for name in ("../outside", "a/b", "", ".", "a\0b"):
        file.write_text(recovery.state_text(content | {"files": content["files"] | {name: [0, 0]}}))
        assert plan_start(config)[0].state == str(run_dir / "resume" / OLDER)


@pytest.mark.parametrize("noted", ["999999999999", "9999999999", "999999999999 00000000", "4", "0", "5 1234abcd", "-3", "4 x", "\u0664"])
def test_a_number_that_was_never_announced_is_not_believed(run_dir: Path, config: Config, noted: str) -> None:
    """Cut, changed or absurd: never below what the states say, never beyond what samples can carry."""
    paths = RunPaths(run_dir)
    (paths.resume / "announced").write_text(noted)
    start, _, warnings = plan_start(config)
    assert 3 <= start.first_version <= 5
    assert "is no whole note" in warnings[0]
    recovery.announce(paths.resume, start.first_version)
    assert recovery.announced_in(paths.resume) == start.first_version
    assert plan_start(config)[2] == []


def test_a_folder_with_the_name_of_an_absurd_version_is_no_state(run_dir: Path, config: Config) -> None:
    for name in ("step-000003-version-999999999999", f"step-000003-version-{'9' * 5000}"[:200], f"step-{'9' * 200}-version-000009"):
        (run_dir / "resume" / name).mkdir()
    (run_dir / "resume" / "announced").unlink()
    start, _, warnings = plan_start(config)
    assert (start.state, start.first_version, warnings) == (str(run_dir / "resume" / NEWEST), 3, [])


def test_a_state_that_is_there_is_saved_although_the_pointer_to_it_cannot_be_written(
    run_dir: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder is in its place, or the disk has no room for it: a start finds the state by its name."""
    from accerl_mp.trainer import saving
    from accerl_mp.trainer.state import Progress

    saver = object.__new__(saving.Saver)
    saver._folder, saver._config, saver._identity, saver._ranks = (
        run_dir / "resume",
        config,
        recovery.identity(config),
        SimpleNamespace(size=1),
    )
    older = run_dir / "resume" / NEWEST
    _folder(run_dir / "resume" / "current")
    temporary = run_dir / "resume" / ".new"
    shutil.copytree(older, temporary)
    content = recovery.SavedState.open(older).content
    part = {"reason": "", "files": content["files"], "done": [], "next": 3, "strikes": None}
    target = run_dir / "resume" / recovery.folder_name(3, 3)
    assert saver._conclude(temporary, target, Progress(step=3, version=3), [part]) == ""
    assert "current cannot be written" in caplog.text
    assert recovery.newest_whole(run_dir / "resume")[0].folder == target


def test_a_state_that_was_written_without_its_files_is_not_whole(run_dir: Path, config: Config) -> None:
    file = run_dir / "resume" / NEWEST / "state.json"
    content = recovery.SavedState.open(file.parent).content
    for left_out in (list(content["files"]), [".metadata"], ["rank-0.msgpack"]):
        files = {name: entry for name, entry in content["files"].items() if name not in left_out}
        file.write_text(recovery.state_text(content | {"files": files}))
        start, _, warnings = plan_start(config)
        assert start.state == str(run_dir / "resume" / OLDER)
        assert "was not written: it is left out" in warnings[0]


def test_where_every_state_is_damaged_nothing_begins_anew(run_dir: Path, config: Config) -> None:
    for name in (NEWEST, OLDER):
        (run_dir / "resume" / name / "state.json").write_text("{}")
    _, problems, _ = plan_start(config)
    assert problems[0].count("cannot be read") == 2
    with pytest.raises(StateError, match=r"no saved state in .* can be used"):
        plan_restart(RunPaths(run_dir), num_restarts=1)


def test_a_run_whose_own_beginning_is_not_known_is_not_started_again_from_another(run_dir: Path) -> None:
    """It went on from another run's state and has none of its own yet: from the model's first weights it would be another run."""
    paths = RunPaths(run_dir)
    other = run_dir.parent / "another" / OLDER
    shutil.copytree(paths.resume / OLDER, other)
    for state in recovery.states_in(paths.resume):
        shutil.rmtree(state)
    Start(str(other), 2, 0).save(paths.resume)
    assert plan_restart(paths, num_restarts=1)[0].state == str(other)
    for spoil in (lambda: (other / "state.json").write_text("{}"), lambda: (paths.resume / "start.json").write_text("{}")):
        spoil()
        with pytest.raises(StateError):
            plan_restart(paths, num_restarts=1)


def test_a_damaged_list_of_shared_memory_removes_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    (tmp_path / "photos").mkdir()
    cut = ["/dev", "/dev/shm", "/dev/shm/", "/", ".", str(tmp_path / "thesis.txt"), str(tmp_path / "photos")]
    outside = f"/dev/shm/psm_/../../..{tmp_path}/thesis.txt"
    (run_dir / "shared.txt").write_text("\n".join([*cut, outside]))
    assert sweep(RunPaths(run_dir)) == []
    assert (tmp_path / "thesis.txt").exists()
    assert (tmp_path / "photos").exists()


@pytest.mark.parametrize("name", ["psm_", "sem.mp-", "vllm_dist_"])
def test_shared_memory_of_libraries_goes_with_the_run(tmp_path: Path, name: str) -> None:
    """Of processes that were killed: what they had mapped under such a name, and nothing else."""
    file, other = (Path(f"/dev/shm/{name}accerl-test-{os.getpid()}{ending}") for ending in ("", "-other"))
    try:
        for each in (file, other):
            each.write_bytes(bytes(4096))
        with file.open("r+b") as content, mmap.mmap(content.fileno(), 4096):
            note_foreign(RunPaths(tmp_path), [os.getpid()])
        sweep(RunPaths(tmp_path))
        assert (file.exists(), other.exists()) == (False, True)
    finally:
        for each in (file, other):
            each.unlink(missing_ok=True)


def gpu_files(pid: int) -> list[Path]:
    """Names as torch and CUDA give them."""
    return [Path("/dev/shm", name) for name in (f"torch_{pid}_1867018562_0", f"cuda.shm.0.{pid:x}.1", f"__KMP_REGISTERED_LIB_{pid}_0")]


EXITS = """
import os, sys
from pathlib import Path
from accerl_mp.transport.process import exit_now
for name in (f"torch_{os.getpid()}_1867018562_0", f"cuda.shm.0.{os.getpid():x}.1", f"__KMP_REGISTERED_LIB_{os.getpid()}_0"):
    Path("/dev/shm", name).touch()
if sys.argv[1] == "exits":
    exit_now(0)
os._exit(9)
"""


@pytest.mark.parametrize("way", ["exits", "is killed"])
def test_what_a_gpu_process_shares_goes_with_it(run_dir: Path, way: str) -> None:
    """The torch and CUDA of a rank that hands out its memory name files after it. Those of a living process stay."""
    paths, own = RunPaths(run_dir), gpu_files(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", EXITS, way])
    files = gpu_files(child.pid)
    table = HealthTable.create(paths.health, ["trainer/0", "trainer/1"])
    try:
        for row, pid in enumerate((child.pid, os.getpid())):
            table.set_word(row, "pid", pid)
        child.wait(60)
        assert [file.exists() for file in files] == [way == "is killed"] * 3
        for file in own:
            file.touch()
        note_foreign(paths, [os.getpid()])
        assert set(sweep(paths)) == {paths.health, *(files if way == "is killed" else [])}
        assert not any(file.exists() for file in files)
        assert all(file.exists() for file in own)
    finally:
        for file in files + own + [paths.health]:
            file.unlink(missing_ok=True)


def test_who_is_gone_is_known_by_the_name_of_what_it_shared(run_dir: Path) -> None:
    """vLLM's processes are no rows of the table: what was noted of them counts."""
    paths = RunPaths(run_dir)
    child = subprocess.Popen(["sleep", "60"])
    files = gpu_files(child.pid)
    try:
        for file in files:
            file.touch()
        note_foreign(paths, [child.pid])
        assert sweep(paths) == []
        assert all(file.exists() for file in files)
        child.kill()  # as torchrun does with a rank that hangs, after the supervisor has swept
        child.wait(60)
        assert set(sweep(paths)) == set(files)
    finally:
        child.kill()
        for file in files:
            file.unlink(missing_ok=True)


def test_what_was_noted_of_one_stays_noted_when_another_comes(run_dir: Path) -> None:
    """Two engines: the first one's file counts though its process lives while the second one's is noted."""
    paths = RunPaths(run_dir)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    files = [gpu_files(child.pid)[1] for child in children]
    try:
        for child, file in zip(children, files, strict=True):
            file.touch()
            note_foreign(paths, [child.pid])
        for child in children:
            child.kill()
            child.wait(60)
        assert set(sweep(paths)) == set(files)
    finally:
        for child, file in zip(children, files, strict=True):
            child.kill()
            file.unlink(missing_ok=True)


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(1023), bytes(1024), bytes(4096), b"\xff" * 4104], ids=len)
def test_a_damaged_table_or_one_of_another_version_hides_nothing_else(run_dir: Path, content: bytes) -> None:
    paths = RunPaths(run_dir)
    paths.health.write_bytes(content)
    (run_dir / "shared.txt").write_text(f"/dev/shm/psm_{'x' * 300}\n")
    try:
        assert sweep(paths) == [paths.health]
    finally:
        paths.health.unlink(missing_ok=True)


@pytest.mark.skipif(os.getuid() != 0, reason="makes a file that is another user's")
def test_what_another_user_has_named_alike_stays(run_dir: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait(60)
    paths, file = RunPaths(run_dir), gpu_files(child.pid)[0]
    table = HealthTable.create(paths.health, ["trainer/0"])
    table.set_word(0, "pid", child.pid)
    try:
        file.touch()
        os.chown(file, 12345, 12345)
        assert sweep(paths) == [paths.health]
        assert file.exists()
    finally:
        file.unlink(missing_ok=True)
        paths.health.unlink(missing_ok=True)
