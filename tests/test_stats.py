"""The stats process: reductions against hand-computed values, files read back, the sentence about the bottleneck."""

import ast
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams_metadata

from accerl_mp.config import Config
from accerl_mp.recovery import Start, folder_name, state_text
from accerl_mp.stats import events, tags
from accerl_mp.stats.__main__ import DRAIN_QUIET_S, drain, trainer_closes
from accerl_mp.stats.bottleneck import NUM_ROUNDS, Doctor, Situation, bottleneck, situation
from accerl_mp.stats.collector import SETTLE_S, Collector
from accerl_mp.stats.status import Status
from accerl_mp.stats.status_file import read_status
from accerl_mp.stats.windows import EpisodeWindow, RoundSums
from accerl_mp.stats.writer import AppendFile, MetricFiles
from accerl_mp.tools.run_folder import RunFolder
from accerl_mp.tools.top import read_frame
from accerl_mp.tools.top_screen import Screen
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import MetricsSender
from accerl_mp.transport.health import STATES, HealthTable
from tests.saved_states import state_content

REFERENCE_TAGS = """
TextWorld/NormalizedScore TextWorld/WinRate TextWorld/InvalidActionRate Replay/FillRatio Replay/TrainSampleTrainerVersionLagMean
Rollout/ActiveWorkers Train/Loss KL/OldNewK3TokenMean Train/LearningRate Train/TokensPerSec Train/OptimizerStepsPerSec Clip/PPOClipFrac
Infer/TokensPerSec Sync/ElapsedSeconds TextWorld/EnvStepsMean Train/LossMeanAcrossRanks Train/PackTokenUtilization Train/PackSampleCount
Train/PackMaxSequenceLength Train/PackCpuMilliseconds
""".split()


def episode(number: int = 0, **changes: Any) -> dict[str, Any]:
    """An EpisodeRecord."""
    record = {
        "episode_id": number, "group_id": 0, "game_id": 0, "game": "a.z8", "kind": "train", "worker": 0, "won": False, "lost": False,
        "truncated": False, "score": 0, "max_score": 1, "num_turns": 4, "num_env_steps": 3, "num_invalid": 1, "episode_return": 0.0,
        "reward": 0.0, "num_tokens": 100, "num_trained": 10, "seconds": 2.0, "oldest_version": 0, "newest_version": 0,
    }  # fmt: skip
    return record | changes


def collector_in(folder: Path, lines: list[str] | None = None, **flags: Any) -> tuple[Collector, MetricFiles]:
    config = Config.from_flat({"grpo_group_size": 2, "placement": "cpu"} | flags)
    files = MetricFiles(folder)
    say = lines.append if lines is not None else print
    collector = Collector(config, files, Status(folder), say=say)
    collector.start_clock(0.0)
    return collector, files


def values(source: str = "trainer/0", **extra: Any) -> dict[str, Any]:
    return {"kind": "values", "source": source} | extra


def round_record(step: int, version: int, **extra: Any) -> dict[str, Any]:
    return {"kind": "round", "source": "trainer/0", "step": step, "version": version, "time": 1000.0 + step} | extra


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


# The table


def test_every_tag_of_the_reference_is_in_the_table() -> None:
    assert len(REFERENCE_TAGS) == 20
    assert [tag for tag in REFERENCE_TAGS if tag not in tags.TAGS] == []


def test_every_row_is_complete_and_unique() -> None:
    assert len(tags.TAGS) == len(tags._ROWS)
    for tag in tags.TAGS.values():
        assert tag.when in tags.CONDITIONS, tag
        assert tag.unit, tag
        assert tag.meaning, tag
        assert not tag.name.startswith("Time/"), "Time/<role>/<phase> is declared once, by its form"


def test_which_tags_apply_follows_from_the_settings() -> None:
    grpo = tags.expected(Config.from_flat({"rl_algorithm": "grpo", "train_packing": "padded", "clip_mode": "gipo"}))
    ppo = tags.expected(Config.from_flat({"rl_algorithm": "ppo", "train_packing": "varlen", "clip_mode": "ppo"}))
    assert "GRPO/GroupRewardStd" in grpo - ppo
    assert "PPO/RolloutTokenRewardMean" in ppo - grpo
    assert {"Train/PackSampleCount", "Clip/PPOClipFrac"} <= ppo - grpo
    assert {"TextWorld/WinRate", "Train/Loss", "Sync/ElapsedSeconds"} <= ppo & grpo
    assert not {tag for tag in ppo | grpo if tag.startswith("Eval/")}, "an evaluation isn't part of every round"


