"""launch.sh: set-up, help, refusals, signals. Runs are faked by a stub Python; the real flow is tested elsewhere."""

import contextlib
import gc
import itertools
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from accerl_mp import cli, recovery
from accerl_mp.config import ConfigError, resolve
from accerl_mp.launcher import prepare as preparing
from accerl_mp.launcher.prepare import _temporary_folder, beginning
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.summary import success_lines
from accerl_mp.launcher.torchrun import torchrun_flags
from accerl_mp.topology import RunPaths
from tests import chat_fixture
from tests.saved_states import save_state, state_content

ROOT = Path(__file__).parent.parent


def launch(*words: str, cwd: Path = ROOT, script: Path = ROOT / "launch.sh", **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "ACCERL_PYTHON"}
    environment = inherited | variables
    return subprocess.run(["bash", str(script), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The script and the package in a folder with a space, with requirements that install nothing."""
    root = tmp_path / "a clone"
    root.mkdir()
    shutil.copy(ROOT / "launch.sh", root)
    (root / "accerl_mp").symlink_to(ROOT / "accerl_mp")
    (root / "requirements-cpu.txt").write_text("# nothing\n")
    (root / "requirements.txt").write_text("# nothing\n")
    return root


def test_help_lists_every_flag_and_needs_no_environment(copy: Path) -> None:
    done = launch("--help", script=copy / "launch.sh", cwd=copy.parent)
    assert done.returncode == 0, done.stderr
    assert "--tw-game-dir" in done.stdout
    assert "--versions" in done.stdout
    assert not (copy / ".venv").exists()


def test_a_clone_in_which_no_module_would_be_found_is_refused_before_anything_is_made(copy: Path) -> None:
    other = copy.rename(copy.with_name("a:clone"))
    done = launch(script=other / "launch.sh", cwd=other.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launch.sh: {other} has a colon")
    assert not (other / ".venv").exists()


def test_a_failing_set_up_shows_the_end_of_pips_log_and_leaves_no_stamp(copy: Path) -> None:
    (copy / "requirements-cpu.txt").write_text("no-such-package-anywhere==1.0\n")
    done = launch("--setup-only", script=copy / "launch.sh", PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "installing the cpu stack into .venv" in done.stderr
    assert "no-such-package-anywhere" in done.stderr
    assert not (copy / ".venv/.stamp").exists()


@pytest.fixture
def slow_pip(copy: Path) -> Path:
    """An environment whose pip makes a temporary folder and ends only where `python.ends` was there before."""
    python = copy / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (copy / "temporary").mkdir()
    python.write_text(
        """#!/usr/bin/env bash
        if [ "$2" != pip ]; then exit 0; fi
        if [ -e "$0.ends" ]; then exec mktemp -d; fi
        mktemp -d
        exec sleep 60
        """
    )
    python.chmod(0o755)
    return copy


def set_up_of(clone: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ACCERL_PYTHON"} | {"TMPDIR": str(clone / "temporary")}
    command = ["bash", str(clone / "launch.sh"), "--setup-only"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def pips_folders(clone: Path) -> list[Path]:
    return list((clone / ".venv/temporary").glob("*")) + list((clone / "temporary").iterdir())


def test_pips_temporary_folders_are_gone_after_a_stop_after_the_next_set_up_and_at_its_end(slow_pip: Path) -> None:
    run = set_up_of(slow_pip)
    wait_until(lambda: bool(pips_folders(slow_pip)), 30)
    run.send_signal(signal.SIGINT)
    assert "stopped (INT)" in run.communicate(timeout=30)[1]
    assert run.returncode == 130
    assert list((slow_pip / "temporary").iterdir()) == []
    (slow_pip / ".venv/temporary/as after kill -9").mkdir(parents=True, exist_ok=True)
    (slow_pip / ".venv/bin/python.ends").touch()
    run = set_up_of(slow_pip)
    assert "the environment is ready" in run.communicate(timeout=30)[1]
    assert run.returncode == 0
    assert pips_folders(slow_pip) == []


def test_a_second_set_up_says_at_once_that_another_one_runs_and_waits_for_it(slow_pip: Path) -> None:
    first = set_up_of(slow_pip)
    wait_until(lambda: bool(pips_folders(slow_pip)), 30)
    (slow_pip / ".venv/bin/python.ends").touch()
    second = set_up_of(slow_pip)
    assert second.stderr.readline() == "launch.sh: another set-up is running in .venv: waits for its end (log: .venv/setup.log)\n"
    assert second.poll() is None
    assert bool(pips_folders(slow_pip)), "the first one's"
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert "the environment is ready" in second.communicate(timeout=30)[1]
    assert second.returncode == 0


def test_on_a_terminal_the_set_up_shows_what_pip_does_and_a_pipe_gets_nothing_of_it(copy: Path) -> None:
    before = "Of an earlier pip\n"
    warning = "WARNING: Location 'x' is ignored\n"
    (copy / "pip.log").write_text(before + "Collecting torch\n" + "Downloading a-very-long-name" * 9 + f"\n{warning}  {warning}")
    code = f"sleep 1.5 & follow $! '{copy}/pip.log' {len(before)}; echo done"
    assert functions(copy, code) == "done"
    shown = on_a_terminal(copy, code)
    assert "WARNING" not in shown
    assert re.search(r" 1 s  Downloading a-very-long-name", shown), shown
    assert max(len(part) for part in re.split(r"[\r\n]|\x1b\[K", shown)) < 60, "one line of the terminal"
    assert shown.endswith("\r\x1b[Kdone\r\n")


def test_the_seconds_of_a_set_up_go_on_and_what_pip_installs_is_counted(copy: Path) -> None:
    """pip itself is silent from its list of packages on, for minutes; and a set-up calls it more than once.

    Where SIGPIPE is ignored, as a child of Python has it, no pipe may end before who writes to it.
    """
    (copy / "pip.log").write_text("Installing collected packages: of, another, pip\nSuccessfully installed\n")
    site = copy / ".venv/lib/python3.11/site-packages"
    (site / "old-1.0.dist-info").mkdir(parents=True)
    os.utime(site / "old-1.0.dist-info", (1, 1))
    size = (copy / "pip.log").stat().st_size
    more = "head -c 400000 /dev/zero | tr '\\0' '\\n'; echo '  Attempting uninstall: a'"  # more than a pipe holds
    pip = f"echo 'Installing collected packages: a, b'; {more}; sleep 1.2; mkdir a-1.dist-info; sleep 1.2"
    log = f"'{copy}/pip.log'"
    code = f"trap '' PIPE; venv='{copy}/.venv'; set_up_began=$((SECONDS - 100)); (cd '{site}'; {pip}) >>{log} & follow $! {log} {size}"
    shown = on_a_terminal(copy, code)
    assert re.search(r"10\d s  installing: 0 of 2 packages", shown), shown
    assert re.search(r"10\d s  installing: 1 of 2 packages", shown), shown
    assert "uninstall" not in shown
    assert "Broken pipe" not in shown


def on_a_terminal(root: Path, code: str) -> str:
    """What a terminal of 60 columns gets from `code` after the script's functions are defined."""
    lines = (root / "launch.sh").read_text().splitlines()
    (root / "functions.sh").write_text("\n".join([*lines[: lines.index('main "$@"')], code]))
    environment = os.environ | {"TERM": "xterm"}
    return pexpect.run(f"bash '{root}/functions.sh'", env=environment, encoding="utf-8", dimensions=(20, 60), timeout=30)


def functions(root: Path, code: str, *words: str) -> str:
    """What `code` prints after the script's functions are defined."""
    lines = (root / "launch.sh").read_text().splitlines()
    assert lines[-1] == 'main "$@"'
    (root / "functions.sh").write_text("\n".join(lines[:-1]) + "\n")
    command = ["bash", "-c", f"source ./functions.sh; {code}", "launch.sh", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_that_is_up_to_date_starts_at_once_and_a_changed_requirement_is_seen(copy: Path) -> None:
    (copy / ".venv/bin").mkdir(parents=True)
    stamp = functions(copy, "choose_stack; stamp_of")
    (copy / ".venv/.stamp").write_text(stamp)
    start = time.monotonic()
    done = launch("--setup-only", script=copy / "launch.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 5
    (copy / "requirements-cpu.txt").write_text("another-one==1\n")
    assert functions(copy, "choose_stack; stamp_of") != stamp


def test_without_the_verified_python_it_stops_with_the_line_that_installs_it(copy: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "sha256sum", "cut", "dirname", "mkdir", "grep", "flock"):
        (tools / tool).symlink_to(shutil.which(tool) or "/bin/false")
    done = launch("--setup-only", script=copy / "launch.sh", PATH=str(tools), PYENV_ROOT="/nowhere", HOME="/nowhere")
    assert done.returncode == 1
    assert "Python 3.11 is needed (the cpu stack was verified on it)" in done.stderr
    assert "apt-get install python3.11 python3.11-venv" in done.stderr


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        ([], False, "cpu .venv"),
        ([], True, "gpu .venv"),
        (["--placement", "cpu"], True, "cpu .venv-cpu"),
        (["--placement=cpu", "--seed", "1"], True, "cpu .venv-cpu"),
        (["@flags", "--seed", "1"], True, "cpu .venv-cpu"),
        (["@flags", "--placement", "dedicated"], True, "gpu .venv"),
    ],
)
def test_the_stack_follows_the_machine_and_the_placement(copy: Path, words: list[str], gpus: bool, expected: str) -> None:
    (copy / "flags").write_text("# --placement colocated\n--placement cpu  # here\n--max-steps 1\n")
    code = f'machine_has_gpu() {{ {str(gpus).lower()}; }}; choose_stack "$@"; echo $stack ${{venv##*/}}'
    assert functions(copy, code, *words) == expected


def test_versions_prints_the_stack() -> None:
    done = launch("--versions", ACCERL_PYTHON=sys.executable, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert {"python", "torch", "transformers", "textworld", "pyzmq"} <= {line.split()[0] for line in done.stdout.splitlines()}


def test_words_that_are_no_flags_hide_no_flag_that_cannot_work(tmp_path: Path) -> None:
    words = "--modelpath m --batch-size abc --dtype fp8 --clip-eps 0 --tw-game-dir nothing --placement cpu"
    done = launch(*words.split(), cwd=tmp_path, ACCERL_PYTHON=sys.executable)
    assert done.returncode == 2
    said = [line.removeprefix("- ").split()[0].strip(":") for line in done.stderr.splitlines()[1:]]
    assert said == ["--batch-size", "--dtype", "--modelpath", "--clip-eps", "--tw-game-dir"], done.stderr


def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Files of at most 1 KiB: the tokenizer has no room."""
    (tmp_path / "games").mkdir()
    for name in ("a.z8", "a.json"):
        (tmp_path / "games" / name).touch()
    flags = ["--model-path", ROOT / "accerl_mp/presets/demo_model", "--tw-game-dir", tmp_path / "games", "--log-dir", tmp_path / "run"]
    prepare = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", tmp_path / "answer", "--", *flags, "--placement", "cpu"]
    words = ["bash", "-c", f"ulimit -f 1; exec {shlex.join(map(str, prepare))}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("launch.sh: nothing was started: [Errno 27] File too large")
    assert "Traceback" not in done.stderr


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "stub dir"
    folder.mkdir()
    (folder / "temporary").mkdir()
    (folder / "code").write_text("0")
    yield folder
    assert list((folder / "temporary").iterdir()) == [], "however it ended"


def start_stub(stub: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "ACCERL_PYTHON": str(ROOT / "tests/stub_python.sh"),
        "STUB_DIR": str(stub),
        "TMPDIR": str(stub / "temporary"),
    }
    command = ["bash", str(ROOT / "launch.sh"), *words]
    return subprocess.Popen(command, env=environment, cwd=stub, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def calls(stub: Path) -> list[str]:
    return (stub / "calls").read_text().splitlines()


def test_flags_reach_prepare_as_typed_and_the_exit_code_is_the_runs(stub: Path) -> None:
    (stub / "code").write_text("7")
    (stub / "end").touch()
    done = start_stub(stub, "--tw-game-dir", "a b", "--infer-stop", "")
    assert done.wait(20) == 7
    done.stderr.close()
    prepare, torchrun, summary = calls(stub)
    assert prepare.startswith("-m accerl_mp.launcher.prepare --answer ")
    assert prepare.endswith(" -- --tw-game-dir a b --infer-stop ")
    run = f"--run-dir {stub}/run dir"
    assert torchrun == f"-m accerl_mp.launcher.torchrun {run} --nproc-per-node 3 --rdzv-endpoint 127.0.0.1:0"
    assert summary == f"-m accerl_mp.launcher.summary {run} --exit-code 7"


def test_without_arguments_it_runs_the_demo(stub: Path) -> None:
    (stub / "end").touch()
    done = start_stub(stub)
    assert done.wait(20) == 0
    done.stderr.close()
    assert calls(stub)[0].endswith(" -- @accerl_mp/presets/demo.args")


def test_a_refusal_starts_nothing(stub: Path) -> None:
    (stub / "refuse").touch()
    done = start_stub(stub, "--seed", "1")
    assert done.wait(20) == 2
    done.stderr.close()
    assert len(calls(stub)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_a_run_begins_ends_it_at_once_with_a_word(stub: Path, number: signal.Signals, code: int) -> None:
    (stub / "slow").touch()
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "calls").exists)
    run.send_signal(number)
    shown = run.communicate(timeout=20)[1]
    assert run.returncode == code
    assert shown == f"launch.sh: stopped ({number.name.removeprefix('SIG')}) before a run began\n"
    assert len(calls(stub)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_the_stop_file_and_waits_for_the_run(stub: Path, number: signal.Signals) -> None:
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "torchrun.pid").exists)
    run.send_signal(number)
    assert run.wait(20) == 0, "it ended as it was asked to"
    run.stderr.close()
    assert (stub / "run dir/stop").exists()
    assert "TERM" not in calls(stub), "torchrun would cut a clean end short"
    assert calls(stub)[-1].endswith("--exit-code 0")


def test_a_stop_that_cannot_be_written_reaches_the_run_by_a_signal_at_once(stub: Path) -> None:
    """A link to nowhere stands for a disk without an inode. The run may still save elsewhere: it gets the same time as ever."""
    (stub / "run dir").mkdir()
    (stub / "run dir/stop").symlink_to("/nowhere/at/all")
    (stub / "saves").touch()
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "torchrun.pid").exists)
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 0
    run.stderr.close()
    assert (calls(stub).count("TERM"), calls(stub).count("GROUP")) == (1, 0)
    assert calls(stub)[-1].endswith("--exit-code 0")


def test_ctrl_c_that_ends_the_reader_too_lets_the_run_save(stub: Path) -> None:
    """`bash launch.sh 2>&1 | tee log`: the terminal sends it to all of them, and tee may be the first to end."""
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "torchrun.pid").exists)
    run.stderr.close()
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 0
    assert (stub / "run dir/stop").exists()
    assert "TERM" not in calls(stub)


def test_a_second_signal_hurries(stub: Path) -> None:
    (stub / "deaf").touch()
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "torchrun.pid").exists)
    run.send_signal(signal.SIGINT)
    wait_until((stub / "run dir/stop").exists)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    run.stderr.close()
    assert "TERM" in calls(stub)


def test_ctrl_c_goes_to_the_process_whose_debugger_has_the_terminal(stub: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = start_stub(stub, "--seed", "1")
    wait_until((stub / "torchrun.pid").exists)
    (stub / "run dir/debugger.pid").write_text(str(holder.pid))
    run.send_signal(signal.SIGINT)
    assert holder.wait(10) in (-signal.SIGINT, 1, 130)
    assert run.poll() is None
    assert not (stub / "run dir/stop").exists()
    (stub / "run dir/debugger.pid").unlink()
    run.send_signal(signal.SIGTERM)
    assert run.wait(20) == 0
    run.stderr.close()


def prepare(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(tmp_path / "answer"), "--", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def model_and_games(tmp_path: Path) -> list[str]:
    """Flags of a folder that passes for a model and of one that passes for games: prepare opens neither weights nor games."""
    from transformers import AutoConfig, PreTrainedTokenizerFast

    model, games = tmp_path / "model", tmp_path / "games"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chat_fixture.build_fast(), eos_token="<|im_end|>", chat_template=chat_fixture.CHATML
    )
    tokenizer.save_pretrained(model)
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(model)
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    games.mkdir()
    (games / "a.z8").touch()
    (games / "a.json").touch()
    return ["--model-path", "model", "--tw-game-dir", "games", "--log-dir", "a run"]


def test_prepare_writes_the_run_folder(tmp_path: Path, model_and_games: list[str]) -> None:
    done = prepare(tmp_path, *model_and_games)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "a run"
    assert (tmp_path / "answer").read_text() == f"RUN_DIR='{run_dir}'\nNPROC=2\nRDZV_ENDPOINT=127.0.0.1:0\n"
    args = json.loads((run_dir / "args.json").read_text())
    assert (args["model_path"], args["placement"]) == (str(tmp_path / "model"), "cpu")
    assert (run_dir / "command.txt").read_text() == "bash launch.sh --model-path model --tw-game-dir games --log-dir 'a run'\n"
    assert "torch" in json.loads((run_dir / "versions.json").read_text())
    meta = json.loads((run_dir / "tokenizer/meta.json").read_text())
    assert meta["eos_token"] == "<|im_end|>"
    assert (run_dir / "tokenizer/tokenizer.json").exists()
    said = done.stderr.splitlines()
    assert (said[0], said[-1]) == ("launch.sh: looks at the model's tokenizer and config", "launch.sh: starting the run in a run")


@pytest.mark.parametrize("made_of_it", ["SystemExit", "ImportError", "nothing"])
def test_preparing_that_is_stopped_says_so_whatever_a_library_makes_of_the_signal(made_of_it: str) -> None:
    code = f"""
import os, signal, sys
from accerl_mp.launcher.prepare import until_asked_to_end
def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)
    except SystemExit:
        if {made_of_it!r} == "ImportError":
            raise ImportError("numpy.core.multiarray failed to import")
        if {made_of_it!r} == "SystemExit":
            raise
    return 2
sys.exit(until_asked_to_end(work))
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (143, b"")


def test_a_link_in_the_tokenizers_place_is_replaced_and_what_it_leads_to_is_not_touched(tmp_path: Path) -> None:
    made, elsewhere, place = tmp_path / "made", tmp_path / "elsewhere", tmp_path / "tokenizer"
    for folder in (made, elsewhere):
        folder.mkdir()
        (folder / "meta.json").write_text(folder.name)
    for lead_there in (place.symlink_to, shutil.copytree):
        lead_there(*([elsewhere] if lead_there == place.symlink_to else [elsewhere, place]))
        (place / "old").touch()
        preparing._replace(place, made)
        assert [path.name for path in place.iterdir()] == ["meta.json"]
        assert ((place / "meta.json").read_text(), (elsewhere / "meta.json").read_text()) == ("made", "elsewhere")
        shutil.rmtree(place)


def test_preparing_that_is_stopped_leaves_no_temporary_folder(tmp_path: Path, model_and_games: list[str]) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", "answer", "--", *model_and_games]
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as preparing:
        wait_until(lambda: preparing.poll() is not None or any(temporary.glob("accerl-tokenizer-*")), 60)
        preparing.terminate()
        preparing.communicate(timeout=60)
    assert preparing.returncode == 143
    assert list(temporary.iterdir()) == []


def test_the_same_command_takes_a_folder_whose_preparing_was_stopped(
    tmp_path: Path, model_and_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its last step but one, and once all was ready: the signal may come before launch.sh has started anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words, args = ["--answer", "answer", "--", *model_and_games], tmp_path / "a run/args.json"
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_replace", lambda *_: sys.exit(143))
        with pytest.raises(SystemExit):
            preparing.main(words)
    assert args.exists()
    assert [preparing.main(words) for _ in range(2)] == [0, 0]
    (tmp_path / "a run/logs/torchrun.log").touch()
    assert preparing.main(words) == 2, "now a run has begun"


@pytest.mark.parametrize("moment", ["tempfile.mkdtemp", "tempfile.TemporaryDirectory._rmtree"])
def test_a_stop_at_any_moment_of_a_temporary_folder_leaves_none(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and the note of it, and while it is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holder, name = moment.rsplit(".", 1)
    holder = pkgutil.resolve_name(holder)
    real = getattr(holder, name)

    def stopped(*args: Any, **options: Any) -> Any:
        if name == "_rmtree":
            signal.raise_signal(signal.SIGTERM)
        made = real(*args, **options)
        if name == "mkdtemp":
            signal.raise_signal(signal.SIGTERM)
        return made

    monkeypatch.setattr(holder, name, staticmethod(stopped) if isinstance(holder, type) else stopped)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit), _temporary_folder():
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_goes_on_says_from_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths, name = RunPaths(tmp_path / "runs/x"), "step-000005-version-000006"
    for folder, shown in ((paths.resume / name, f"resume/{name}"), (tmp_path / "other" / name, f"{tmp_path}/other/{name}")):
        folder.mkdir(parents=True)
        content = state_content(5, 6, trainer={"step": 5, "round": 4})
        (folder / "state.json").write_text(recovery.state_text(content))
        lines = beginning(recovery.Start(state=str(folder)), paths)
        assert lines == [f"goes on from step 5, round 4 ({shown})", "starting the run in runs/x"]
    assert beginning(recovery.Start(), RunPaths(Path("/elsewhere/y"))) == ["starting the run in /elsewhere/y"]


def test_prepare_reports_all_problems_at_once_and_touches_nothing(tmp_path: Path, model_and_games: list[str]) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(chat_fixture.THINKING)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/args.json").write_text("{}")
    words = ["--replay-bytes", str(10**12), "--log-level", "loud", "--chat-template", "none", "--max-length", "10"]
    done = prepare(tmp_path, *model_and_games, *words)
    assert done.returncode == 2
    for part in (
        "--replay-bytes",
        "/dev/shm has",
        "--log-level loud",
        f"--chat-template {tmp_path / 'none'}",
        "--max-length 10",
        "already holds a run",
    ):
        assert part in done.stderr
    assert [path.name for path in (tmp_path / "a run").iterdir()] == ["args.json"]
    done = prepare(tmp_path, *model_and_games, "--chat-template", str(template), "--log-dir", "another")
    assert (done.returncode, "- " + f"--chat-template {template}: " in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "another").exists()


DEMO = ["--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", "runs/demo_games/train"]
DEMO += ["--eval-game-dir", "runs/demo_games/heldout", "--placement", "cpu"]


@pytest.mark.parametrize("is_half_made", [False, True])
def test_what_cannot_work_is_said_before_the_demos_games_are_made(tmp_path: Path, is_half_made: bool) -> None:
    """All of it at once, then what only the model itself tells; nothing of games that are still to come."""
    if is_half_made:
        (tmp_path / "runs/demo_games/train").mkdir(parents=True)
    model = tmp_path / "model"
    shutil.copytree(ROOT / "accerl_mp/presets/demo_model", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 4}))
    words = ["--batch-size", "0", "--replay-bytes", "1", "--tw-game-pattern", "../*", "--resume", "nowhere"]
    done = prepare(tmp_path, *DEMO, *words)
    assert done.returncode == 2
    said = [line.removeprefix("- ").split()[0].strip(":") for line in done.stderr.splitlines()[1:]]
    expected = ["--batch-size", "--replay-bytes", "--resume"]
    assert [flag for flag in said if flag in expected] == expected, done.stderr
    assert "--tw-game-pattern" in said, done.stderr
    assert not {"--tw-game-dir", "--eval-game-dir"} & set(said), done.stderr
    done = prepare(tmp_path, *DEMO, "--model-path", "model")
    assert done.returncode == 2
    assert "its config only 4 tokens" in done.stderr
    assert list(tmp_path.rglob("*.z8")) == []
    assert list(tmp_path.rglob("args.json")) == []


@pytest.mark.parametrize("are_the_same", [True, False])
def test_a_demo_that_goes_on_may_have_lost_its_games_but_not_have_others(
    are_the_same: bool, tmp_path: Path, model_and_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str = "a" if are_the_same else "b") -> None:
        for split, suffix in itertools.product(("train", "heldout"), (".z8", ".json")):
            folder = tmp_path / "runs/demo_games" / split
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).with_suffix(suffix).touch()

    monkeypatch.chdir(tmp_path)
    words = [*model_and_games, *DEMO[2:], "--resume", "auto"]
    make("a")
    save_state(tmp_path / "a run/resume", 3, preparing._absolute(resolve(cli.read(words, environ={})[0], num_gpus=0, log_dir="a run")))
    shutil.rmtree(tmp_path / "runs/demo_games")
    monkeypatch.setattr(preparing, "_make_demo_games", make)
    refused = pytest.raises(ConfigError, match=r"--tw-game-dir .* differs from the saved state's")
    with contextlib.nullcontext() if are_the_same else refused:
        preparing._prepare(words)
    assert (tmp_path / "a run/args.json").exists() == are_the_same


