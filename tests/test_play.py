"""tools.play and tools.evaluate: flags, limits, best of several replies, a person at the keyboard, tables; at the end with a real vLLM."""

import asyncio
import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from chat_fixture import build_tokenizer
from games_fixture import games_dir  # noqa: F401
from scripted import build_player
from test_terminal import on_terminal

from accerl_mp.config import Config, ConfigError
from accerl_mp.rollout.env import EnvPool
from accerl_mp.tools import evaluate, game_files, human, local_engine, make_games, play, playing, policies, scores, terminal
from accerl_mp.tools.engine_flags import engine_config, flag_problems, list_played_games
from tests.sessions import command_of, processes_of, shared_memory_of, wait_until_gone

ROOT = Path(__file__).parent.parent
DEMO_MODEL = ROOT / "accerl_mp/presets/demo_model"
pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")
REFERENCE = (
    "--model-path m --game-dir g --game-pattern *.z8 --game-limit 5 --episodes 7 --max-episode-steps 9 --max-action-tokens 12 "
    "--temperature 0.5 --top-p 0.9 --num-samples 3 --history-steps 2 --collect-logprobs --fallback-action look --dtype bfloat16 "
    "--trust-remote-code --tensor-parallel-size 1 --enable-expert-parallel --gpu-memory-utilization 0.6 --max-model-len 900 "
    "--disable-prefix-caching --vllm-max-num-seqs 4 --vllm-max-num-batched-tokens 512 --seed 3 --verbose"
)


def record(*, won: bool, game: str = "a", **values: object) -> scores.Record:
    defaults = {"truncated": not won, "score": float(won), "max_score": 2.0, "num_turns": 4, "num_env_steps": 3, "num_invalid": 1}
    return {"game": game, "won": won, **defaults, **values}


def test_wilson_is_the_interval_of_the_score_test() -> None:
    for successes, trials in ((0, 20), (3, 10), (20, 20), (1, 1)):
        got = scores.wilson(successes, trials)
        assert got.value == successes / trials
        for end in (got.low, got.high):
            # The ends are the rates p with (rate - p)^2 = z^2 p (1 - p) / n; where the rate is 0 or 1 one end is the rate.
            assert (got.value - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / trials, abs=1e-9)
    assert scores.wilson(0, 20).high == pytest.approx(0.1611, abs=1e-4)
    assert (scores.wilson(45, 60).low, scores.wilson(45, 60).high) == pytest.approx((0.6277, 0.8422), abs=2e-4)
    assert math.isnan(scores.wilson(0, 0).value)


def test_the_normalised_score_is_a_ratio_of_sums_with_an_interval_around_it() -> None:
    got = scores.ratio_of([1, 0, 3], [2, 2, 4])
    assert got.value == 0.5
    assert got.low < 0.5 < got.high
    assert scores.ratio_of([1, 1], [2, 2]) == scores.Estimate(0.5, 0.5, 0.5)


def test_a_summary_counts_episodes_and_replies() -> None:
    found = scores.as_json([record(won=True), record(won=False, game="b", num_invalid=3)])
    assert (found["episodes"], found["games"]) == (2, 2)
    assert found["win_rate"]["value"] == 0.5
    assert found["invalid_rate"]["value"] == 0.5
    assert found["normalized_score"]["value"] == 0.25
    assert found["turns"]["value"] == 4
    assert "NaN" not in json.dumps(scores.as_json([record(won=True, max_score=0.0)]))


def test_every_flag_of_the_reference_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    args = play.build_parser().parse_args(REFERENCE.split())
    assert flag_problems(args) == []
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096, "num_experts": 8}')
    config = engine_config(policies.find_policy(tmp_path), args)
    assert (config.games.tw_max_episode_steps, config.inference.infer_max_tokens, config.run.seed) == (9, 12, 3)
    assert (config.games.history_mode, config.games.history_window_turns) == ("window", 3)
    assert (config.inference.vllm_max_model_len, config.games.tw_history_token_window) == (900, 899)
    assert (config.inference.vllm_max_num_seqs, config.inference.vllm_max_num_batched_tokens) == (12, 512)
    assert config.inference.disable_vllm_prefix_caching
    assert config.inference.enable_expert_parallel
    assert config.inference.gpu_memory_utilization == 0.6
    assert config.model.trust_remote_code
    assert (config.model.dtype, config.run.placement) == ("bfloat16", "dedicated")
    assert (args.episodes, args.game_limit, args.num_samples, args.top_p, args.temperature) == (7, 5, 3, 0.9, 0.5)
    assert args.collect_logprobs
    assert args.verbose