def test_every_tag_that_the_source_names_is_in_the_table() -> None:
    """A role that sends a tag declares it: nothing reaches a reader without a unit and a meaning."""
    form = re.compile(r"(TextWorld|Eval|Rollout|Ingest|GRPO|PPO|Replay|Train|KL|Clip|Infer|Sync|Stats)/[A-Z]\w+")
    named = {
        node.value
        for path in Path(tags.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and form.fullmatch(node.value)
    }
    assert sorted(tag for tag in named if tags.lookup(tag) is None) == []
    assert len(named) > 50


def test_the_markdown_table_has_a_row_for_each_tag() -> None:
    rows = tags.markdown().splitlines()
    assert len(rows) == 2 + len(tags.TAGS) + len(tags.HISTOGRAMS) + 1
    assert all(row.count("|") == 7 for row in rows)


# Reductions


def reduced(tag: str, *records: tuple[str, tuple[float, float, float]], round_s: float = 10.0) -> float:
    sums = RoundSums()
    for source, value in records:
        sums.add_all({tag: value}, source, 0.0)
    return sums.reduce(round_s)[tag]


def test_a_mean_weights_each_record_by_its_count() -> None:
    assert reduced("Train/Loss", ("trainer/0", (6.0, 3, 4.0)), ("trainer/1", (2.0, 1, 2.0))) == 2.0


def test_a_ratio_divides_sums_by_sums() -> None:
    # 8 of 10 slots and 1 of 30: not the mean of 0.8 and 0.033
    assert reduced("Replay/FillRatio", ("ingest/0", (8, 10, 8)), ("ingest/0", (1, 30, 1))) == 9 / 40


def test_sums_maxima_and_newest_values() -> None:
    records = (("trainer/0", (4.0, 2, 3.0)), ("trainer/1", (5.0, 1, 5.0)), ("trainer/0", (1.0, 1, 1.0)))
    assert reduced("Replay/Expired", *records) == 10.0
    assert reduced("Replay/PolicyLagOldestMax", *records) == 5.0
    assert reduced("Train/LearningRate", *records) == 1.0


def test_a_rate_is_added_over_the_processes() -> None:
    # Two engines: 300 tokens in 3 s, and 100 in 2 s.
    records = (("inference/0", (100.0, 1, 0.0)), ("inference/0", (200.0, 2, 0.0)), ("inference/1", (100.0, 2, 0.0)))
    assert reduced("Infer/TokensPerSec", *records) == 150.0


def test_nothing_to_divide_by_gives_no_number() -> None:
    sums = RoundSums()
    sums.add("Train/Loss", "trainer/0", 0.0, 0)
    assert sums.reduce(1.0) == {}


def test_a_share_of_time_is_taken_from_the_wall_time_of_all_its_processes() -> None:
    assert reduced("Time/trainer/wait", ("trainer/0", (6.0, 3, 4.0)), ("trainer/1", (2.0, 1, 2.0)), round_s=10.0) == 0.4


def test_a_share_is_measured_from_report_to_report_and_is_at_most_one() -> None:
    sums = RoundSums()
    sums.add_all({"Time/rollout/env": (1.0, 1, 1.0)}, "rollout/0", now_s=100.0)
    assert sums.reduce(10.0) == {"Time/rollout/env": 0.1}
    sums.add_all({"Time/rollout/env": (6.0, 1, 1.0), "Time/rollout/reply": (90.0, 8, 20.0)}, "rollout/0", now_s=112.0)
    assert sums.reduce(10.0) == {"Time/rollout/env": 0.5, "Time/rollout/reply": 1.0}


def test_sums_start_again_after_a_round() -> None:
    sums = RoundSums()
    sums.add("Replay/Expired", "trainer/0", 3.0)
    assert sums.reduce(1.0) == {"Replay/Expired": 3.0}
    assert sums.reduce(1.0) == {}


# The window


def test_the_window_takes_ratios_of_sums() -> None:
    window = EpisodeWindow(10, 600.0)
    window.add(episode(1, won=True, score=3, max_score=3, num_turns=2, num_env_steps=2, num_invalid=0), 0.0)
    window.add(episode(2, score=0, max_score=1, num_turns=8, num_env_steps=3, num_invalid=5, truncated=True), 0.0)
    got = window.values(0.0)
    assert got["TextWorld/WinRate"] == 0.5
    assert got["TextWorld/NormalizedScore"] == 3 / 4
    assert got["TextWorld/InvalidActionRate"] == 5 / 10
    assert got["TextWorld/EnvStepsMean"] == 2.5
    assert got["Rollout/TruncatedRate"] == 0.5
    assert got["Rollout/TurnsMean"] == 5.0


def test_old_episodes_leave_the_window() -> None:
    window = EpisodeWindow(3, 600.0)
    for number in range(6):
        window.add(episode(number, won=number >= 3), 0.0)
    assert window.values(0.0)["TextWorld/WinRate"] == 1.0
    assert len(window) == 3


def test_an_episode_that_is_played_again_is_the_newest() -> None:
    window = EpisodeWindow(3, 600.0)
    for number in (1, 2, 3, 1, 4):
        window.add(episode(number), 0.0)
    assert [one["episode_id"] for one in window.episodes()] == [3, 1, 4]


def test_evaluation_episodes_never_enter_the_window() -> None:
    window = EpisodeWindow(3, 600.0)
    window.add(episode(1, kind="eval", won=True, worker=7), 0.0)
    assert window.values(0.0) == {"Rollout/ActiveWorkers": 1.0, "Rollout/WindowEpisodes": 0.0}
    window.add(episode(2, won=False), 0.0)
    assert window.values(0.0)["TextWorld/WinRate"] == 0.0


def window_after(
    folder: Path,
    numbers: range,
    *,
    won: bool,
    state: Path | None = None,
    begun: int | None = None,
    num_restarts: int = 0,
    is_killed: bool = False,
) -> dict[str, Any]:
    """A start of the run in `folder` plays these episodes in one round; its line of metrics.jsonl."""
    paths = RunPaths(folder)
    folder.mkdir(exist_ok=True)
    paths.args.write_text("{}")
    os.utime(paths.args, (1.7e9 + (numbers.start if begun is None else begun),) * 2)  # when this start began
    Start(state=state and str(state), num_restarts=num_restarts).save(paths.resume)
    collector, files = collector_in(folder, metrics_window_size=100)
    for number in numbers:
        collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(number, won=won, worker=3)}, 0.0)
    collector.take(round_record(numbers.stop, 1), 1.0)
    collector.close_due(2.0)
    if not is_killed:
        collector.finish(3.0)
    files.close()
    return lines_of(folder)[-1]


def state_of(run: Path, *, low_water: int, done_above: tuple[int, ...] = ()) -> Path:
    """In which these groups of two episodes are done."""
    folder = run / "resume" / folder_name(low_water, low_water)
    folder.mkdir(parents=True)
    ledger = {"next": 60, "low_water": low_water, "done_above": list(done_above)}
    (folder / "state.json").write_text(state_text(state_content(low_water, low_water, groups=ledger)))
    return folder


def counted(line: dict[str, Any]) -> tuple[int, int]:
    """(episodes, won ones)."""
    return int(line["Rollout/WindowEpisodes"]), round(line["Rollout/WindowEpisodes"] * line["TextWorld/WinRate"])


def test_a_run_that_goes_on_has_its_window_and_repeated_episodes_count_once(tmp_path: Path) -> None:
    """Those alone that the state knows: what was played after it is played again."""
    run, state = tmp_path / "run", state_of(tmp_path / "run", low_water=30, done_above=(32,))
    assert counted(window_after(run, range(80), won=True)) == (80, 80)
    line = window_after(run, range(70, 100), won=False, state=state)  # 0 to 59 and 64, 65 are done in it
    assert counted(line) == (92, 62)
    assert line["Rollout/ActiveWorkers"] == 1
    assert counted(window_after(run, range(5), won=True)) == (5, 5)  # the same folder from the beginning


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_episode_after_the_state_is_in_the_window_of_a_start_that_goes_on_from_it(tmp_path: Path, is_killed: bool) -> None:
    run, state = tmp_path / "run", state_of(tmp_path / "run", low_water=10)
    window_after(run, range(80), won=True, is_killed=is_killed)
    assert counted(window_after(run, range(20, 22), won=False, state=state)) == (22, 20)
    line = window_after(run, range(22, 23), won=False, state=state, begun=20, num_restarts=1)
    assert counted(line) == (21, 20), "a trainer rank had died"