@pytest.mark.parametrize("words", [["--max-steps", "5"], [], ["--tw-game-dir", "games"]])
def test_flags_without_a_model_and_games_are_told_the_demos_file(tmp_path: Path, words: list[str]) -> None:
    done = prepare(tmp_path, *words)
    assert done.returncode == 2
    command = f"cd {shlex.quote(str(ROOT))} && bash launch.sh @accerl_mp/presets/demo.args {shlex.join(words)}".rstrip()
    expected = f"launch.sh: for the demo with these flags: {command}"
    assert (done.stderr.splitlines()[-1] == expected) == ("--tw-game-dir" not in words), done.stderr


def test_a_model_that_nobody_knows_is_refused_once_and_so_is_a_task(tmp_path: Path, model_and_games: list[str]) -> None:
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(settings | {"model_type": "nonsense9"}))
    for words, said in (
        ([], "nonsense9"),
        (["--env", "no_such_task:Env"], "--env no_such_task:Env: module no_such_task cannot be imported"),
    ):
        done = prepare(tmp_path, *model_and_games, *words)
        assert (done.returncode, done.stderr.count(said)) == (2, 1), done.stderr
        assert len([line for line in done.stderr.splitlines() if line.startswith("- ")]) == 1


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, model_and_games: list[str]) -> None:
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(settings | {"vocab_size": 4}))
    done = prepare(tmp_path, *model_and_games)
    assert done.returncode == 2
    assert "its config only 4 tokens: the model was not resized" in done.stderr