def test_help_is_grouped_and_shows_defaults() -> None:
    text = " ".join(play.build_parser().format_help().split())
    assert text.index("what is played:") < text.index("replies:") < text.index("vLLM:") < text.index("output:")
    assert "which files of it [*.z8]" in text
    assert "requests at a time; as many episodes are open [16]" in text


def test_flags_that_cannot_work_are_refused_together_with_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--game-dir g --episodes 0 --temperature -1 --top-p 0 --history-steps -1 --gpu-memory-utilization 2 --max-model-len 0"
    assert play.main([*words.split(), "--placement", "cpu"]) == 2
    shown = capfd.readouterr().err
    for part in ("--model-path is missing", "--episodes", "--temperature", "--top-p", "--history-steps", "--gpu-memory", "--max-model-len"):
        assert part in shown
    assert "--game-dir g: no such folder" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--temperature 2.5", "--temperature must be at most 2, got 2.5"),
        ("--temperature nan", "--temperature must be a finite number"),
        ("--top-p 1.01", "--top-p must be at most 1"),
        ("--seed -1", "--seed must be at least 0"),
        ("--seed 4294967296", "--seed must be at most 2147483647"),
        ("--max-model-len 5000", "--max-model-len 5000 is over the model's context of 4096 tokens"),
        ("--max-model-len 10", "--max-model-len 10 leaves no room for a prompt beside --max-action-tokens 16"),
        ("--max-action-tokens 4096", "leaves no room for a prompt beside --max-action-tokens 4096"),
        ("--enable-expert-parallel", "has no experts: leave it out"),
        ("--kv-cache-gib 0.001 --max-model-len 4000", "holds 460 tokens of this model"),
        ("--env nowhere:Env", "--env nowhere:Env: module nowhere cannot be imported"),
        ("--env nowhere", "is neither 'textworld' nor module:Class"),
        ("--chat-template nowhere", "--chat-template nowhere: no such file"),
        ("--game-pattern /x", "--game-pattern '/x': it must be a pattern of files inside --game-dir"),
        (f"--out {shlex.quote(__file__)}/out", "is a file; name another folder"),
    ],
)
def test_what_vllm_would_refuse_later_is_refused_at_once(
    words: str,
    message: str,
    games_dir: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    fixed = ["--model-path", str(DEMO_MODEL), "--game-dir", str(games_dir), "--placement", "cpu"]
    assert play.main([*fixed, *shlex.split(words)]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["", "3", '{"no_such_setting": 1}'])
def test_a_run_whose_settings_cannot_be_read_is_refused(damage: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"its args.json cannot be read"):
        policies.find_policy(tmp_path)


def test_without_a_flag_the_context_is_what_the_model_and_a_cpus_cache_have(tmp_path: Path) -> None:
    def context(**values: int) -> int:
        (tmp_path / "config.json").write_text(json.dumps(values))
        args = play.build_parser().parse_args(["--model-path", "m", "--game-dir", "g", "--placement", "cpu"])
        return engine_config(policies.find_policy(tmp_path), args).inference.vllm_max_model_len

    assert context(n_positions=1024) == 1024  # as GPT-2 calls it
    assert context(max_position_embeddings=10**6) == 32768
    qwen = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024}
    assert context(max_position_embeddings=40960, **qwen) == 4617


def test_what_a_tools_engine_died_of_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        "INFO start",
        "(Worker pid=1) Traceback",
        "(Worker pid=1) ValueError: too long",
        "(Core) ValueError: too long",
        "RuntimeError: x",
    ]
    assert terminal.causes_in(lines) == ["ValueError: too long", "RuntimeError: x"]
    assert terminal.causes_in(["nothing", "said"]) == ["nothing", "said"]
    log = tmp_path / "play.log"
    log.write_text("ValueError: of the last time\n")

    def die() -> None:
        with terminal.quiet(log, terminal.Terminal()):
            os.write(2, b"vllm.Broken: KeyError: 'weights'\n")
            raise RuntimeError("engine")

    with pytest.raises(terminal.ToolFailed, match="RuntimeError: engine"):
        die()
    shown = capfd.readouterr().err
    assert "KeyError: 'weights'" in shown
    assert "of the last time" not in shown