def test_the_window_is_of_the_run_whose_state_is_taken(tmp_path: Path) -> None:
    """However often: a second start from the old folder's state repeats the first, one from the new folder's own goes on with it."""
    state, other = state_of(tmp_path / "run", low_water=10), tmp_path / "other"
    window_after(tmp_path / "run", range(30), won=True)
    for _ in range(2):
        assert counted(window_after(other, range(20, 60), won=False, state=state)) == (60, 20)
    assert counted(window_after(other, range(50, 51), won=False, state=state_of(other, low_water=25))) == (51, 20)


def test_a_stats_process_that_was_killed_loses_seconds_of_the_window(tmp_path: Path) -> None:
    """It is written every ten seconds, and not each round."""
    RunPaths(tmp_path).args.write_text("{}")  # one start of the run
    for start in range(2):
        collector, files = collector_in(tmp_path)
        for number in range(48):
            collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(100 * start + number)}, 0.0)
            if number % 4 == 0:
                collector.take(round_record(number + 1, 1), float(number))
                collector.close_due(number + 1.0)
        files.close()
        expected = [45, 37 + 45][start]  # written with the round of second 37, not with the two after it
        assert lines_of(tmp_path)[-1]["Rollout/WindowEpisodes"] == expected


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"episodes": 7}', '{"begun": 1, "episodes": [[1, 2]]}', "[" * 100_000, "folder"])
def test_a_damaged_window_costs_the_curves_their_past_alone(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "window.json"
    path.mkdir() if damaged == "folder" else path.write_text(damaged)
    line = window_after(tmp_path, range(3), won=True)
    assert line["Rollout/WindowEpisodes"] == 3
    assert "the sliding window starts anew" in caplog.text


def test_a_silent_worker_is_not_active() -> None:
    window = EpisodeWindow(10, active_timeout_s=600.0)
    window.add(episode(1, worker=0), now_s=0.0)
    window.add(episode(2, worker=1), now_s=500.0)
    window.add(episode(3, worker=1), now_s=550.0)
    assert (window.num_active(600.0), window.num_active(601.0), window.num_active(1151.0)) == (2, 1, 0)


# Rounds and their files


def test_a_round_is_written_to_both_files_and_said(tmp_path: Path) -> None:
    lines: list[str] = []
    collector, files = collector_in(tmp_path, lines)
    for number, won in enumerate([True, True, True, False]):
        record = episode(number, won=won, group_id=number // 2, reward=float(won), episode_return=2.0 * won)
        collector.take({"kind": "episode", "source": "rollout/0", "episode": record}, 0.0)
    sent = {"Train/Loss": (1.5, 1, 1.5), "Train/SamplesPerSec": (24.6, 2, 0.0), "Train/TokensPerSec": (3210.0, 1, 0.0)}
    collector.take(values(values=sent), 1.0)
    collector.take(values(values={"Replay/TrainSampleTrainerVersionLagMean": (6.0, 5, 2.0), "Time/trainer/wait": (6.1, 3, 4.0)}), 9.0)
    collector.take(values("rollout/0", values={"Time/rollout/reply": (9.0, 40, 1.0), "Time/rollout/env": (0.5, 40, 0.1)}), 9.5)
    collector.take(round_record(24, 12, round=12), 10.0)
    collector.close_due(10.0 + SETTLE_S)
    files.close()

    [line] = lines_of(tmp_path)
    assert (line["step"], line["version"], line["time"]) == (24, 12, 1024.0)
    assert line["TextWorld/WinRate"] == 0.75
    assert line["GRPO/GroupRewardMean"] == 0.75
    assert line["GRPO/GroupRewardStd"] == 0.25  # (0 + 0.5) / 2
    assert (line["GRPO/ZeroStdGroups"], line["GRPO/ZeroStdRate"]) == (1, 0.5)
    assert line["GRPO/InvalidActionsMean"] == 1
    assert line["Rollout/GlobalRewardSumMean"] == 1.5
    assert line["Rollout/EpisodesPerSec"] == 0.4
    assert line["Time/trainer/wait"] == 0.61
    assert lines == [
        "round 12  step 24  win 0.75 (last 4)  12.3 samples/s  3,210 tok/s  lag 1.2\n"
        "  generation-bound: trainer waited 61 %; raise --infer-size or --max-policy-lag"
    ]
    for tag in set(line) - {"step", "version", "time"}:
        assert scalars_of(tmp_path, tag) == [(24, pytest.approx(line[tag], rel=1e-6))], tag


def test_records_that_come_just_after_the_round_still_belong_to_it(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    collector.take(values("trainer/0", values={"Train/Loss": (1.0, 1, 1.0)}), 0.0)
    collector.take(round_record(1, 1), 5.0)
    assert collector.seconds_to_next(5.0) == pytest.approx(SETTLE_S)
    collector.take(values("trainer/1", values={"Train/Loss": (3.0, 1, 3.0)}), 5.0 + SETTLE_S / 2)
    collector.close_due(5.0 + SETTLE_S / 2)
    assert lines_of(tmp_path) == []
    collector.close_due(5.0 + SETTLE_S)
    files.close()
    assert lines_of(tmp_path)[0]["Train/Loss"] == 2
    assert collector.seconds_to_next(9.0) is None


def test_rounds_shorter_than_the_settling_time_are_all_written(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    for step in range(1, 4):
        collector.take(round_record(step, step, values={"Train/Loss": (float(step), 1, float(step))}), 0.001 * step)
    collector.close_due(1.0)
    files.close()
    assert [(line["step"], line["Train/Loss"]) for line in lines_of(tmp_path)] == [(1, 1), (2, 2), (3, 3)]


def test_log_every_thins_the_terminal_not_the_files(tmp_path: Path) -> None:
    said: list[str] = []
    collector, files = collector_in(tmp_path, said, log_every=2)
    for step in range(1, 5):
        collector.take(round_record(step, step), float(step))
        collector.close_due(step + 0.5)
    files.close()
    assert [line.split("  ")[0] for line in said] == ["round 2", "round 4"]
    assert len(lines_of(tmp_path)) == 4


def test_an_evaluation_is_written_at_its_own_step_and_the_first_one_is_kept(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    for step, rate in [(0, 0.25), (8, 0.9), (16, 0.75)]:
        collector.take(round_record(step + 3, step + 3), 10.0 + step)
        sent = {"Eval/WinRate": (60 * rate, 60, 1.0), "Eval/NormalizedScore": (30.0, 60.0, 1.0), "Eval/Episodes": (60, 1, 60)}
        collector.take(values("ingest/0", values=sent, step=step, version=step, time=2000.0), 10.0 + step)
        collector.close_due(11.0 + step)
    files.close()
    assert scalars_of(tmp_path, "Eval/WinRate") == [(0, 0.25), (8, pytest.approx(0.9)), (16, 0.75)]
    assert [line["step"] for line in lines_of(tmp_path) if "Eval/WinRate" in line] == [0, 8, 16]
    status = read_status(tmp_path)
    assert (status["eval_first"]["win_rate"], status["eval_first"]["step"]) == (0.25, 0)
    assert status["eval_last"]["win_rate"] == 0.75
    assert (status["eval_best"]["win_rate"], status["eval_best"]["version"]) == (0.9, 8)
    assert status["eval_last"]["episodes"] == 60


def test_what_the_trainer_sends_after_its_last_round_is_written_at_the_end(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    collector.take(round_record(4, 2), 1.0)
    collector.take(values(values={"Sync/PushSeconds": (0.5, 1, 0.5)}), 2.0)
    collector.close_due(1.5, force=True)
    collector.take(values(values={"Sync/PushSeconds": (0.7, 1, 0.7)}), 3.0)
    collector.take(values("inference/0", values={"Infer/TokensPerSec": (7.0, 1, 7.0)}), 3.0)
    collector.finish(4.0)
    files.close()
    first, last = lines_of(tmp_path)
    assert first["Sync/PushSeconds"] == 0.5
    assert set(last) == {"step", "version", "time", "Sync/PushSeconds"}
    assert (last["step"], last["version"], last["Sync/PushSeconds"]) == (4, 2, 0.7)


def test_the_first_round_starts_with_the_first_weights(tmp_path: Path) -> None:
    config = Config.from_flat({"placement": "cpu"})
    files = MetricFiles(tmp_path)
    collector = Collector(config, files, Status(tmp_path), say=print)
    collector.take(values("inference/0", values={"Time/inference/start": (50.0, 1, 50.0)}), 50.0)
    for now in (60.0, 62.0):
        collector.start_clock(now)
    collector.take(values("inference/0", values={"Time/inference/start": (15.0, 1, 15.0)}), 70.0)
    collector.take(round_record(1, 0), 70.0)
    collector.close_due(71.0)
    files.close()
    assert read_status(tmp_path)["training_s"] == 10.0
    assert lines_of(tmp_path)[0]["Time/inference/start"] == 0.75, "of the 20 s since its report before"


def test_curves_over_tokens_and_samples_have_their_own_x_axis(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(score=1)}, 0.0)
    cumulative = {"Train/CumulativeGlobalValidResponseTokens": (5000, 1, 5000), "Train/CumulativeGlobalTrainingSamples": (70, 1, 70)}
    collector.take(round_record(3, 3, values=cumulative), 1.0)
    collector.close_due(2.0)
    files.close()
    assert scalars_of(tmp_path, "TextWorld/NormalizedScoreByValidResponseToken") == [(5000, 1.0)]
    assert scalars_of(tmp_path, "TextWorld/NormalizedScoreByTrainingSample") == [(70, 1.0)]
    assert scalars_of(tmp_path, "TextWorld/NormalizedScore") == [(3, 1.0)]


def test_an_undeclared_tag_is_written_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector, files = collector_in(tmp_path)
    for _ in range(3):
        collector.take(values(values={"Train/Typo": (2.0, 1, 2.0), "Time/trainer/pack": (1.0, 1, 1.0)}), 0.0)
    collector.take(round_record(1, 1), 1.0)
    collector.close_due(2.0)
    files.close()
    assert lines_of(tmp_path)[0]["Train/Typo"] == 2
    assert [record.message for record in caplog.records if "tags.py" in record.message] == [
        "tag 'Train/Typo' is not in stats/tags.py: it is written as a mean"
    ]


def test_nan_reaches_tensorboard_and_never_the_json(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    collector.take(round_record(1, 1, values={"Train/Loss": (math.nan, 1, math.nan), "Train/GradNorm": (math.inf, 1, math.inf)}), 1.0)
    collector.close_due(2.0)
    files.close()
    [line] = lines_of(tmp_path)
    assert "Train/Loss" not in line
    assert line["Stats/NonFinite"] == 2
    assert math.isnan(scalars_of(tmp_path, "Train/Loss")[0][1])


def test_a_new_process_appends_and_goes_on_counting(tmp_path: Path) -> None:
    started = set()
    for start in (0, 2):
        collector, files = collector_in(tmp_path)
        files.write_flags({"max_steps": 5}, started_s=1000.0)
        collector.take({"kind": "episode", "source": "rollout/0", "episode": episode()}, 0.0)
        for step in (start + 1, start + 2):
            collector.take(round_record(step, step, values={"Train/Loss": (float(step), 1, 0.0)}), float(step))
            collector.close_due(step + 0.5)
        if start == 0:  # killed in the middle of a line
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "vers')
        files.close()
        started.add(read_status(tmp_path)["started"])
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, _ in scalars_of(tmp_path, "Train/Loss")] == [1, 2, 3, 4]
    status = read_status(tmp_path)
    assert (status["round"], status["episodes"], started) == (4, 2, {status["started"]})


def test_the_flags_are_a_text_in_tensorboard(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    files.write_flags(Config.from_flat({"max_steps": 123}).to_flat(), started_s=1000.0)
    files.close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    [event] = accumulator.Tensors("run/flags")
    assert "| `--max-steps` | `123` |" in event.tensor_proto.string_val[0].decode()
    assert accumulator.SummaryMetadata("run/flags").plugin_data.plugin_name == "text"


def test_the_flags_are_a_row_of_the_hparams_tab(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    files.write_flags({"max_steps": 5, "compile": "auto", "synchronous": False, "chat_template": None}, started_s=1000.0)
    files.close()
    content = hparams_metadata.SESSION_START_INFO_TAG, hparams_metadata.EXPERIMENT_TAG
    start, experiment = (EventAccumulator(str(tmp_path)).Reload().SummaryMetadata(tag).plugin_data.content for tag in content)
    row = hparams_metadata.parse_session_start_info_plugin_data(start)
    assert row.start_time_secs == 1000.0
    assert row.hparams["max_steps"].number_value == 5
    assert row.hparams["synchronous"].WhichOneof("kind") == "bool_value"
    assert row.hparams["compile"].string_value == "auto"
    columns = hparams_metadata.parse_experiment_plugin_data(experiment)
    assert {info.name for info in columns.hparam_infos} == set(row.hparams)
    assert {info.name.tag for info in columns.metric_infos} <= set(tags.TAGS)


def test_every_tag_of_the_overview_is_in_the_table() -> None:
    known = [*tags.TAGS, "Time/trainer/wait", "Time/rollout/env"]
    for charts in events.OVERVIEW.values():
        for patterns in charts.values():
            for pattern in patterns:
                assert any(re.match(pattern, tag) for tag in known), pattern


def test_histograms_count_every_number_once(tmp_path: Path) -> None:
    """Whatever the bins: as many numbers, their sum, and each in the bin whose limits hold it."""
    files = MetricFiles(tmp_path)
    narrow, wide = {2: 3, 0: 1}, {10: 1, 500: 7, 1023: 2, 11: 4}
    files.write_histograms(step=7, time_s=1.0, counted={"Replay/PolicyLagOldest": narrow, "Rollout/EpisodeTokens": wide})
    files.close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert accumulator.Tags()["histograms"] == ["Replay/PolicyLagOldest", "Rollout/EpisodeTokens"]
    [event] = accumulator.Histograms("Replay/PolicyLagOldest")
    assert (event.step, event.histogram_value.bucket_limit, event.histogram_value.bucket) == (7, [1, 2, 3], [1, 0, 3])
    [event] = accumulator.Histograms("Rollout/EpisodeTokens")
    got = event.histogram_value
    assert (got.min, got.max, got.num, got.sum) == (10, 1023, 14, sum(value * count for value, count in wide.items()))
    assert len(got.bucket) <= events.MAX_BINS
    width = got.bucket_limit[1] - got.bucket_limit[0]
    held = {sum(count for value, count in wide.items() if limit - width <= value < limit) for limit in got.bucket_limit}
    assert held == set(got.bucket)
    assert sum(got.bucket) == 14


def test_a_rounds_histograms_are_those_of_its_episodes_and_lags(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    for step, turns in ((1, [2, 2, 6]), (2, [3])):
        for number in turns:
            collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(num_turns=number, num_tokens=50 * number)}, 0.0)
        collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(kind="eval", num_turns=99)}, 0.0)
        for rank in (0, 1):
            collector.take({"kind": "numbers", "source": f"trainer/{rank}", "numbers": {"Replay/PolicyLagOldest": [rank, step]}}, 0.0)
        collector.take(round_record(step, step), float(step))
        collector.close_due(step + 0.5)
    files.close()
    accumulator = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    assert set(accumulator.Tags()["histograms"]) == set(tags.HISTOGRAMS)
    first, second = (event.histogram_value for event in accumulator.Histograms("Rollout/EpisodeTurns"))
    assert (first.bucket, first.min, first.max, second.bucket) == ([2, 0, 0, 0, 1], 2, 6, [1])
    lags = [event.histogram_value for event in accumulator.Histograms("Replay/PolicyLagOldest")]
    assert [(one.num, one.sum) for one in lags] == [(4, 3), (4, 5)]


def test_a_text_is_written_at_the_step_of_the_last_round(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    collector.take(round_record(8, 2), 1.0)
    collector.close_due(2.0)
    collector.take({"kind": "text", "source": "rollout/0", "tag": "Episodes/train", "text": "hello"}, 3.0)
    files.close()
    [event] = EventAccumulator(str(tmp_path)).Reload().Tensors("Episodes/train")
    assert (event.step, event.tensor_proto.string_val[0]) == (8, b"hello")


def test_status_names_throughput_and_shares(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    sent = {"Time/trainer/wait": (1.0, 1, 1.0), "Time/inference/idle": (2.0, 1, 2.0), "Train/TokensPerSec": (800.0, 4.0, 0.0)}
    collector.take(values(values=sent), 0.0)
    collector.take(round_record(2, 1), 10.0)
    collector.close_due(11.0)
    files.close()
    status = read_status(tmp_path)
    assert status["throughput"] == {"trained_tokens_per_s": 200.0, "episodes_per_s": 0.0}
    assert status["shares"] == {"trainer": {"wait": 0.1}, "inference": {"idle": 0.2}}
    assert status["bottleneck"].startswith("trainer-bound: trainer computed 90 %")
    assert (status["step"], status["version"], status["round"], status["has_ended"]) == (2, 1, 1, False)


def test_a_full_disk_takes_back_half_a_record_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class HalfFull:
        """Takes three bytes, then the disk is full."""

        def __init__(self, file: Any) -> None:
            self.file, self.is_full = file, False

        def write(self, data: memoryview) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            self.is_full = True
            return self.file.write(data[:3])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    file = AppendFile(tmp_path / "lines")
    assert file.append(b"first\n")
    real, file._file = file._file, HalfFull(file._file)  # type: ignore[assignment]
    assert not file.append(b"second\n")
    assert not file.append(b"third\n")
    file._file = real
    assert file.append(b"fourth\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"first\nfourth\n"
    assert len(caplog.records) == 1


# The sentence


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            Situation(trainer_wait=0.61, trainer_push=0.02, rollout_reply=0.9, rollout_own=0.08),
            "generation-bound: trainer waited 61 %; raise --infer-size or --max-policy-lag",
        ),
        (
            Situation(trainer_wait=0.04, trainer_push=0.05, rollout_reply=0.3, rollout_work=0.6),
            "trainer-bound: trainer computed 91 %; raise --fsdp-world-size",
        ),
        (
            Situation(trainer_wait=0.5, rollout_reply=0.2, rollout_own=0.72),
            "env-bound: trainer waited 50 %, games and prompts 72 %; raise --num-rollout-workers",
        ),
        (
            Situation(trainer_wait=0.3, trainer_push=0.41, rollout_reply=0.6),
            "sync-bound: pushes took 41 % of the time; raise --sync-every-optimizer-steps",
        ),
        (
            Situation(trainer_wait=0.4, rollout_reply=0.3, rollout_work=0.66),
            "admission-bound: trainer waited 40 %, rollouts idle 66 %; raise --max-policy-lag",
        ),
        (
            Situation(trainer_wait=0.4, rollout_reply=0.3, rollout_work=0.66, has_lag_limit=False, ring_fill=0.9),
            "admission-bound: trainer waited 40 %, rollouts idle 66 %; raise --replay-capacity",
        ),
        (
            Situation(trainer_wait=0.72, rollout_reply=0.43, rollout_work=0.51, has_lag_limit=False, ring_fill=0.18),
            "generation-bound: trainer waited 72 %; raise --infer-size",
        ),
        (
            Situation(trainer_wait=0.67, rollout_reply=0.2, rollout_own=0.49, rollout_work=0.24),
            "env-bound: trainer waited 67 %, games and prompts 49 %; raise --num-rollout-workers",
        ),
        (
            Situation(trainer_wait=0.4),
            "rollout-bound: trainer waited 40 %; raise --num-rollout-workers or --infer-size",
        ),
        (
            Situation(trainer_wait=0.1, trainer_other=0.5),
            "neither: evaluation and exports took 50 %; lower --eval-episodes-per-game",
        ),
        (
            Situation(trainer_wait=0.7, rollout_reply=0.6, is_synchronous=True),
            "synchronous: trainer waited 70 %; leave out --synchronous to generate meanwhile",
        ),
        (
            Situation(trainer_wait=0.01, rollout_work=0.6, placement="cpu", free_cores=0.1),
            "CPU-bound: no core free, trainer computed 99 %; a GPU (--placement) or more cores help",
        ),
        (
            Situation(trainer_wait=0.6, rollout_own=0.7, placement="cpu", free_cores=0.1),
            "CPU-bound: no core free, trainer computed 40 %; a GPU (--placement) or more cores help",
        ),
        (
            Situation(trainer_wait=0.6, rollout_own=0.7, free_cores=0.1),
            "CPU-bound: no core free, trainer waited 60 %; more cores or --max-sample-reuse help",
        ),
        (
            Situation(trainer_wait=0.9, rollout_own=0.7, no_signal=0.94, placement="cpu", free_cores=0.1),
            "signal-bound: trainer waited 90 %, 94 % of groups end alike; change --tw-game-dir",
        ),
        (
            Situation(trainer_wait=0.6, free_cores=0.1),
            "CPU-bound: no core free, trainer waited 60 %; more cores or --max-sample-reuse help",
        ),
        (
            Situation(trainer_wait=0.01, rollout_own=0.7, free_cores=0.1),
            "trainer-bound: trainer computed 99 %; raise --fsdp-world-size",
        ),
        (
            Situation(trainer_push=0.6, placement="cpu", free_cores=0.1),
            "sync-bound: pushes took 60 % of the time; raise --sync-every-optimizer-steps",
        ),
    ],
)
def test_the_sentence_names_what_bounds_the_run_and_the_flag(now: Situation, expected: str) -> None:
    assert bottleneck(now) == expected
    assert len(expected) < 88, "a line of a terminal"


@pytest.mark.parametrize("placement", ["cpu", "colocated", "dedicated"])
@pytest.mark.parametrize("free_cores", [0.0, 0.6])
def test_every_flag_that_a_sentence_names_exists_and_none_starts_processes_on_a_full_cpu(placement: str, free_cores: float) -> None:
    flags = set(Config().to_flat())
    shares = [0.0, 0.3, 0.6, 0.9, 1.0]
    for wait, push, work in itertools.product(shares, shares, shares):
        own = {"rollout_own": work, "rollout_work": 1.0 - work, "placement": placement, "free_cores": free_cores}
        now = Situation(trainer_wait=wait, trainer_push=min(push, 1.0 - wait), **own)
        named = [word.strip(",;()") for word in bottleneck(now).split() if word.lstrip("(").startswith("--")]
        assert named
        assert len(bottleneck(now)) < 88, "a line of a terminal"
        assert all(word[2:].replace("-", "_") in flags for word in named), named
        if not free_cores:
            assert "--num-rollout-workers" not in named, now
            assert placement != "cpu" or "--fsdp-world-size" not in named, now


def test_a_sentence_stands_for_the_newest_rounds() -> None:
    """A mean: of the rounds in which a role said anything, and none of them counts for ever."""
    doctor = Doctor(Config.from_flat({"placement": "dedicated"}))
    waited = {"Time/trainer/wait": 0.8, "Time/rollout/reply": 0.9}
    assert doctor.say(waited).startswith("generation-bound: trainer waited 80 %")
    assert doctor.say({"Time/trainer/wait": 0.0}).startswith("generation-bound: trainer waited 40 %"), "rollouts said nothing"
    assert doctor.say({"Train/Loss": 1.0}).startswith("the trainer has not said")
    env = {"Time/trainer/wait": 0.8, "Time/rollout/env": 1.0}
    assert doctor.say(env).startswith("env-bound: trainer waited 53 %, games and prompts 50 %"), "in its round nobody waited for a reply"
    for _ in range(NUM_ROUNDS):
        last = doctor.say({"Time/trainer/wait": 0.0, "Time/trainer/compute": 1.0})
    assert last == "trainer-bound: trainer computed 100 %; raise --fsdp-world-size"


def test_a_long_round_weighs_as_much_as_it_took(tmp_path: Path) -> None:
    """A round of 38 s in which the trainer waited, then one of 2 s: 95 % of the time, not half of it."""
    collector, files = collector_in(tmp_path, placement="dedicated")
    for step, now_s, waited_s in ((1, 38.0, 38.0), (2, 40.0, 0.0)):
        collector.take(values(values={"Time/trainer/wait": (waited_s, 1, waited_s), "Time/rollout/reply": (1.0, 1, 1.0)}), now_s)
        collector.take(round_record(step, step), now_s)
        collector.close_due(now_s + 0.2)
    files.close()
    assert [line["Run/RoundSeconds"] for line in lines_of(tmp_path)] == [38.0, pytest.approx(2.0)]
    assert read_status(tmp_path)["bottleneck"].startswith("generation-bound: trainer waited 95 %")


def test_top_and_the_sentence_have_one_share_of_groups_that_end_alike(tmp_path: Path) -> None:
    """Of the newest rounds by their time: 38 s in which all did, 2 s in which none did, then a round that closed no group."""
    Config.from_flat({"placement": "dedicated"}).save(RunPaths(tmp_path).args)
    collector, files = collector_in(tmp_path, placement="dedicated")
    collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(1)}, 1.0)
    for step, now_s, rates in (
        (1, 38.0, {"GRPO/ZeroStdRate": (1.0, 1, 1.0)}),
        (2, 40.0, {"GRPO/ZeroStdRate": (0.0, 1, 0.0)}),
        (3, 50.0, {}),
    ):
        collector.take(values(values={"Time/trainer/wait": (now_s, 1, now_s)} | rates), now_s)
        collector.take(round_record(step, step), now_s)
        collector.close_due(now_s + 0.2)
    files.close()
    assert "95 % of groups end alike" in read_status(tmp_path)["bottleneck"]
    lines = Console(width=100).render_lines(Screen(read_frame(RunFolder(tmp_path))))
    assert [text for line in lines if "  95 % alike" in (text := "".join(segment.text for segment in line))]


def test_a_round_has_the_cores_that_were_free_in_it(tmp_path: Path) -> None:
    """Not what was free while vLLM started."""
    free = iter([1.9, 0.2, None])
    lines: list[str] = []
    config, files = Config.from_flat({"placement": "cpu"}), MetricFiles(tmp_path)
    collector = Collector(config, files, Status(tmp_path), say=lines.append, free_cores=lambda: next(free))
    collector.start_clock(0.0)
    for step in (1, 2):
        collector.take(values(values={"Time/trainer/wait": (0.0, 1, 0.0)}), 10.0 * step)
        collector.take(round_record(step, step), 10.0 * step)
        collector.close_due(10.0 * step + 1)
    files.close()
    assert [line.get("Run/FreeCores") for line in lines_of(tmp_path)] == [0.2, None]
    assert [read_status(tmp_path)["bottleneck"].partition(":")[0], lines[0].count("CPU-bound: no core free")] == ["CPU-bound", 1]


def test_what_bounds_a_run_is_said_when_it_is_something_else(tmp_path: Path) -> None:
    """Not in each of a hundred rounds with another percentage; status.json has it of every round."""
    lines: list[str] = []
    collector, files = collector_in(tmp_path, lines, log_every=2)
    computed, waited = {"Time/trainer/wait": (0.5, 1, 0.5)}, {"Time/trainer/wait": (8.0, 1, 8.0), "Time/rollout/reply": (9.0, 1, 9.0)}
    for step in range(1, 21):
        collector.take(values(values=computed if step < 9 else waited), 10.0 * step)
        collector.take(round_record(step, step, round=step), 10.0 * step)
        collector.close_due(10.0 * step + 1)
    files.close()
    assert len(lines) == 10
    said = [line.splitlines()[1].split()[0] if "\n" in line else "" for line in lines]
    assert said == ["trainer-bound:", *[""] * 3, "generation-bound:", *[""] * 5]
    assert read_status(tmp_path)["bottleneck"].startswith("generation-bound: trainer waited 80 %")


def test_time_of_this_start_and_of_all(tmp_path: Path) -> None:
    """A stats process that is started again goes on in its start; a run that goes on begins another."""

    def a_round(seconds: float) -> dict[str, Any]:
        status = Status(tmp_path)
        status.close_round(number=1, step=1, version=1, round_s=seconds, values={}, sentence="")
        status.save()
        return read_status(tmp_path)

    args = RunPaths(tmp_path).args
    args.touch()
    os.utime(args, (time.time() - 1000,) * 2)
    assert (a_round(5.0)["start_training_s"], a_round(2.0)["start_training_s"]) == (5.0, 7.0)
    assert 999 < read_status(tmp_path)["wall_s"] < 1100
    args.touch()
    status = a_round(3.0)
    assert (status["start_training_s"], status["training_s"]) == (3.0, 10.0)
    assert status["wall_s"] < 100


def test_a_situation_comes_from_the_rounds_values() -> None:
    config = Config.from_flat({"placement": "colocated", "synchronous": True})
    got = situation({"Time/trainer/wait": 0.5, "Time/rollout/reply": 0.25}, config)
    assert got == Situation(trainer_wait=0.5, rollout_reply=0.25, placement="colocated", is_synchronous=True)


# The process


@contextmanager
def a_run(run_dir: Path, **flags: Any) -> Iterator[RunPaths]:
    """What the launcher and the supervisor make before stats starts."""
    paths = RunPaths(run_dir)
    Config.from_flat({"grpo_group_size": 2, "placement": "cpu"} | flags).save(paths.args)
    table, board = HealthTable.create(paths.health, ["stats/0", "rollout/0", "trainer/0"]), Board.create(paths.board)
    table.set_word(1, "num_restarts", 2)
    try:
        yield paths
    finally:
        table.unlink()
        board.unlink()
        shutil.rmtree(paths.sockets, ignore_errors=True)


@contextmanager
def running_stats(paths: RunPaths) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "accerl_mp.stats", "--run-dir", str(paths.run_dir), "--index", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(folder: Path, number: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(lines := lines_of(folder)) >= number:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{number} lines never came")


def test_the_process_writes_rounds_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        paths = stack.enter_context(a_run(tmp_path))
        trainer, rollout, ingest = (
            stack.enter_context(closing(MetricsSender(paths, name))) for name in ("trainer/0", "rollout/0", "ingest/0")
        )
        with running_stats(paths):
            rollout.episode(episode(won=True))
            rollout.values({"Rollout/ResubmittedTurns": 3})
            rollout.text("Episodes/train", "an episode")
            trainer.numbers({"Replay/PolicyLagOldest": [0, 2], "Rollout/EpisodeTurns": []})
            trainer.values({"Train/Loss": (6.0, 3, 4.0)})
            trainer.round({"step": 1, "version": 1, "values": {"Train/LearningRate": 0.5}})
            [line] = wait_for_lines(tmp_path, 1)
            assert (line["Train/Loss"], line["Train/LearningRate"], line["TextWorld/WinRate"], line["Stats/Restarts"]) == (2, 0.5, 1, 2)
            assert line["Rollout/ResubmittedTurns"] == 3

        with running_stats(paths) as process:
            rollout.episode(episode())
            ingest.values({"Eval/WinRate": (30, 60, 1)}, step=1, version=1)
            wait_for_lines(tmp_path, 2)
            for step in range(2, 50):
                trainer.round({"step": step, "version": step})
            process.terminate()  # with most of it still in the socket
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0

    assert [line["step"] for line in lines_of(tmp_path)] == [1, 1, *range(2, 50)]
    assert scalars_of(tmp_path, "Eval/WinRate") == [(1, 0.5)]
    assert [step for step, _ in scalars_of(tmp_path, "Rollout/WindowEpisodes")] == list(range(1, 50))
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert accumulator.Histograms("Replay/PolicyLagOldest")[0].histogram_value.bucket == [1, 0, 1]
    assert [event.tensor_proto.string_val[0] for event in accumulator.Tensors("Episodes/train")] == [b"an episode"]
    status = read_status(tmp_path)
    assert (status["step"], status["round"], status["restarts"], status["eval_first"]["win_rate"]) == (49, 49, 2, 0.5)
    assert b"round 49  step 49  win" in said
    assert b"evaluation at step 1, version 1: win 0.50" in said


class LateReceiver:
    """Quiet for four looks, then the trainer's last round."""

    def __init__(self) -> None:
        self._looks = iter([[], [], [], [], [round_record(1, 1)]])

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        assert timeout_s == DRAIN_QUIET_S
        return next(self._looks, [])


@pytest.mark.parametrize(("state", "is_stopped", "expected"), [("running", True, 1), ("running", False, 0), ("ended", True, 0)])
def test_a_stopped_run_has_the_round_that_its_trainer_closes_last(state: str, is_stopped: bool, expected: int, tmp_path: Path) -> None:
    """A step that was begun is finished first: stats waits for that as long as rank 0 is there."""
    (folder := tmp_path / "files").mkdir()
    collector, files = collector_in(folder)
    with a_run(tmp_path) as paths, closing(HealthTable.attach(paths.health)) as table, closing(Board.attach(paths.board)) as board:
        process = SimpleNamespace(health=SimpleNamespace(table=table), board=board)
        table.set_word(2, "pid", os.getpid())
        table.set_word(2, "state", STATES.index(state))
        board.set("stop", int(is_stopped))
        looks = iter(range(5))
        drain(LateReceiver(), collector, trainer_closes=lambda: trainer_closes(process) and next(looks, None) is not None)
    files.close()
    assert len(lines_of(folder)) == expected


def test_a_trainer_that_never_closes_its_round_holds_stats_for_its_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(timeout_s: float) -> list[dict[str, Any]]:
        looks.append(timeout_s)
        assert len(looks) < 5000, "it waits on"
        time.sleep(0.001)
        return []

    monkeypatch.setattr("accerl_mp.stats.__main__.TRAINER_LIMIT_S", 0.1)
    collector, files = collector_in(tmp_path)
    drain(SimpleNamespace(receive=look), collector, trainer_closes=lambda: True)
    files.close()
    assert looks


# Cost


def test_thousands_of_records_a_second_fit_in_one_thread(tmp_path: Path) -> None:
    collector, files = collector_in(tmp_path)
    sent = {f"Time/rollout/phase{number}": (0.1, 1, 0.1) for number in range(5)} | {"Rollout/ResubmittedTurns": (1, 1, 1)}
    start = time.process_time()
    for number in range(5000):
        collector.take(values(f"rollout/{number % 16}", values=sent), float(number))
        collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(number, group_id=number // 2)}, float(number))
    collector.take(round_record(1, 1), 5000.0)
    collector.close_due(5001.0)
    files.close()
    assert time.process_time() - start < 2.0  # measured: 0.1 s


def test_the_role_imports_neither_torch_nor_tensorflow() -> None:
    code = "import sys, accerl_mp.stats.__main__; print(*({'torch', 'transformers', 'tensorflow', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize(("won", "hint"), [(False, "easier games"), (True, "harder games")])
def test_a_step_that_does_not_come_for_want_of_signal_is_said(tmp_path: Path, won: bool, hint: str) -> None:
    """A model that never wins, or always: all groups are left out, and nothing else would be said for --replay-sample-timeout-seconds."""
    lines: list[str] = []
    collector, files = collector_in(tmp_path, lines, rl_algorithm="grpo")
    for second in range(1, 260):
        groups = {"Ingest/ZeroStdGroups": (2, 1, 2), "Ingest/SampleGroups": (0, 1, 0)}
        collector.take(values("ingest/0", values=groups), second)
        collector.take({"kind": "episode", "source": "rollout/0", "episode": episode(second, won=won)}, second)
        collector.speak_up(second, second)
    assert [line.partition(":")[0] + line[11:16] for line in lines] == ["no step for 1 1:00", "no step for 2 2:00", "no step for 4 4:00"]
    assert "120 of 120 groups ended alike and teach nothing (win " in lines[0]
    assert hint in lines[0]
    for second in range(260, 400):  # it trains, then waits again: only that wait's groups count
        collector.take(values("ingest/0", values={"Ingest/ZeroStdGroups": (1, 1, 1), "Ingest/SampleGroups": (0, 1, 0)}), second)
        collector.speak_up(second, max(0.0, second - 300.0))
    files.close()
    assert [line[:16] for line in lines[3:]] == ["no step for 1:00"]
    assert "60 of 60 groups" in lines[3] or "61 of 61 groups" in lines[3]


@pytest.mark.parametrize("flags", [{"keep_zero_std_groups": True}, {"rl_algorithm": "ppo"}, {}])
def test_a_long_wait_for_samples_that_teach_is_not_spoken_of(tmp_path: Path, flags: dict[str, Any]) -> None:
    lines: list[str] = []
    collector, files = collector_in(tmp_path, lines, **({"rl_algorithm": "grpo"} | flags))
    alike = 1 if not flags else 2
    for second in range(1, 200):
        collector.take(values("ingest/0", values={"Ingest/ZeroStdGroups": (alike, 1, alike), "Ingest/SampleGroups": (1, 1, 1)}), second)
        collector.speak_up(second, second)
    files.close()
    assert lines == []


@pytest.mark.parametrize("longest_wait_s", [0.0, 20.0])
def test_a_long_round_of_many_steps_with_little_signal_is_not_spoken_of(tmp_path: Path, longest_wait_s: float) -> None:
    """Steps come, or an evaluation, an export or the engine is waited for: most groups may end alike all the same."""
    lines: list[str] = []
    collector, files = collector_in(tmp_path, lines, rl_algorithm="grpo")
    for second in range(1, 400):
        collector.take(values("ingest/0", values={"Ingest/ZeroStdGroups": (4, 1, 4), "Ingest/SampleGroups": (1, 1, 1)}), second)
        collector.speak_up(second, second % (longest_wait_s + 1))
    files.close()
    assert lines == []
