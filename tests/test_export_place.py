"""Where exports may go: nothing but an earlier export is ever deleted, and what is refused later is refused at the start."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_config import folders, problems_of  # noqa: F401
from test_resume import evaluated

from accerl_mp.export_place import taken_by
from accerl_mp.tools import sft
from accerl_mp.trainer import checkpoint
from accerl_mp.trainer.best import BestExport

DEMO_MODEL = Path(sft.__file__).parents[1] / "presets/demo_model"


def export_in(folder: Path, state: str = '{"optimizer_step": 3}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").touch()
    (folder / "trainer_state.json").write_text(state)
    return folder


def photos_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "photo").write_text("dear")
    return folder


def put(kind: str, target: Path) -> None:
    """Something that is no export."""
    target.parent.mkdir(parents=True, exist_ok=True)
    elsewhere = target.parent.parent / "elsewhere"
    if kind == "file":
        target.write_text("dear")
    elif kind == "folder":
        photos_in(target)
    elif kind == "Transformers' checkpoint":
        export_in(target, '{"epoch": 1.0, "global_step": 500, "log_history": []}')
    elif kind == "cut state":
        export_in(target, '{"optimi')
    elif kind == "link to an export":
        target.symlink_to(export_in(elsewhere))
    elif kind == "link to nothing":
        target.symlink_to(elsewhere)
    elif kind == "loop of links":
        target.symlink_to(target)


KINDS = ["file", "folder", "Transformers' checkpoint", "cut state", "link to an export", "link to nothing", "loop of links"]


def tree(root: Path) -> dict[str, str]:
    """Every name below `root`, with where a link leads and what a file holds."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        for path in sorted(root.rglob("*"))
    }