def test_a_model_without_a_template_gets_the_built_in_one_with_a_warning(tmp_path: Path, model_and_games: list[str]) -> None:
    (tmp_path / "model/chat_template.jinja").unlink()
    done = prepare(tmp_path, *model_and_games)
    assert done.returncode == 0, done.stderr
    assert "the built-in User/Assistant one is used" in done.stderr
    assert "Assistant: " in (tmp_path / "a run/tokenizer/chat_template.jinja").read_text()


def test_torchrun_uses_one_machine_and_a_free_port() -> None:
    flags = torchrun_flags(4, "127.0.0.1:0")
    assert flags[flags.index("--nproc-per-node") + 1] == "4"
    assert flags[flags.index("--rdzv-endpoint") + 1] == "127.0.0.1:0"


def test_the_summary_says_what_the_run_reached(tmp_path: Path) -> None:
    (tmp_path / "args.json").touch()
    evaluations = {"eval_first": {"step": 0, "win_rate": 0.4}, "eval_last": {"step": 40, "win_rate": 0.925}}
    text = "\n".join(success_lines(RunPaths(tmp_path), {"step": 40, "version": 41, "episodes": 1234, "training_s": 61.0, **evaluations}))
    assert "finished: 40 optimizer steps" in text
    assert "held-out win rate   0.40 before (step 0), 0.93 after (step 40)" in text
    assert "1:01" in text
    assert f" -m accerl_mp.tools.report {tmp_path}\n" in text
    assert text.endswith(f" --logdir {tmp_path}")
    once = {"step": 5, "training_s": 61.0, "eval_first": evaluations["eval_first"], "eval_last": evaluations["eval_first"]}
    text = "\n".join(success_lines(RunPaths(tmp_path), once))
    assert "0.40 before (step 0); it was not evaluated again" in text
    again = {"step": 5, "training_s": 61.0, "start_training_s": 4.0}
    text = "\n".join(success_lines(RunPaths(tmp_path), again))
    assert ", of which rounds 0:04\n  with earlier starts 1:01 in rounds\n" in text, "of a start that went on"
    text = "\n".join(success_lines(RunPaths(tmp_path), again | {"begun": 1.0}))
    assert ", of which rounds 0:00\n  with earlier starts 1:01 in rounds\n" in text, "it ended before its first round"


