"""tools.play and tools.evaluate: flags, limits, best of several replies, a person at the keyboard, tables; at the end with a real vLLM."""

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat_fixture import build_tokenizer
from games_fixture import games_dir  # noqa: F401
from scripted import build_player

from accerl_mp.config import Config, ConfigError
from accerl_mp.rollout.env import EnvPool
from accerl_mp.tools import evaluate, human, play, playing, policies, scores
from accerl_mp.tools.engine_flags import engine_config, list_played_games

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
    assert play.problems_of(args) == []
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
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
    assert "which files of it (default: *.z8)" in text
    assert "requests at a time; as many episodes are open (default: 16)" in text


def test_flags_that_cannot_work_are_refused_together_with_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--game-dir g --episodes 0 --temperature -1 --top-p 0 --history-steps -1 --gpu-memory-utilization 2 --max-model-len 0"
    assert play.main([*words.split(), "--placement", "cpu"]) == 2
    shown = capfd.readouterr().err
    for part in ("--model-path is missing", "--episodes", "--temperature", "--top-p", "--history-steps", "--gpu-memory", "--max-model-len"):
        assert part in shown
    assert "\x1b" not in shown


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


def test_a_person_may_leave(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    done = run_tool("play", "--human", "--game-dir", str(games_dir), "--out", str(tmp_path), typed="")
    assert done.returncode == 1
    assert "no episode was played" in done.stderr


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
        list_played_games(str(tmp_path / "nowhere"), "*.z8")


def test_evaluate_names_all_wrong_folders_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path / "a"), str(tmp_path / "b"), "--placement", "cpu", "--temperatures", "-1"]) == 2
    assert "--temperatures" in capfd.readouterr().err
    assert evaluate.main([str(tmp_path / "a"), str(tmp_path / "b"), "--placement", "cpu"]) == 2
    shown = capfd.readouterr().err
    assert f"{tmp_path / 'a'}: no such folder" in shown
    assert f"{tmp_path / 'b'}: no such folder" in shown


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
    assert [result["all"]["episodes"] for result in results] == [6] * 4
    # The same model, games and seeds: the greedy rows agree, and so do the two seeds within them.
    assert results[0]["all"] == results[2]["all"]
    assert results[0]["by_seed"]["1"] == results[0]["by_seed"]["2"]
    assert set(results[0]["by_kind_and_length"]) == {"textworld, 1 commands", "textworld, 2 commands"}
    assert "win rate by kind and length" in done.stdout