def test_a_run_folder_stands_for_its_newest_export_and_its_settings(tmp_path: Path) -> None:
    Config.from_flat({"tw_max_episode_steps": 6, "tw_history_token_window": 700}).save(tmp_path / "args.json")
    with pytest.raises(ConfigError, match="save-checkpoint"):
        policies.find_policy(tmp_path)
    for name, step in (("step-000010", 10), ("step-000002", 2), ("latest", 12), ("a-name", 20)):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(json.dumps({"optimizer_step": step}))
    assert [folder.name for folder in policies.list_exports(tmp_path)] == ["step-000002", "step-000010", "latest", "a-name"]
    assert policies.find_policy(tmp_path).folder.name == "a-name"
    export = policies.find_policy(tmp_path / "checkpoints/step-000010")
    assert export.run_dir == tmp_path
    args = play.build_parser().parse_args(["--model-path", "m", "--game-dir", "g", "--placement", "cpu"])
    config = engine_config(export, args)
    assert (config.games.tw_max_episode_steps, config.games.tw_history_token_window, config.run.placement) == (6, 700, "cpu")
    with pytest.raises(ConfigError, match="neither config"):
        policies.find_policy(tmp_path / "checkpoints")


def best_of(replies: list[str], num_samples: int) -> playing.BestOf:
    """A player whose k-th request gets the k-th reply."""
    player = build_player(build_tokenizer(), lambda _episode, asked: replies[asked])
    return playing.BestOf(**vars(player), num_samples=num_samples)


def test_best_of_several_takes_the_first_reply_that_names_a_command(games_dir: Path) -> None:  # noqa: F811
    seat = playing.Seat(path=str(games_dir / "room-2.z8"), number=0, seed=1, temperature=1.0)

    def one(replies: list[str], num_samples: int) -> scores.Record:
        return asyncio.run(playing.play_seats(best_of(replies, num_samples), [seat], num_open=1, on_end=lambda _record: None))[0]

    found = one(["dance", "take coin", "look"], 3)
    assert [turn["command"] for turn in found["turns"]] == ["take coin"]
    assert (found["won"], found["num_invalid"]) == (True, 0)
    found = one(["dance", "sing", "take coin", "look"], 2)
    assert [turn["reply"] for turn in found["turns"]] == ["dance", "take coin"]
    assert found["num_invalid"] == 1


def test_every_one_of_several_replies_is_drawn_by_another_seed(games_dir: Path) -> None:  # noqa: F811
    player = best_of(["dance"] * 6, 3)
    player.config = player.config.replace(tw_max_episode_steps=2)
    seat = playing.Seat(path=str(games_dir / "room-2.z8"), number=0, seed=1, temperature=1.0)
    asyncio.run(playing.play_seats(player, [seat], num_open=1, on_end=lambda _record: None))
    seeds = [request["seed"] for request in player.inference.asked]
    assert None not in seeds
    assert len(set(seeds)) == len(seeds) == 6