def test_commands_to_type_again_name_the_interpreter_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("command.txt", "stop"):
        (tmp_path / name).write_text("bash launch.sh --seed 1\n")
    missing = ["--model-path is missing", "--tw-game-dir is missing"]
    for python, words in (("/a b/python", "ACCERL_PYTHON='/a b/python' bash "), ("", "bash ")):
        monkeypatch.setenv("ACCERL_PYTHON", python)
        for line in (success_lines(RunPaths(tmp_path), {})[-1], preparing._hint(missing, [])[0]):
            assert words in line
            assert ("ACCERL_PYTHON" in line) == bool(python), line


def test_the_summary_of_a_run_that_stopped_before_anything_offers_nothing_to_look_at(tmp_path: Path) -> None:
    for name in ("command.txt", "stop"):
        (tmp_path / name).write_text("bash launch.sh\n")

    def labels(status: dict[str, Any]) -> list[str]:
        return [line.strip().partition("  ")[0] for line in success_lines(RunPaths(tmp_path), status)[2:]]

    assert labels({}) == ["wall time", "run folder", "to begin anew"]
    assert labels({"step": 1}) == ["wall time", "run folder", "report", "TensorBoard", "to go on"]
    recovery.Start(state=str(tmp_path / "other/resume" / recovery.folder_name(3, 3))).save(RunPaths(tmp_path).resume)
    assert labels({})[-1] == "to go on", "from another run's state"


