"""Two starts with one run folder, in every order: the younger is turned away in words and touches nothing of the first one's."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp.config import Config
from accerl_mp.launcher import claim as claims
from accerl_mp.launcher import prepare, torchrun
from accerl_mp.launcher.claim import LAUNCH_PID, claim, is_preparing, taken_by_another
from accerl_mp.launcher.sweep import lock
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE
from tests import chat_fixture
from tests.live_run import LiveRun

ROOT = Path(__file__).parent.parent
RUN_FLAGS = """
--placement cpu --fsdp-world-size 2 --num-rollout-workers 2 --rollout-batch-size 4 --keep-zero-std-groups --tw-max-episode-steps 3
--tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8 --max-policy-lag 0 --train-packing padded --batch-size 6
--grad-accum-steps 1 --sync-every-optimizer-steps 2 --max-steps 6 --lr-warmup-steps 1
"""


@contextmanager
def a_launch_sh() -> Iterator[int]:
    """A process that stands for launch.sh; its pid."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


@pytest.fixture
def other(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Another launch.sh, which has the folder; this process belongs to a second one."""
    with a_launch_sh() as first, a_launch_sh() as own:
        monkeypatch.setenv(LAUNCH_PID, str(first))
        assert claim(paths, is_preparing=False) == ""
        monkeypatch.setenv(LAUNCH_PID, str(own))
        yield first


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_of_many_that_come_at_once_one_gets_the_folder_and_the_others_are_told_whose_it_is(paths: RunPaths) -> None:
    code = (
        "import sys; from pathlib import Path; from accerl_mp.launcher.claim import claim; from accerl_mp.topology import RunPaths\n"
        "print('up', flush=True); sys.stdin.readline(); print(claim(RunPaths(Path(sys.argv[1])), is_preparing=True)); sys.stdin.read()"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(paths.run_dir)], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for start in starts:
            assert start.stdout
            assert start.stdout.readline() == "up\n"
        for start in starts:
            assert start.stdin
            start.stdin.write("\n")
            start.stdin.flush()
        said = [start.stdout.readline().strip() for start in starts if start.stdout]
        assert is_preparing(paths)
    finally:
        for start in starts:
            start.communicate()
    [winner] = [start.pid for start, text in zip(starts, said, strict=True) if not text]
    refused = [text for text in said if text]
    assert len(refused) == 3
    for text in refused:
        assert text.startswith(f"--log-dir {paths.run_dir}: another run has this folder (launch.sh, pid {winner}); ")
        assert f"kill -TERM {winner}" in text
    assert not is_preparing(paths)
    assert taken_by_another(paths) == "", "it has ended, and nobody had to remove anything"


def test_the_ranks_of_the_same_launch_are_let_in_again_on_a_full_disk_too(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_launch_sh() as own:
        monkeypatch.setenv(LAUNCH_PID, str(own))
        assert claim(paths, is_preparing=True) == ""

        def no_room(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(claims, "write_atomically", no_room)
        for _ in range(3):
            assert claim(paths, is_preparing=False) == ""


def test_an_ended_launch_has_no_folder_whoever_has_its_pid_now(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_launch_sh() as first:
        monkeypatch.setenv(LAUNCH_PID, str(first))
        claim(paths, is_preparing=False)
        monkeypatch.delenv(LAUNCH_PID)
        assert taken_by_another(paths)
        noted = json.loads(paths.claim.read_text())
        paths.claim.write_text(json.dumps(noted | {"launch": [first, noted["launch"][1] - 1]}))
        assert taken_by_another(paths) == "", "another process of that pid"
        paths.claim.write_text(json.dumps(noted))
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert taken_by_another(paths) == "", "a zombie"
    for damaged in (b"", b"[1]", b"{}", b"[" * 100_000, b'{"launch": ["x", 1]}', b'{"launch": [true, true]}', bytes(range(256))):
        paths.claim.write_bytes(damaged)
        assert taken_by_another(paths) == ""
        assert claim(paths, is_preparing=False) == ""


def test_a_look_at_the_folder_costs_the_first_run_nothing(paths: RunPaths) -> None:
    """A second start holds the lock for a moment, in which the first one's launcher or supervisor may want it."""
    held = lock(paths)
    assert held
    threading.Timer(0.3, held.close).start()
    assert claim(paths, is_preparing=False) == ""
    held = lock(paths)
    assert held
    threading.Timer(0.3, held.close).start()
    taken = lock(paths, patience_s=5)
    assert taken
    taken.close()


def test_a_supervisor_that_has_outlived_its_launch_keeps_the_folder(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_LOCK_S", 0.1)
    held = lock(paths)
    assert held
    with held:
        said = claim(paths, is_preparing=True)
    assert said.startswith(f"--log-dir {paths.run_dir}: a run goes on in this folder")
    assert not paths.claim.exists()


def test_a_launcher_without_the_folder_starts_no_rank(
    paths: RunPaths, other: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Config().save(paths.args)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take pytest's own
    monkeypatch.setattr(torchrun, "_start_torchrun", lambda *_: pytest.fail("ranks would attach to the first run's rings"))
    assert torchrun.Launcher(paths, []).run() == 2
    assert f"launch.sh: the run is not started: --log-dir {paths.run_dir}: another run has" in capfd.readouterr().err


def test_a_launcher_that_was_left_behind_writes_nothing_into_a_folder_that_another_start_has(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its launch.sh was killed; a rank dies, and the run would be started again: from what, is written down for all to read."""
    Config().save(paths.args)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take pytest's own
    with a_launch_sh() as first, a_launch_sh() as second:
        monkeypatch.setenv(LAUNCH_PID, str(first))
        claim(paths, is_preparing=True)
        launcher, before, lock_file = torchrun.Launcher(paths, []), {}, str(paths.run_dir / "lock")

        def lose_a_rank(*_: object) -> int:
            PeerLost("trainer/0", -9, "trainer-0.log").save(paths.run_dir / FAILURE_FILE)
            os.kill(first, signal.SIGKILL)
            os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
            monkeypatch.setenv(LAUNCH_PID, str(second))
            monkeypatch.setattr(claims, "_lives", lambda process: process[0] == second)
            assert claim(paths, is_preparing=False) == ""
            monkeypatch.setenv(LAUNCH_PID, str(first))
            before.update(contents(paths.run_dir))
            before.pop(lock_file)
            return os.posix_spawn("/bin/false", ["false"], {})

        monkeypatch.setattr(torchrun, "_start_torchrun", lose_a_rank)
        assert launcher.run() == 1
    assert f"the run is not started: --log-dir {paths.run_dir}: another run has this folder" in capfd.readouterr().err
    assert {name: noted for name, noted in contents(paths.run_dir).items() if name != lock_file} == before


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("delay", ["none", "until the first prepares its folder", "until the first trains"])
def test_of_two_whole_starts_one_trains_as_if_it_were_alone(delay: str, tmp_path: Path, games_dir: Path) -> None:  # noqa: F811
    flags = [*RUN_FLAGS.split(), "--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(games_dir)]
    folder = tmp_path / "run"
    first = LiveRun(folder, flags, output=tmp_path / "first.txt", python=ROOT / "tests/fake_run.sh")
    runs = [first]
    try:
        if delay == "until the first prepares its folder":
            first.wait_for(first.paths.claim.exists, "its claim", every_s=0.001)
        elif delay == "until the first trains":
            first.attach()
            first.wait_for(lambda: first.board.get("optimizer_step") >= 1, "a step")
        more = ["--resume", "auto"] if delay == "until the first trains" else []
        runs.append(LiveRun(folder, [*flags, *more], output=tmp_path / "second.txt", python=ROOT / "tests/fake_run.sh"))
        codes = [run.process.wait(300) for run in runs]
        texts = [run.output.read_text() for run in runs]
        assert sorted(codes) == [0, 2], texts
        assert delay == "none" or codes == [0, 2], texts
        refused = texts[codes.index(2)]
        assert re.search(r"--log-dir .*: (another run has this folder|already holds a run)", refused), refused
        assert "Traceback" not in refused
        assert "The run has finished: 6 optimizer steps" in texts[codes.index(0)]
        log = first.log("trainer") + first.log("supervisor")
        assert not re.search(r"ERROR|WARNING|Traceback", log), log
        assert (folder / "command.txt").read_text().count("\n") == 1, "the refused one has left nothing"
        assert first.left() == []
    finally:
        for run in runs:
            run.close()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Flags of a folder that passes for a model, and of one that passes for games."""
    from transformers import AutoConfig, PreTrainedTokenizerFast

    fast = chat_fixture.build_fast()
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>", chat_template=chat_fixture.CHATML).save_pretrained(
        tmp_path / "model"
    )
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "games").mkdir()
    for name in ("a.z8", "a.json"):
        (tmp_path / "games" / name).touch()
    flags = {"--model-path": "model", "--tw-game-dir": "games", "--log-dir": "run"}
    return ["--placement", "cpu", *(word for flag, name in flags.items() for word in (flag, str(tmp_path / name)))]


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("when", ["at its first look", "once it makes the folder ready"])
def test_preparing_for_a_folder_that_another_has_is_refused_and_touches_nothing(
    when: str,
    goes_on: bool,
    paths: RunPaths,
    other: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first one is a run that goes on (all its files are there), or one that is about to be."""
    if goes_on:
        Config().save(paths.args)
        paths.stop.touch()
    if when != "at its first look":
        monkeypatch.setattr(prepare, "taken_by_another", lambda _: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = contents(paths.run_dir)
    code = prepare.main(["--answer", str(tmp_path / "answer"), "--", *words, *(["--resume", "auto"] if goes_on else [])])
    said = capfd.readouterr().err
    assert code == 2, said
    assert re.search(rf"- --log-dir .*/run: another run has this folder \(launch.sh, pid {other}\)", said), said
    assert said.count("--log-dir") == 1, "and not how to go on with it"
    assert contents(paths.run_dir) == before
    assert not (tmp_path / "answer").exists()


def test_a_folder_belongs_to_a_prepare_whose_launch_sh_was_killed(tmp_path: Path) -> None:
    """It is past its own look, and would write over the settings of whoever came in."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    own = claims._process(os.getpid())
    for noted, is_taken in ((own, True), ((gone.pid, 1), False), (None, False)):
        RunPaths(tmp_path).claim.write_text(json.dumps({"launch": (gone.pid, 1), "prepare": noted}))
        assert bool(taken_by_another(RunPaths(tmp_path))) == is_taken
