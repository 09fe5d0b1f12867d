"""Before anything starts: check the flags, make the run folder, tell launch.sh what to start.

python -m accerl_mp.launcher.prepare --answer FILE -- FLAGS...      FILE gets RUN_DIR, NPROC and RDZV_ENDPOINT for the shell
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from accerl_mp import checks, cli, log
from accerl_mp.config import TEXTWORLD, Config, ConfigError, resolve
from accerl_mp.games import note_games
from accerl_mp.launcher.claim import claim, taken_by_another
from accerl_mp.launcher.environment import launch_words
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.resuming import games_of, plan_start, run_folder_of
from accerl_mp.launcher.run_folder_check import misplaced
from accerl_mp.launcher.sweep import sweep
from accerl_mp.recovery import Start
from accerl_mp.stops import put_off
from accerl_mp.topology import RunPaths, gpu_memory_bytes, visible_gpus

if TYPE_CHECKING:
    from accerl_mp.models.memory import MemoryPlan

CONFIG_UNREADABLE = "its config cannot be read"
"""In the problem that launcher/tokenizer.py has with a model folder like that."""

_PATH_FIELDS = ("model_path", "chat_template", "tw_game_dir", "eval_game_dir", "log_dir", "checkpoint_dir", "resume")
_MAKER_LEAVES_S = 20.0
_ROOT = Path(__file__).resolve().parents[2]
_DEMO_GAMES, _SPLITS = Path("runs/demo_games"), ("train", "heldout")


def main(argv: list[str]) -> int:
    """Returns the exit code: 2 for flags that cannot work."""
    if argv[:1] == ["--help"]:
        cli.build_parser().print_help()
        return 0
    answer, words = _split(argv)
    try:
        answer.write_text(_shell_words(_prepare(words)), encoding="utf-8", errors="surrogateescape")
    except ConfigError as error:
        print("\n".join([f"launch.sh: this cannot run:\n{error}", *_hint(error.problems, words)]), file=sys.stderr)
        return 2
    except OSError as error:  # no room, most of all
        print(f"launch.sh: nothing was started: {error}", file=sys.stderr)
        return 1
    return 0


def _split(argv: list[str]) -> tuple[Path, list[str]]:
    if argv[:1] != ["--answer"] or argv[2:3] != ["--"]:
        raise SystemExit(__doc__)
    return Path(argv[1]), argv[3:]


def _hint(problems: list[str], words: list[str]) -> list[str]:
    """For flags that lack a model and games and nothing else: they may have been meant for the demo."""
    missing = [f"{flag} is missing" for flag in ("--model-path", "--tw-game-dir")]
    if len(problems) != len(missing) or not all(problem.startswith(tuple(missing)) for problem in problems):
        return []
    go = "" if Path.cwd() == _ROOT else f"cd {shlex.quote(str(_ROOT))} && "  # the demo's own paths are relative to it
    typed = f"{go}{launch_words()}bash launch.sh @accerl_mp/presets/demo.args {shlex.join(words)}".rstrip()
    return [f"launch.sh: for the demo with these flags: {typed}"]


def _plays_demo_games(config: Config) -> bool:
    return config.games.tw_game_dir == os.path.realpath(_DEMO_GAMES / "train")


def _of_games_to_come(problem: str) -> bool:
    """Of a folder that `_make_demo_games` is about to fill, or of a saved state whose games are to come."""
    folders = {flag: [os.path.realpath(_DEMO_GAMES / split) for split in _SPLITS] for flag in ("--tw-game-dir", "--eval-game-dir")}
    return problem.startswith(tuple(f"{flag} {path}{end}" for flag, paths in folders.items() for path in paths for end in (": ", " (")))


def _make_demo_games() -> None:
    """The demo's own games; at once when they are there. In a process of its own: TextWorld stays out of this one.

    waits for      that process; where this one is to end (SystemExit), until it has tidied up, at most `_MAKER_LEAVES_S`
    """
    import subprocess

    command = [sys.executable, "-m", "accerl_mp.tools.make_games", "--out", str(_DEMO_GAMES)]
    with subprocess.Popen(command, stdout=sys.stderr) as maker:
        try:
            code = maker.wait()
        except BaseException:
            maker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                maker.wait(_MAKER_LEAVES_S)
            maker.kill()
            raise
    if code:
        raise SystemExit(code)  # it has said why


def _prepare(words: list[str]) -> Config:
    """The run folder, and the demo's games where they are played.

    ConfigError: all problems that numbers, names and files tell; without any, all that the model itself tells, for which torch is imported.
    """
    typed, unread = cli.read(words, environ=os.environ)
    gpus = visible_gpus()
    log_dir = run_folder_of(typed.run.resume) or f"runs/TextWorld_FSDP/{datetime.now():%Y%m%d_%H%M%S}"
    config = _absolute(resolve(typed, num_gpus=len(gpus), log_dir=log_dir))
    paths, is_demo = RunPaths(Path(config.metrics.log_dir or "")), _plays_demo_games(config)

    def check() -> list[str]:
        return checks.check(config, num_gpus=len(gpus), shm_free_bytes=_shm_free_bytes(), typed=typed)

    def but_games_to_come(problems: list[str]) -> list[str]:
        return [problem for problem in problems if not (is_demo and _of_games_to_come(problem))]

    problems = but_games_to_come(check())
    problems += _log_level(config) + _env(config)
    problems += misplaced(paths)
    if taken := taken_by_another(paths):  # instead of how to go on with it
        problems = [taken, *cli.without_those_of(["--log-dir"], problems)]
    if config.run.resume and not unread + problems:
        print("launch.sh: looks at the saved state", file=sys.stderr)  # all of it is read
    start, of_resume, warnings = plan_start(config)
    if problems := unread + cli.without_those_of(unread, problems + but_games_to_come(of_resume)):
        raise ConfigError(problems)
    print("launch.sh: looks at the model's tokenizer and config", file=sys.stderr)  # torch takes seconds, the next line comes after it
    plan = _memory_plan(config)
    with _temporary_folder() as folder:
        if problems := (plan.problems() if plan else []) + _model_problems(config, Path(folder)):
            raise ConfigError(problems)
        if is_demo:
            _make_demo_games()
            if problems := check() + plan_start(config)[1]:
                raise ConfigError(problems)
        for warning in checks.warnings(config, typed) + warnings + (plan.warnings() if plan else []):
            print(f"launch.sh: warning: {warning}", file=sys.stderr)
        if plan:
            print("\n".join(f"launch.sh: {line}" for line in plan.lines()), file=sys.stderr)
            config = config.replace(kv_cache_gib=config.inference.kv_cache_gib or plan.kv_cache_bytes / 2**30)
        _make_run_folder(paths, config, words, start)
        _replace(paths.tokenizer, Path(folder))
    print("\n".join(f"launch.sh: {line}" for line in beginning(start, paths)), file=sys.stderr)
    return config


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Gone however this process ends but by SIGKILL."""
    with put_off(signal.SIGTERM):  # else a folder could be there that nobody knows of
        folder = tempfile.TemporaryDirectory(prefix="accerl-tokenizer-")
    try:
        yield folder.name
    finally:
        with put_off(signal.SIGTERM):
            folder.cleanup()