def test_the_summary_of_a_run_that_stopped_within_a_round_counts_the_steps_that_it_saved(tmp_path: Path) -> None:
    """status.json knows whole rounds only, and may be of a start whose last steps a crash has cost."""
    for name in ("command.txt", "stop"):
        (tmp_path / name).write_text("bash launch.sh\n")
    for step in (8, 19):
        (tmp_path / "resume" / recovery.folder_name(step, step)).mkdir(parents=True)
    assert "stopped on request: 19 optimizer steps" in success_lines(RunPaths(tmp_path), {"step": 18})[1]
    assert "stopped on request: 19 optimizer steps" in success_lines(RunPaths(tmp_path), {"step": 21})[1]
    assert "stopped on request: 19 optimizer steps" in success_lines(RunPaths(tmp_path), {})[1]
    Reached(step=20, saved_step=20, version=4).save(RunPaths(tmp_path).reached)
    assert "stopped on request: 20 optimizer steps, 4 weight pushes" in success_lines(RunPaths(tmp_path), {"step": 18})[1]


@pytest.mark.parametrize("damage", [b"", b"bash launch.sh --checkpoint-name 'new\n", b"bash launch.sh --log-dir \xff\n", None])
def test_a_summary_stands_without_the_command_of_its_run(tmp_path: Path, damage: bytes | None) -> None:
    (tmp_path / "stop").touch()
    if damage is not None:
        (tmp_path / "command.txt").write_bytes(damage)
    lines = success_lines(RunPaths(tmp_path), {})
    assert any(line.startswith("  run folder") for line in lines)
    assert any("--resume auto" in line for line in lines) == (damage == b"bash launch.sh --log-dir \xff\n")


