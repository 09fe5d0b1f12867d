"""Paths that the system refuses to look at: each is its own flag's problem, and everything else is said as ever."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accerl_mp import checks, games
from accerl_mp.cli import option_of
from accerl_mp.config import Config, resolve
from accerl_mp.games import GamesError, find_games
from accerl_mp.launcher import prepare

DEMO_MODEL = Path(checks.__file__).parent / "presets/demo_model"
LONG, DEEP = "a" * 300, "/tmp/" + "b/" * 3000
FLAGS = ("model_path", "chat_template", "tw_game_dir", "eval_game_dir", "tw_game_pattern", "log_dir", "checkpoint_dir", "checkpoint_name")
OTHERS = {"save_checkpoint": True, "eval_every_rounds": 3, "dtype": "float16", "infer_top_p": 0.5}
"""Two of them are problems that no path has to do with."""


def problems_of(values: dict[str, Any]) -> list[str]:
    typed = Config.from_flat(values)
    return checks.check(resolve(typed, num_gpus=0, log_dir="unused"), num_gpus=0, shm_free_bytes=1 << 40, typed=typed)


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    for folder in ("games", "held-out"):
        (tmp_path / folder).mkdir()
        for ending in (".z8", ".json"):
            (tmp_path / folder / f"{folder}{ending}").touch()
    (tmp_path / "template.jinja").touch()
    return {
        "model_path": str(DEMO_MODEL),
        "tw_game_dir": str(tmp_path / "games"),
        "eval_game_dir": str(tmp_path / "held-out"),
        "chat_template": str(tmp_path / "template.jinja"),
        "log_dir": str(tmp_path / "run"),
        "checkpoint_dir": str(tmp_path / "exports"),
    }


@pytest.fixture
def link_to_itself(tmp_path: Path) -> str:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return str(tmp_path / "loop")


@pytest.mark.parametrize("path", [LONG, f"{LONG}/{LONG}", DEEP, "link to itself", "not UTF-8"])
@pytest.mark.parametrize("field", [*FLAGS, "resume", "replay_samples"])
def test_a_path_that_cannot_be_looked_at_is_its_flags_problem(good: dict[str, Any], link_to_itself: str, field: str, path: str) -> None:
    value = {"link to itself": link_to_itself, "not UTF-8": os.fsdecode(b"/tmp/\xff/accerl")}.get(path, path)
    problems = problems_of(good | OTHERS | {field: value})
    rest = [problem for problem in problems if not problem.startswith(f"{option_of(field)} ")]
    assert [problem.split()[0] for problem in rest] == ["--dtype", "--infer-top-p"], problems
    # A state that is not there is no problem of the checks; and a folder may have any name that is not too long.
    may_be = field == "resume" or (path == "not UTF-8" and field in ("log_dir", "checkpoint_dir"))
    assert may_be or len(problems) > len(rest), problems


def test_every_flag_with_such_a_path_is_named_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [option_of(field) for field in (*FLAGS, "resume")]
    words = [word for option in named for word in (option, LONG)]
    code = prepare.main(["--answer", str(tmp_path / "answer"), "--", *words, "--save-checkpoint", "--learning-rate", "nan", "--nonsense"])
    text = capsys.readouterr().err
    assert code == 2, text
    assert [option for option in [*named, "--learning-rate", "--nonsense"] if f"- {option}" not in text] == [], text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [LONG, DEEP, "link to itself"])
@pytest.mark.parametrize("field", [field for field in FLAGS if field not in ("checkpoint_name", "checkpoint_dir")] + ["resume"])
def test_one_such_path_ends_the_start_with_2(
    good: dict[str, Any], link_to_itself: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, path: str
) -> None:
    values = good | {"chat_template": ""} | {field: link_to_itself if path == "link to itself" else path}
    words = [word for name, value in values.items() if value for word in (option_of(name), value)]
    code = prepare.main(["--answer", str(tmp_path / "answer"), "--", *words])
    text = capsys.readouterr().err
    assert code == 2, text
    assert f"- {option_of(field)} " in text


@pytest.fixture
def shut() -> Iterator[Path]:
    """A folder whose content only root may see; in the test this is another user."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="accerl-shut-"))
    folder.chmod(0o755)
    (folder / "inside").mkdir(mode=0o700)
    try:
        yield folder / "inside"
    finally:
        os.setresuid(0, 0, 0)
        shutil.rmtree(folder)