def beginning(start: Start, paths: RunPaths) -> list[str]:
    """What begins now, and from what: the processes themselves are silent until Python and torch are up."""
    lines = [f"starting the run in {_short(paths.run_dir, Path.cwd())}"]
    if state := start.saved:
        done = f"step {state.step}, round {state.content.get('trainer', {}).get('round', 0)}"
        lines.insert(0, f"goes on from {done} ({_short(state.folder, paths.run_dir)})")
    return lines


def _short(path: Path, folder: Path) -> Path:
    """As seen from `folder`, where it lies below."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def _absolute(config: Config) -> Config:
    """Any process can then be started by hand, from any directory."""
    values = config.to_flat()
    paths = {name: values[name] for name in _PATH_FIELDS if values[name] and values[name] != "auto"}  # --resume auto is none
    return config.replace(**{name: os.path.realpath(path) for name, path in paths.items()})


def _log_level(config: Config) -> list[str]:
    try:
        log.level_of("", config.metrics.log_level)
    except ValueError as error:
        return [f"--log-level {config.metrics.log_level}: {error}; [role=]LEVEL with debug, info, warning or error"]
    return []


def _env(config: Config) -> list[str]:
    if config.games.env == TEXTWORLD:
        return []  # without importing it here
    from accerl_mp.rollout.env import find_env

    try:
        find_env(config.games.env)
    except ValueError as error:
        return [f"--env {config.games.env}: {error}: no game could be played"]
    return []


def _shm_free_bytes() -> int:
    return shutil.disk_usage("/dev/shm").free


def _model_problems(config: Config, folder: Path) -> list[str]:
    """What the trainer would refuse, from the model's config and tokenizer alone. Writes the tokenizer to `folder`."""
    import torch
    from transformers.utils import logging

    from accerl_mp.launcher.tokenizer import export_tokenizer
    from accerl_mp.models.build import model_problems

    logging.set_verbosity_error()  # what matters is in the problems
    problems = export_tokenizer(config.model, folder)
    if any(CONFIG_UNREADABLE in problem for problem in problems):
        return problems  # the model would say the same again
    return problems + model_problems(config, torch.device("cpu" if config.run.placement == "cpu" else "cuda"))