def test_the_commands_of_the_summary_can_be_typed_where_launch_sh_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "stop").touch()
    (run / "command.txt").write_text("bash launch.sh --seed 1\n")

    def lines(*, called_from: Path, now_in: Path) -> list[str]:
        monkeypatch.setenv("ACCERL_CALLED_FROM", str(called_from))
        monkeypatch.chdir(now_in)
        return [line.partition("  ")[2].strip().partition("  ")[2].strip() for line in success_lines(RunPaths(run), {"step": 1})[-3:]]

    report, tensorboard, go_on = lines(called_from=ROOT, now_in=ROOT)
    assert report == f"{shlex.quote(sys.executable)} -m accerl_mp.tools.report '{run}'"
    assert tensorboard.endswith(f"--logdir '{run}'")
    assert go_on == f"bash launch.sh --seed 1 --log-dir '{run}' --resume auto"
    (run / "command.txt").write_text(f"bash launch.sh --seed 1\n{go_on}\n")
    assert lines(called_from=ROOT, now_in=ROOT)[2] == go_on, "not longer each time"
    (run / "command.txt").write_text("bash launch.sh --log-dir=a --seed 1 --resume auto --log-dir 'a run' --resume=elsewhere\n")
    assert lines(called_from=ROOT, now_in=ROOT)[2] == go_on, "nor with two folders where the person named it"
    report, _, go_on = lines(called_from=tmp_path, now_in=tmp_path)
    assert report.startswith(f"PYTHONPATH={shlex.quote(str(ROOT))} ")
    assert go_on.startswith(f"bash {shlex.quote(f'{ROOT}/launch.sh')} --seed 1 ")
    assert lines(called_from=tmp_path, now_in=ROOT)[2].startswith(f"cd {shlex.quote(str(ROOT))} && bash launch.sh "), (
        "the demo, from elsewhere"
    )
