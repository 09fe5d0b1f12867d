"""Where an export may go: to a free name, an empty folder or the place of an earlier export. Whatever else stood there would be deleted.

No torch: the launcher asks before anything starts, and the trainer again at each export.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from accerl_mp.cli import option_of
from accerl_mp.config import Config
from accerl_mp.files import read_text

BEST_NAME, CANDIDATE_NAME = "best", ".evaluated"
"""Folders of the best export and of the one that is being evaluated, in --checkpoint-dir."""
STATE_NAME = "trainer_state.json"
_MARKS = ("optimizer_step", "step")
"""One of them is in the state of every export: of a run, of `tools.sft`. Transformers' Trainer writes a file of that name without."""
_STEP_NAME = re.compile(r"step-\d{6,}(-final)?")
_RUN_FOLDERS = ("episodes", "eval", "logs", "resume", "samples", "tokenizer")
"""Of --log-dir: the run fills them itself."""
_MOST_NAME_BYTES = 255 - len("..4194304-1234567890123456789.new")
"""An export is first written beside its place, under a longer name."""
_USED = (
    ("model", ("model_path", "chat_template")),
    ("games", ("tw_game_dir",)),
    ("metrics", ("log_dir", "eval_game_dir")),
    ("run", ("replay_samples",)),
)


def export_problems(config: Config, *, name_alone: bool = False) -> Iterator[str]:
    """Of a resolved Config with `--save-checkpoint`: exports that would replace what is no export, or what the run itself needs.

    name_alone: --checkpoint-dir cannot be used anyway, so what is in it does not matter
    """
    name, folder = config.metrics.checkpoint_name, Path(config.metrics.checkpoint_dir or "")
    if name and (problem := _name_problem(name, is_in_run_folder=_real(folder) == _real(config.metrics.log_dir or "."))):
        yield f"--checkpoint-name {name}{problem}"
        return
    if name_alone:
        return
    places = {Path(name).name: (f"--checkpoint-name {name}", "name")} if name else {}
    if config.metrics.eval_game_dir:
        places |= dict.fromkeys((BEST_NAME, CANDIDATE_NAME), (f"--checkpoint-dir {folder}", "folder"))
    for place, (flag, what) in places.items():
        if found := taken_by(folder / place):
            yield f"{flag}: {folder / place} {found}, which would be deleted; use another {what}"
    for used, path in _used(config):
        place = _place_of(path, folder)
        if place in places or (not name and _STEP_NAME.fullmatch(place)):
            flag, what = places.get(place, (f"--checkpoint-dir {folder}", "folder"))
            yield f"{flag}: {folder / place} is or holds {used} {path}, which the export would replace; use another {what}"


def _name_problem(name: str, *, is_in_run_folder: bool) -> str:
    """What is wrong with `--checkpoint-name` alone, to follow it; empty: nothing."""
    own = Path(name).name
    if own in ("", "..") or len(Path(name).parts) != 1:
        return ": it must be one folder's name; --checkpoint-dir says where"
    if own in (BEST_NAME, CANDIDATE_NAME):
        return " is the folder of the best export: the newest would take its place; use another name"
    if len(own.encode(errors="replace")) > _MOST_NAME_BYTES:
        return f": it is over {_MOST_NAME_BYTES} bytes long, so no export could be written; use a shorter name"
    if is_in_run_folder and own in _RUN_FOLDERS:
        return ": --checkpoint-dir is --log-dir, where the run has a folder of that name, which the export would replace; use another name"
    return ""


def taken_by(target: Path) -> str:
    """What stands at `target` and would be lost if an export took its place, in words that follow its name; empty: nothing.

    Raises nothing: what cannot be looked at counts as somebody's.
    """
    try:
        return _taken_by(target)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f"holds what cannot be looked at ({getattr(error, 'strerror', None) or error})"


def _taken_by(target: Path) -> str:
    mode = target.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "is a symbolic link"  # to an export, too: the link would be lost, and what it names stay
    if not stat.S_ISDIR(mode):
        return "is a file"
    if not any(target.iterdir()) or _is_export(target):
        return ""
    return "holds something else than an export"


def _is_export(folder: Path) -> bool:
    if not (folder / STATE_NAME).is_file():
        return False
    try:
        state = json.loads(read_text(folder / STATE_NAME))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and any(mark in state for mark in _MARKS)


def _used(config: Config) -> Iterator[tuple[str, Path]]:
    for group, names in _USED:
        for name in names:
            if path := getattr(getattr(config, group), name):
                yield option_of(name), Path(path)


def _place_of(path: Path, folder: Path) -> str:
    """The entry of `folder` that `path` is or lies in; empty: none."""
    inside, root = _real(path), _real(folder)
    return inside.relative_to(root).parts[0] if inside != root and inside.is_relative_to(root) else ""


def _real(path: Path | str) -> Path:
    """Without links; a loop of them is left as it is."""
    return Path(os.path.realpath(path))


def snapshot_folder(out: Path, step: int) -> Path:
    """Of `tools.sft`'s --save-steps: beside `--out`, not in it, as the last save replaces the whole folder."""
    return out.with_name(f"{out.name}-step-{step}")