def _memory_plan(config: Config) -> "MemoryPlan | None":
    """None on cpu, where nvidia-smi does not say what the cards have, and where the model is refused anyway."""
    card_bytes = None if config.run.placement == "cpu" else gpu_memory_bytes(visible_gpus())
    if card_bytes is None:
        return None
    import torch

    from accerl_mp.models.build import load_or_refuse
    from accerl_mp.models.memory import plan_memory

    model, _ = load_or_refuse(config, torch.device("cuda"))  # `_model_problems` says why there is none
    try:
        return plan_memory(model, config, card_bytes) if model is not None else None
    except (ValueError, OSError, ImportError):
        return None


def _make_run_folder(paths: RunPaths, config: Config, words: list[str], start: Start) -> None:
    """New, or what a run that goes on has already: its logs, metrics and events are appended to."""
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    if taken := claim(paths, is_preparing=True):
        raise ConfigError([taken])
    sweep(paths)
    shutil.rmtree(paths.torchrun, ignore_errors=True)  # of a launcher that was killed
    for note in (paths.stop, paths.ended):
        note.unlink(missing_ok=True)
    (paths.run_dir / "logs").mkdir(exist_ok=True)
    with (paths.run_dir / "command.txt").open("a", errors="surrogateescape") as file:  # paths need not be UTF-8
        file.write(shlex.join(["bash", "launch.sh", *words]) + "\n")
    (paths.run_dir / "versions.json").write_text(json.dumps(_stack(), indent=2) + "\n")
    note_games(paths.games, config, games_of(start, config))
    config.save(paths.args)
    start.save(paths.resume)
    Reached().save(paths.reached)


def _replace(place: Path, folder: Path) -> None:
    """A copy of `folder` at `place`. A link there goes, not what it leads to: that is somebody else's."""
    if place.is_symlink():
        place.unlink()
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)


def _stack() -> dict[str, str]:
    from accerl_mp.launcher.versions import stack

    return stack()


def _shell_words(config: Config) -> str:
    run = config.run
    words = {
        "RUN_DIR": str(config.metrics.log_dir),
        "NPROC": str(run.fsdp_world_size),
        "RDZV_ENDPOINT": f"{run.fsdp_master_addr or '127.0.0.1'}:{run.fsdp_master_port or 0}",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in words.items())


def until_asked_to_end(work: Callable[[], int]) -> int:
    """Exit code of `work`, or of SIGTERM, which ends it with SystemExit so that the temporary folder goes too.

    Whatever the code makes of that exception which the signal has met: a library in C that is just being imported makes it an ImportError.
    """
    came: list[int] = []

    def leave(number: int, _frame: object) -> None:
        came.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        code = work()
    except BaseException:
        if not came:
            raise
    return 128 + came[0] if came else code


if __name__ == "__main__":
    sys.exit(until_asked_to_end(lambda: main(sys.argv[1:])))