def test_records_come_in_the_order_of_the_seats_and_a_broken_game_is_named(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    broken = tmp_path / "broken.z8"
    broken.write_bytes(b"no story")
    broken.with_suffix(".json").write_text("{}")
    games = [str(games_dir / "room-2.z8"), str(broken)]
    seats = playing.plan_seats(games, 5, seed=1, temperature=1.0)
    assert len({seat.seed for seat in seats}) == 5
    player = build_player(build_tokenizer(), lambda _episode, _turn: "take coin")
    player.envs = EnvPool(2)
    ended: list[scores.Record] = []
    records = asyncio.run(playing.play_seats(player, seats, num_open=2, on_end=ended.append))
    assert [found["episode"] for found in records] == [0, 1, 2, 3, 4]
    assert ["error" in found for found in records] == [False, True, False, True, False]
    assert "no Z-machine story" in records[1]["error"]
    assert len(ended) == 5
    assert "logprobs" in records[0]["turns"][0]
    assert "logprobs" not in playing.without_logprobs(records[0])["turns"][0]


def run_tool(
    name: str, *words: str, typed: str | None = None, timeout_s: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"accerl_mp.tools.{name}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_a_person_plays_through_the_same_prompt_and_parser(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["--human", "--game-dir", str(games_dir), "--game-pattern", "room-2.z8", "--out", str(tmp_path)]
    done = run_tool("play", *words, typed="dance\n> Take Coin.\n")
    assert done.returncode == 0, done.stderr
    assert human.SYSTEM in done.stdout
    assert "- take coin" in done.stdout
    assert '"dance" is not listed.' in done.stdout
    assert "won, score 3 of 3" in done.stdout
    line = json.loads((tmp_path / "episodes.jsonl").read_text())
    assert (line["won"], line["num_turns"], line["num_invalid"]) == (True, 2, 1)
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 1
    assert "\x1b" not in done.stdout + done.stderr


def test_a_person_may_type_a_commands_number_and_is_not_asked_what_nobody_answers(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["--human", "--game-dir", str(games_dir), "--game-pattern", "room-2.z8", "--episodes", "2", "--out", str(tmp_path)]
    first = run_tool("play", *words, typed="0\n99\n").stdout
    assert "[turn 1 of 20] Objective: " in first
    assert all(f'"{number}" is not listed.' in first for number in ("0", "99"))
    number = re.search(r"^ *(\d+) - take coin$", first, re.MULTILINE)[1]
    done = run_tool("play", *words, typed=f" {number} \n")
    assert done.returncode == 0
    assert "left after 0 turns of game 2 of 2\n" in done.stderr
    assert "Game 1 of 2: room-2" in done.stdout
    assert "The End" in done.stdout
    assert "won, score 3 of 3" in done.stdout
    assert "RESTART" not in done.stdout
    assert "Game 2 of 2: room-2" in done.stdout
    assert "Ctrl+D leaves" in done.stdout
    assert json.loads((tmp_path / "episodes.jsonl").read_text())["num_invalid"] == 0


def test_what_a_person_reads_breaks_between_words() -> None:
    text = "You are in the living room.\n\n   1 - take a rather long thing\n" + "x" * 25
    lines = human.wrapped(text, 20).split("\n")
    assert max(map(len, lines)) <= 20
    assert "x" * 20 in lines
    assert " ".join("".join(lines).split()) == " ".join(text.replace("\n", "").split())
    assert lines[:3] == ["You are in the ", "living room.", ""]


def test_a_person_may_leave(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    done = run_tool("play", "--human", "--game-dir", str(games_dir), "--episodes", "2", "--out", str(tmp_path), typed="dance\n")
    assert (done.returncode, done.stderr) == (0, "left after 1 turn of game 1 of 2\n")


def test_games_in_the_layout_of_the_ftwp_archive_are_taken_as_they_are(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    for split, game in (("train", "room-0"), ("valid", "room-1"), ("test", "room-2")):
        folder = tmp_path / "games" / split
        folder.mkdir(parents=True)
        for suffix in (".z8", ".json"):
            (folder / f"tw-cooking-{game}{suffix}").symlink_to(games_dir / f"{game}{suffix}")
        (folder / f"tw-cooking-{game}.ulx").touch()  # the archive has these beside them
    assert [Path(game).parent.name for game in list_played_games(str(tmp_path / "games"), "*.z8")] == ["test", "train", "valid"]
    assert len(list_played_games(str(tmp_path / "games/train"), "*.z8")) == 1
    with pytest.raises(ConfigError, match="no file matches"):
        list_played_games(str(tmp_path / "games"), "*.z5")
    with pytest.raises(ConfigError, match="no such folder"):
        list_played_games(str(tmp_path / "nowhere"), "*.z8")


def test_a_games_kind_is_read_from_how_challenges_are_named(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Not from what a game says of itself, nor from the random letters that TextWorld calls any other game."""
    names = {
        "tw-cooking-recipe1+cook": "cooking",
        "tw-coin_collector-x": "coin-collector",
        "tw-simple-r": "simple",
        "tw-simply": "textworld",
    }
    for name, kind in names.items():
        game = json.loads((games_dir / "room-0.json").read_text())
        game["metadata"] |= {"uuid": name, "desc": "Generated with care."}
        (tmp_path / "game.json").write_text(json.dumps(game))
        assert game_files.read_facts(tmp_path / "game.z8").kind == kind
    facts = game_files.read_facts(games_dir / "room-2.z8")
    assert (facts.kind, facts.num_commands) == ("textworld", 0)
    assert evaluate.kind_and_length({"path": str(games_dir / "room-2.z8")}) == "textworld, length unknown"


def test_evaluate_names_all_wrong_folders_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path / "a"), str(tmp_path / "b"), "--placement", "cpu", "--temperatures", "-1"]) == 2
    assert "--temperatures" in capfd.readouterr().err
    assert evaluate.main([str(tmp_path / "a"), str(tmp_path / "b"), "--placement", "cpu"]) == 2
    shown = capfd.readouterr().err
    assert f"{tmp_path / 'a'}: no such folder" in shown
    assert f"{tmp_path / 'b'}: no such folder" in shown


@pytest.mark.parametrize("limits", [(20, 6), (6, 6)])
def test_columns_of_unequal_turn_limits_say_so(limits: tuple[int, int], capfd: pytest.CaptureFixture[str]) -> None:
    """A model folder has 20 turns, a run its own: the table must not look as if one were better."""
    policy = policies.Policy("a", Path("a"), None)
    records = [{"won": True, "score": 1, "max_score": 1, "num_invalid": 0, "num_turns": 2, "num_env_steps": 2, "path": "x.z8"}]
    records = [record | {"truncated": False, "lost": False} for record in records]
    columns = {evaluate.Column(place, policy, 1.0, limit): records for place, limit in enumerate(limits)}
    evaluate.show(columns, terminal.Terminal())
    shown = "".join(capfd.readouterr())
    is_unequal = limits[0] != limits[1]
    assert ("--max-episode-steps N gives all the same" in shown) == is_unequal
    assert [f"at most {limit} turns" in shown for limit in limits] == [is_unequal] * 2


def test_the_models_stand_last_and_each_kind_on_a_line_at_80_columns() -> None:
    """What a terminal of 24 lines still shows of four columns and twenty kinds of games."""
    code = """
from pathlib import Path
from accerl_mp.tools import evaluate, policies, terminal
evaluate.kind_and_length = lambda record: record["path"]
record = {"won": True, "score": 1, "max_score": 1, "num_invalid": 0, "num_turns": 2, "num_env_steps": 2, "truncated": False, "lost": False}
records = [record | {"path": f"kind {number}", "turns": []} for number in range(20)]
policy = policies.Policy("runs/TextWorld_FSDP/20261130_112233", Path("a"), None)
evaluate.show({evaluate.Column(place, policy, 1.0, 6): records for place in range(4)}, terminal.Terminal())
"""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in on_terminal(code, columns=80, TERM="xterm").splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.count("1.00") for line in lines if line.startswith("kind ")] == [4] * 20
    assert [line.split()[0] for line in lines[-24:] if line.startswith("(")] == ["(1)", "(2)", "(3)", "(4)"]
    assert sum("win rate 1.00 [0.84, 1.00]" in line for line in lines[-24:]) == 4


@pytest.mark.parametrize(
    ("tool", "words", "expected"),
    [
        (
            play,
            "--episode 4 --seed x --dtype fp8 --num-samples 0",
            "--seed x: expected a whole number|--dtype fp8: expected one of auto|--episode: no such flag; did you mean --episodes?|"
            "--game-dir is missing|--num-samples must be at least 1, got 0|--model-path is missing",
        ),
        (
            evaluate,
            "nowhere --seeds 1 x --zzz --gpu-memory-utilization y --temperatures -1",
            "--seeds x: expected a whole number|--gpu-memory-utilization y: expected a number|--zzz: no such flag; --help lists them|"
            "--temperatures must be at least 0|nowhere: no such folder",
        ),
        (evaluate, "--seed 1", "--seed: no such flag; did you mean --seeds?"),
        (evaluate, "--seeds 1", "RUN_OR_MODEL is missing"),
        (play, "--zzz 3 --game-dir", "--game-dir: expected one argument|--zzz: no such flag; |--model-path is missing"),
        (
            evaluate,
            "m --seeds --gpu-memory-utilization y",
            "--seeds: expected at least one argument|--gpu-memory-utilization y: expected a number|m: no such folder",
        ),
        (play, "--foo -1", "--foo: no such flag; |--model-path is missing"),
        (play, "stray --zzz 3", "'stray' belongs to no flag|--zzz: no such flag; |--game-dir is missing"),
        (
            make_games,
            "stray -1e5 --ot=3 last --",
            "'stray' belongs to no flag|'-1e5' belongs to no flag|--ot: no such flag|'last' belongs to no flag",
        ),
    ],
)
def test_unknown_flags_get_a_guess_and_all_problems_are_said_at_once(
    tool: ModuleType, words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = tool.main(words.split())
    except SystemExit as end:
        code = end.code
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("- ")]
    assert code == 2
    for start in expected.split("|"):
        assert any(line.startswith(f"- {start}") for line in said), (start, said)
    assert len(said) >= expected.count("|") + 1
    assert not any(re.match(r"- (-[0-9.e]+|--): no such flag|- '3'", line) for line in said), "numbers and values are no flags"


@pytest.mark.vllm
@pytest.mark.timeout(320)
def test_play_with_a_real_engine(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["--model-path", str(DEMO_MODEL), "--game-dir", str(games_dir), "--placement", "cpu", "--out", str(tmp_path / "out")]
    done = run_tool("play", *words, "--episodes", "6", "--max-episode-steps", "4", "--collect-logprobs", NO_COLOR="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "INFO" not in done.stdout + done.stderr, "vLLM's talk belongs in play.log"
    assert "playing: 6 of 6" in done.stderr
    assert "all games" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "out/episodes.jsonl").read_text().splitlines()]
    assert sorted(line["episode"] for line in lines) == list(range(6))
    assert sum(turn["command"] is not None for line in lines for turn in line["turns"]) > 6, "the demo's model mostly says commands"
    assert all(len(turn["token_ids"]) == len(turn["logprobs"]) > 0 for line in lines for turn in line["turns"])
    assert json.loads((tmp_path / "out/summary.json").read_text())["episodes"] == 6
    assert (tmp_path / "out/play.log").stat().st_size > 0


def test_ctrl_c_ends_a_start_that_swallows_it() -> None:
    """As vLLM's does: it takes a KeyboardInterrupt for nothing, and waits on."""
    before = signal.getsignal(signal.SIGINT)

    def start() -> None:
        with local_engine._interruptible():
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it goes on")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert signal.getsignal(signal.SIGINT) is before


def start_play(games: Path, out: Path, until: str) -> subprocess.Popen:
    """Many episodes; returns while vLLM is being started, or once episodes end."""
    words = ["--model-path", str(DEMO_MODEL), "--game-dir", str(games), "--placement", "cpu", "--out", str(out), "--episodes", "5000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "accerl_mp.tools.play", *words]
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    played, end = out / "episodes.jsonl", time.monotonic() + 300
    while running.poll() is None and time.monotonic() < end:
        has_come = len(processes_of(running.pid)) >= 3 if until == "starting" else played.exists() and played.stat().st_size
        if has_come or until == "nothing":
            break
        time.sleep(0.2)
    return running


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["ctrl-c", "kill -9"])
@pytest.mark.parametrize("until", ["starting", "playing"])
def test_nothing_is_left_of_play_however_it_ends(end: str, until: str, games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    running = start_play(games_dir, tmp_path, until)
    try:
        assert running.poll() is None, running.communicate()[0]
        assert len(processes_of(running.pid)) >= 3, "vLLM's own processes are looked at too"
        shared_memory = shared_memory_of(running.pid)
        if end == "ctrl-c":
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
            shown = running.communicate(timeout=60)[0]
            assert running.returncode == 130, shown
            assert shown.splitlines()[-1] == f"stopped; what was played is in {tmp_path}"
            assert "Traceback" not in shown
        else:
            running.kill()
            running.communicate(timeout=60)
        assert wait_until_gone(running.pid, shared_memory) == []
    finally:
        for process in processes_of(running.pid):
            process.kill()
    for line in (tmp_path / "episodes.jsonl").read_text().splitlines():
        assert json.loads(line)["game"], "every line that was written is whole"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_vllm_leaves_none_of_its_own_files(num_workers: int, games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Of an engine that no supervisor sweeps: the memory that its CPU workers share, and the file over which they met."""
    temporary = Path(tempfile.mkdtemp(prefix="accerl-test-", dir="/tmp"))  # short enough for sockets
    words = ["--model-path", str(DEMO_MODEL), "--game-dir", str(games_dir), "--placement", "cpu", "--out", str(tmp_path / "out")]
    words += ["--episodes", "3", "--tensor-parallel-size", str(num_workers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "accerl_mp.tools.play", *words]
    with (tmp_path / "output.txt").open("wb") as output:
        running = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    shared: set[str] = set()
    end = time.monotonic() + 360
    while running.poll() is None and time.monotonic() < end:
        shared |= shared_memory_of(running.pid)
        time.sleep(0.2)
    assert running.wait(20) == 0, (tmp_path / "output.txt").read_text()
    assert shared
    assert any("vllm_dist_" in name for name in shared) == (num_workers > 1)
    assert wait_until_gone(running.pid, shared) == []
    left = [path.name for path in temporary.iterdir() if path.name.startswith(("vllm", "accerl"))]
    shutil.rmtree(temporary)
    assert left == []


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_a_process_that_vllm_has_just_spawned_does_not_outlive_a_killed_play(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """It is held where it begins, before it could ask the kernel to end it with its parent."""
    for attempt in range(5):
        running = start_play(games_dir, tmp_path / str(attempt), "nothing")
        try:
            spawned = held_where_it_begins(running)
            if spawned is not None:
                running.kill()
                running.communicate(timeout=60)
                spawned.resume()
                assert wait_until_gone(running.pid) == []
                return
        finally:
            for process in processes_of(running.pid):
                process.kill()
            running.wait(60)
            running.stdout.close()
    pytest.fail("it was always found too late")


def held_where_it_begins(running: subprocess.Popen) -> psutil.Process | None:
    """vLLM's first spawned process, suspended, with all that it is to run in its pipe (else it ends by itself).

    None: it has come too far. The kernel is asked by way of ctypes.
    """
    end = time.monotonic() + 100
    while not (spawned := [process for process in processes_of(running.pid) if "spawn_main" in command_of(process)]):
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)
    spawned[0].suspend()
    if any("_ctypes" in file.path for file in spawned[0].memory_maps()):
        return None
    pipe = re.search(r"pipe_handle=(\d+)", command_of(spawned[0]))
    reader = os.open(f"/proc/{spawned[0].pid}/fd/{pipe[1]}", os.O_RDONLY | os.O_NONBLOCK)
    while not int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), "little"):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.close(reader)
    return spawned[0]


def test_a_greedy_episode_counts_once_and_sampled_ones_each() -> None:
    records = [{"path": path, "turns": [{"reply": reply}], "seed_of": seed} for seed, path, reply in ("1ax", "1bx", "2ax", "2by")]
    assert evaluate.distinct(0.0, records) == [records[0], records[1], records[3]]
    assert evaluate.distinct(1.0, records) == records


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(820)
def test_evaluate_compares_models_and_repeats_itself(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    words = [str(DEMO_MODEL), str(DEMO_MODEL), "--eval-game-dir", str(games_dir), "--placement", "cpu", "--max-episode-steps", "4"]
    words += ["--seeds", "1", "2", "--temperatures", "0", "1", "--json", str(tmp_path / "out.json")]
    done = run_tool("evaluate", *words, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["temperature"] for result in results] == [0.0, 1.0, 0.0, 1.0]
    assert {result["max_episode_steps"] for result in results} == {4}
    assert [result["all"]["episodes"] for result in results] == [3, 6, 3, 6], "a greedy episode repeats, and counts once"
    # The same model, games and seeds: the greedy rows agree, and so do the two seeds within them.
    assert results[0]["all"] == results[2]["all"]
    assert results[0]["by_seed"]["1"] == results[0]["by_seed"]["2"]
    assert set(results[0]["by_kind_and_length"]) == {"textworld, 1 command", "textworld, 2 commands", "textworld, length unknown"}
    by_kind, _, table = done.stdout.partition("95 % intervals in brackets")
    assert by_kind.startswith("win rate by kind and length; (1) is the first model below")
    assert all(f"({number}) " in table and f"({number})" in by_kind for number in range(1, 5)), "columns are numbered as the rows"