def said_of_exports(folders: dict[str, Any], **flags: Any) -> list[str]:  # noqa: F811
    problems = problems_of(folders | {"save_checkpoint": True} | flags)
    return [problem for problem in problems if problem.startswith(("--checkpoint-name", "--checkpoint-dir"))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_export_is_refused_at_the_start_and_never_deleted(folders: dict[str, Any], tmp_path: Path, kind: str) -> None:  # noqa: F811
    target = tmp_path / "out/latest"
    put(kind, target)
    (said,) = said_of_exports(folders, checkpoint_dir=str(target.parent))
    assert re.fullmatch(rf"--checkpoint-name latest: {target} (is|holds) .*, which would be deleted; use another name", said)
    before = tree(tmp_path / "out")
    with pytest.raises(OSError, match=f"{target} (is|holds) .*, which would be deleted"):
        checkpoint.refuse_to_delete(target)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("state", ['{"optimizer_step": 3}', '{"step": 40}', None, "empty"])
def test_earlier_exports_and_free_places_are_taken(folders: dict[str, Any], tmp_path: Path, state: str | None) -> None:  # noqa: F811
    """Also those of the run that goes on, of tools.sft, and `best`."""
    for name in ("latest", "best") if state else ():
        (tmp_path / "out" / name).mkdir(parents=True)
        if state != "empty":
            export_in(tmp_path / "out" / name, str(state))
    games = tmp_path / "held-out"
    shutil.copytree(folders["tw_game_dir"], games)
    assert not said_of_exports(folders, checkpoint_dir=str(tmp_path / "out"), eval_game_dir=str(games))


@pytest.mark.parametrize("name", [".", "..", "/", "a/b", "best", "best/", "./best", ".evaluated", "n" * 230])
def test_names_that_cannot_be_an_exports(folders: dict[str, Any], tmp_path: Path, name: str) -> None:  # noqa: F811
    (said,) = said_of_exports(folders, checkpoint_dir=str(tmp_path / "out"), checkpoint_name=name)
    assert said.startswith(f"--checkpoint-name {name}")


def test_the_longest_name_has_room_for_the_folder_beside_it(folders: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    (said,) = said_of_exports(folders, checkpoint_dir=str(tmp_path / "out"), checkpoint_name="n" * 999)
    most = int(re.search(r"over (\d+) bytes", said)[1])  # type: ignore[index]
    assert not said_of_exports(folders, checkpoint_dir=str(tmp_path / "out"), checkpoint_name="n" * most)
    checkpoint._beside(tmp_path / ("n" * most), "new").mkdir()


@pytest.mark.parametrize(
    ("name", "used", "place", "flag"),
    [
        ("latest", "model_path", "out/latest", "--checkpoint-name latest"),
        ("latest", "model_path", "link", "--checkpoint-name latest"),
        ("latest", "model_path", "out/best", "--checkpoint-dir"),
        ("latest", "eval_game_dir", "out/.evaluated/games", "--checkpoint-dir"),
        ("", "model_path", "out/step-000100", "--checkpoint-dir"),
        ("", "model_path", "out/step-000100-final", "--checkpoint-dir"),
        ("run", "log_dir", "out/run", "--checkpoint-name run"),
        ("run", "tw_game_dir", "out/run/games", "--checkpoint-name run"),
        ("logs", "log_dir", "out", "--checkpoint-name logs"),
    ],
)
def test_an_export_takes_no_place_that_the_run_needs(
    folders: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    name: str,
    used: str,
    place: str,
    flag: str,
) -> None:
    """Even where an earlier export lies, or nothing yet."""
    (tmp_path / "link").symlink_to(tmp_path / "out/latest")
    games = tmp_path / "held-out"
    shutil.copytree(folders["tw_game_dir"], games)
    flags: dict[str, Any] = {"eval_game_dir": str(games), "checkpoint_dir": str(tmp_path / "out"), "checkpoint_name": name}
    (said,) = said_of_exports(folders, **flags | {used: str(tmp_path / place)})
    assert said.startswith(flag)
    assert "which the export would replace; use another" in said
    for harmless in ("out/other", "out", "out/step-1", "elsewhere/latest"):
        assert used == "log_dir" or not said_of_exports(folders, **flags | {used: str(tmp_path / harmless)})


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of a user who is not root; the test goes on as that user."""
    folder = Path(tempfile.mkdtemp(prefix="accerl-nobody-", dir="/tmp"))
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if user == 0:
            os.seteuid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400])
def test_a_folder_that_cannot_be_looked_at_is_somebodys(nobody: Path, mode: int) -> None:
    """Its mode keeps this user from its names, from its files, or both. Also where the way to it is shut."""
    target = export_in(nobody / "out/latest")
    target.chmod(mode)
    assert taken_by(target) == "holds what cannot be looked at (Permission denied)"
    target.chmod(0o700)
    target.parent.chmod(mode & 0o400)
    assert taken_by(target) == "holds what cannot be looked at (Permission denied)"


def test_what_cannot_be_deleted_neither_fails_the_export_nor_the_next(nobody: Path, caplog: Any) -> None:
    """An earlier export with a folder in it that may not be emptied: it lies beside the new one, and people are told."""
    target = export_in(nobody / "latest")
    photos_in(target / "kept").chmod(0o500)
    for step in (4, 5):
        new = export_in(checkpoint._beside(target, "new"), json.dumps({"optimizer_step": step}))
        checkpoint.replace_folder(new, target)
        assert json.loads((target / "trainer_state.json").read_text()) == {"optimizer_step": step}
    assert "the one before could not be deleted and lies in" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_best_export_takes_no_place_but_its_own(kind: str, folders: dict[str, Any], tmp_path: Path, caplog: Any) -> None:  # noqa: F811
    target = tmp_path / "checkpoints/best"
    put(kind, target)
    (said,) = said_of_exports(folders, checkpoint_dir=str(target.parent), eval_game_dir=folders["tw_game_dir"])
    assert said.startswith(f"--checkpoint-dir {target.parent}: {target} ")
    before = tree(tmp_path / "checkpoints")
    (tmp_path / "eval").mkdir()
    best = BestExport(target.parent, tmp_path / "eval", rank=0, is_resumed=False)
    assert evaluated(best, tmp_path, 1, asked_at_step=4, began_at_step=4, win_rate=0.5)
    after = tree(tmp_path / "checkpoints")
    assert before.items() <= after.items()
    assert f"{target} could not be replaced" in caplog.text


def test_sft_says_at_once_that_it_could_not_save(tmp_path: Path) -> None:
    """Not after the training that would be lost."""
    photos_in(tmp_path / "out")
    photos_in(tmp_path / "out-step-7")
    words = ["--model-path", str(DEMO_MODEL), "--out", str(tmp_path / "out"), "--save-steps", "7"]
    said = [problem for problem in sft.problems_of(sft.build_parser().parse_args(words)) if problem.startswith("--out")]
    assert len(said) == 2
    assert all("holds something else than an export, which would be deleted; name another folder" in problem for problem in said)
    words[3] = str(DEMO_MODEL.parent)
    said = [problem for problem in sft.problems_of(sft.build_parser().parse_args(words)) if problem.startswith("--out")]
    assert any(f"--model-path {DEMO_MODEL} would be replaced" in problem for problem in said), said