@pytest.mark.parametrize("field", [field for field in FLAGS if field not in ("tw_game_pattern", "checkpoint_name")])
@pytest.mark.parametrize("below", ["", "/below"])
def test_what_this_user_may_not_see_is_its_flags_problem(good: dict[str, Any], shut: Path, field: str, below: str) -> None:
    open_to_all = shut.parent / "open"
    for name in ("tw_game_dir", "eval_game_dir"):
        shutil.copytree(good[name], open_to_all / name)
        good[name] = str(open_to_all / name)
    shutil.copy(good["chat_template"], open_to_all)
    good |= {
        "chat_template": str(open_to_all / "template.jinja"),
        "log_dir": str(open_to_all / "run"),
        "checkpoint_dir": str(open_to_all / "out"),
    }
    shutil.copytree(DEMO_MODEL, open_to_all / "model")
    good["model_path"] = str(open_to_all / "model")
    open_to_all.chmod(0o777)
    assert [problem.split()[0] for problem in problems_of(good | OTHERS)] == ["--dtype", "--infer-top-p"], "and all is imported"
    os.setresuid(65534, 65534, 0)
    problems = problems_of(good | OTHERS | {field: f"{shut}{below}"})
    assert {problem.split()[0] for problem in problems} == {"--dtype", "--infer-top-p", option_of(field)}, problems


@pytest.mark.parametrize("closed", [".", "logs", "resume"])
def test_a_run_folder_that_this_user_may_not_look_into_is_refused_with_all_the_rest(
    shut: Path, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    run = shut.parent / "run"
    for folder in ("logs", "resume"):
        (run / folder).mkdir(parents=True)
    (run / closed).chmod(0o700)
    words = ["--log-dir", str(run), "--dtype", "float16", "--model-path", str(shut), "--resume", "auto"]
    os.setresuid(65534, 65534, 0)
    code = prepare.main(["--answer", str(shut.parent / "answer"), "--", *words])
    text = capsys.readouterr().err
    assert code == 2, text
    assert [flag for flag in ("--log-dir", "--dtype", "--model-path", "--tw-game-dir") if f"- {flag}" not in text] == [], text


def test_weights_that_this_user_may_not_read_are_named(good: dict[str, Any], shut: Path) -> None:
    shutil.copytree(DEMO_MODEL, shut.parent / "model")
    (shut.parent / "model/model.safetensors").chmod(0o600)
    values = {"model_path": str(shut.parent / "model"), "log_dir": str(shut.parent)}
    problems_of(values)
    os.setresuid(65534, 65534, 0)
    said = [problem for problem in problems_of(values) if problem.startswith("--model-path")]
    assert said == [f"--model-path {shut.parent / 'model'}: model.safetensors cannot be read: this user may not"]


def test_a_file_that_no_rule_expected_is_its_flags_problem_too(good: dict[str, Any], tmp_path: Path) -> None:
    """A folder in the place of the weights."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    problems = problems_of({"model_path": str(model), "log_dir": good["log_dir"], **OTHERS})
    assert f"--model-path {model}: {model}/model.safetensors cannot be looked at (Is a directory); name another one" in problems
    assert {"--tw-game-dir", "--eval-every-rounds", "--dtype", "--infer-top-p"} < {problem.split()[0] for problem in problems}


PATTERNS = (
    "*.z8",
    "*",
    "a*",
    "**/*.z8",
    "**/**/*.z8",
    "in/*.z8",
    "in/**/*.z8",
    "*/b.z8",
    "b.z8",
    "[ab].z8",
    "../in/*.z8",
    "**",
    ".*",
    "?.z8",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_games_are_found_as_a_recursive_glob_finds_them(tmp_path: Path, pattern: str) -> None:
    for name in ("a.z8", "b.z8", "a.json", ".hidden.z8", "in/b.z8", "in/in/c.z8", "in/x/y/d.z8", ".dot/a.z8", "x/in/e.z8", "f.z8/g.z8"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.z8").symlink_to("a.z8")
    (tmp_path / "broken.z8").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("in")
    found = find_games(str(tmp_path), pattern)
    assert [path.resolve() for path in found] == [path.resolve() for path in sorted({p for p in tmp_path.rglob(pattern) if p.is_file()})]
    assert len(found) == len(set(found))


def test_a_folder_in_which_almost_nothing_is_a_game_is_not_searched_to_its_end(
    good: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(games, "_MOST_OTHERS", 100)
    looked_at = []
    walk = os.walk
    monkeypatch.setattr(games.os, "walk", lambda top: (looked_at.append(entry[0]) or entry for entry in walk(top)))
    for field in ("tw_game_dir", "eval_game_dir"):
        looked_at.clear()
        said = [problem for problem in problems_of(good | {field: "/"}) if problem.startswith(f"{option_of(field)} /: over ")]
        assert len(said) == 1
        assert said[0].endswith("name the games' own folder")
        assert len(looked_at) < 500, "no more folders than files"
    for number in range(400):  # a large folder of games is none of these
        (tmp_path / "games" / f"{number}.z8").touch()
        (tmp_path / "games" / f"{number}.json").touch()
    assert problems_of(good) == []
    monkeypatch.setattr(games, "_MOST_FILES", 300)
    with pytest.raises(GamesError, match="over 802 files and folders, 401 games"):
        find_games(str(tmp_path / "games"), "*.z8")


def test_a_file_of_flags_with_zero_bytes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.args").write_bytes(b"--log-dir a\0b\n")
    assert prepare.main(["--answer", str(tmp_path / "answer"), "--", f"@{tmp_path / 'cut.args'}"]) == 2
    assert f"@{tmp_path / 'cut.args'}: cannot be read" in capsys.readouterr().err
