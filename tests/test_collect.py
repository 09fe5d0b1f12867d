"""From played episodes to samples: alignment, advantages, truncation, invalid and aborted replies."""

import asyncio
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_fixture import build_tokenizer
from games_fixture import games_dir  # noqa: F401
from scripted import Policy, build_player, reply

from accerl_mp.rollout.collect import Deal, Group, build_group, play_group
from accerl_mp.rollout.env import EnvError
from accerl_mp.rollout.records import group_values, transcript_as_markdown, write_transcripts
from accerl_mp.samples import UNTRAINED

pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")
TOKENIZER = build_tokenizer()
REPLIES = {0: ["take coin"], 1: ["take bread", "eat bread"], 2: ["look", "nonsense", "take coin"], 3: []}
"""By episode: won at once, lost, won late with an invalid reply, cut."""


def policy(episode_id: int, turn: int) -> str:
    replies = REPLIES[episode_id]
    return replies[turn] if turn < len(replies) else "look"


def deal(games: Path, episode_ids: tuple[int, ...] = (0, 1, 2, 3), kind: str = "train") -> Deal:
    return Deal(
        group_id=11,
        episode_ids=episode_ids,
        seeds=tuple(range(len(episode_ids))),
        game_id=5,
        game_path=str(games / "room-2.z8"),
        kind=kind,  # type: ignore[arg-type]
        eval_id=2 if kind == "eval" else -1,
    )


def collect(games: Path, *, play: Policy = policy, episode_ids: tuple[int, ...] = (0, 1, 2, 3), kind: str = "train", **flags: Any) -> Group:
    player = build_player(TOKENIZER, play, tw_max_episode_steps=4, **flags)
    dealt = deal(games, episode_ids, kind)

    async def run() -> Any:
        return await play_group(player, dealt, asyncio.Semaphore(2))

    return build_group(dealt, asyncio.run(run()), player.config, worker=6)


def test_a_group_has_one_aligned_sample_an_episode(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, tw_invalid_action_penalty=0.5)
    assert group.outcome == "samples"
    assert [sample.episode_id for sample in group.samples] == [0, 1, 2, 3]
    for sample, episode in zip(group.samples, group.episodes, strict=True):
        sample.validate()
        trained = sample.labels != UNTRAINED
        replies = np.concatenate([turn.reply.ids for turn in episode.turns])
        assert sample.input_ids[trained].tolist() == sample.response_ids.tolist() == replies.tolist()
        assert (sample.old_logprobs == np.where(trained, np.float32(-0.25), 0)).all()
        assert sample.output_versions.tolist() == np.repeat(range(len(episode.turns)), [len(t.reply.ids) for t in episode.turns]).tolist()
        assert sample.response_indices[trained].tolist() == sample.output_versions.tolist()  # the script's version is the turn
        whole = [token for turn in episode.turns for token in (*turn.new_ids, *turn.reply.ids.tolist())]
        assert sample.input_ids.tolist() == whole
        last_tokens = [np.flatnonzero(sample.response_indices == number)[-1] for number in range(len(episode.turns))]
        assert sample.token_rewards[last_tokens].tolist() == [turn.reward for turn in episode.turns]
        assert sample.token_rewards.sum() == pytest.approx(sample.episode_return)
        assert sample.num_turns == len(episode.turns)
        assert (sample.group_id, sample.game_id, sample.algorithm) == (11, 5, "grpo")


def test_advantages_come_from_the_whole_group_with_penalties(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, tw_invalid_action_penalty=0.5)
    rewards = np.array([4, 0, 3.5, 0])
    assert group.rewards.tolist() == rewards.tolist()
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    assert [sample.advantage for sample in group.samples] == pytest.approx(expected.tolist())
    assert [sample.reward for sample in group.samples] == rewards.tolist()
    assert [sample.episode_return for sample in group.samples] == [4, 0, 4, 0]
    for sample, advantage in zip(group.samples, expected, strict=True):
        trained = sample.labels != UNTRAINED
        assert sample.token_advantages[trained] == pytest.approx(np.full(trained.sum(), advantage))
    assert [(sample.won, sample.truncated) for sample in group.samples] == [(True, False), (False, False), (True, False), (False, True)]


@pytest.mark.parametrize(("flags", "expected"), [({"grpo_norm": "none"}, [2, -2, 2, -2]), ({"rl_algorithm": "rloo"}, [8 / 3, -8 / 3] * 2)])
def test_other_advantages(games_dir: Path, flags: dict[str, Any], expected: list[float]) -> None:  # noqa: F811
    assert [sample.advantage for sample in collect(games_dir, **flags).samples] == pytest.approx(expected)


def test_masked_truncated_episodes_count_in_the_statistics_only(games_dir: Path) -> None:  # noqa: F811
    trained, masked = collect(games_dir), collect(games_dir, truncated="mask")
    assert [sample.episode_id for sample in masked.samples] == [0, 1, 2]
    assert [sample.advantage for sample in masked.samples] == [sample.advantage for sample in trained.samples[:3]]
    assert len(masked.records) == 4
    assert masked.records[3]["truncated"]


def test_a_group_without_signal_is_reported_and_not_sent(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, episode_ids=(1, 3))
    assert (group.outcome, group.samples, len(group.records)) == ("zero_std", [], 2)
    kept = collect(games_dir, episode_ids=(1, 3), keep_zero_std_groups=True)
    assert kept.outcome == "samples"
    assert [sample.advantage for sample in kept.samples] == [0, 0]


def test_a_group_in_which_nothing_was_trained_is_rejected(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, tw_history_token_window=60, keep_zero_std_groups=True)
    assert (group.outcome, group.samples) == ("rejected", [])
    assert [record["num_turns"] for record in group.records] == [0] * 4


def test_ppo_has_returns_on_every_trained_token(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, episode_ids=(2,), rl_algorithm="ppo", tw_gamma=0.5, tw_invalid_action_penalty=0.5)
    (sample,) = group.samples
    assert (group.outcome, sample.advantage, sample.reward, sample.episode_return) == ("samples", 0, 3.5, 3.5)
    trained = np.flatnonzero(sample.labels != UNTRAINED)
    expected, following = [], 0.0
    for reward in sample.token_rewards[trained][::-1]:
        following = float(reward) + 0.5 * following
        expected.append(following)
    assert sample.token_advantages[trained] == pytest.approx(expected[::-1])


def test_gamma_per_turn_leaves_a_long_reply_alone(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, episode_ids=(2,), rl_algorithm="ppo", tw_gamma=0.5, gamma_per="turn")
    (sample,) = group.samples
    by_turn = [set(sample.token_advantages[sample.response_indices == turn].tolist()) for turn in range(3)]
    assert by_turn == [{1.0}, {2.0}, {4.0}]


def test_an_aborted_reply_stays_in_the_ids_and_is_not_trained(games_dir: Path) -> None:  # noqa: F811
    def aborts(episode_id: int, turn: int) -> Any:
        return reply(TOKENIZER, "look", finish_reason="abort") if (episode_id, turn) == (0, 0) else policy(episode_id, max(0, turn - 1))

    group = collect(games_dir, play=aborts, episode_ids=(0, 3), tw_invalid_action_penalty=0.5)
    sample = group.samples[0].validate()
    aborted, won = group.episodes[0].turns
    assert won.command == "take coin"
    assert set(sample.response_indices.tolist()) == {-1, 1}
    assert sample.response_ids.tolist() == won.reply.ids.tolist()
    start = len(aborted.new_ids)
    assert sample.input_ids[start : start + len(aborted.reply.ids)].tolist() == aborted.reply.ids.tolist()
    assert (sample.reward, group.records[0]["num_invalid"]) == (4, 0)


def test_window_mode_gives_one_sample_a_turn(games_dir: Path) -> None:  # noqa: F811
    for flags in ({}, {"rl_algorithm": "ppo", "tw_gamma": 0.5}):
        whole = collect(games_dir, episode_ids=(2, 3), **flags)
        group = collect(games_dir, episode_ids=(2, 3), history_mode="window", history_window_turns=2, **flags)
        assert [(sample.episode_id, int(sample.response_indices.max())) for sample in group.samples] == [
            (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3),
        ]  # fmt: skip
        for sample in group.samples:
            turn = int(sample.response_indices.max())
            same = next(other for other in whole.samples if other.episode_id == sample.episode_id)
            here, there = sample.response_indices >= 0, same.response_indices == turn
            for name in ("labels", "old_logprobs", "token_rewards", "token_advantages"):
                assert getattr(sample, name)[here].tolist() == getattr(same, name)[there].tolist()
            assert (sample.advantage, sample.reward, sample.num_turns) == (same.advantage, same.reward, same.num_turns)


@pytest.mark.parametrize(("kind", "temperature"), [("eval", 1.0), ("eval", 0.0), ("train", 1.0)])
def test_the_replies_of_an_evaluation_are_drawn_by_its_own_seeds(games_dir: Path, kind: str, temperature: float) -> None:  # noqa: F811
    """By the episode's seed and the turn, not by the evaluation's number: two runs, and two evaluations of one run, draw alike."""

    def seeds_of(first_episode: int) -> list[list[int | None]]:
        ids = tuple(range(first_episode, first_episode + 4))
        player = build_player(TOKENIZER, lambda *_: "look", tw_max_episode_steps=3, eval_temperature=temperature)
        asyncio.run(play_group(player, deal(games_dir, ids, kind), asyncio.Semaphore(4)))
        return [[request["seed"] for request in player.inference.asked if request["episode_id"] == episode_id] for episode_id in ids]

    seeds = seeds_of(0)
    if kind == "train" or temperature == 0:
        assert seeds == [[None] * 3] * 4
    else:
        assert seeds == seeds_of(100)
        assert len({seed for episode in seeds for seed in episode}) == 12, "each reply has another one"
        assert all(0 <= seed < 2**32 for episode in seeds for seed in episode)


def test_evaluation_has_records_and_its_own_temperature(games_dir: Path) -> None:  # noqa: F811
    player = build_player(TOKENIZER, policy, tw_max_episode_steps=4, eval_temperature=0.25)
    dealt = deal(games_dir, (0, 1), "eval")
    episodes = asyncio.run(play_group(player, dealt, asyncio.Semaphore(1)))
    group = build_group(dealt, episodes, player.config, worker=0)
    assert {request["temperature"] for request in player.inference.asked} == {0.25}
    assert (group.outcome, group.samples) == ("samples", [])
    assert [(record["won"], record["kind"], record["score"], record["max_score"]) for record in group.records] == [
        (True, "eval", 3, 3),
        (False, "eval", 0, 3),
    ]


def test_records_say_everything_that_stats_counts(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir, tw_invalid_action_penalty=0.5)
    record, episode = group.records[2], group.episodes[2]
    seconds = record.pop("seconds")
    assert 0 < seconds < 60
    assert record == {
        "episode_id": 2, "group_id": 11, "game_id": 5, "game": "room-2", "kind": "train", "worker": 6, "won": True, "lost": False,
        "truncated": False, "score": 3.0, "max_score": 3.0, "num_turns": 3, "num_env_steps": 2, "num_invalid": 1, "episode_return": 4.0,
        "reward": 3.5, "num_tokens": len(group.samples[2]), "num_trained": episode.num_trained, "oldest_version": 0, "newest_version": 2,
    }  # fmt: skip


def test_a_game_that_breaks_ends_the_whole_group(games_dir: Path) -> None:  # noqa: F811
    player = build_player(TOKENIZER, policy)
    broken = Deal(group_id=0, episode_ids=(0, 1), seeds=(0, 0), game_id=0, game_path=str(games_dir / "none.z8"), kind="train")
    with pytest.raises(EnvError, match=r"none\.z8"):
        asyncio.run(play_group(player, broken, asyncio.Semaphore(2)))
    assert len(player.envs) == 0


def test_every_nth_episode_is_written(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    group = collect(games_dir)
    write_transcripts(tmp_path / "episodes", group, TOKENIZER, every=2)
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["train-0000000.json", "train-0000002.json"]
    shown = (tmp_path / "episodes" / "train-0000002.json").read_text()
    assert '"reply": "take coin"' in shown
    assert '"command": null' in shown  # the invalid one
    assert shown.count("\n") < 120, "a line a field, not a token"
    write_transcripts(tmp_path / "none", group, TOKENIZER, every=0)
    assert not (tmp_path / "none").exists()
    write_transcripts(tmp_path / "eval", collect(games_dir, kind="eval"), TOKENIZER, every=11)  # game 5 of 4 episodes: 20 to 23
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["eval-002-0022.json"]


def test_a_transcript_holds_the_tokens_of_its_sample(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Put together again it is the sample, token by token; so is a window's, turn by turn."""
    for mode in ("transcript", "window"):
        group = collect(games_dir, history_mode=mode, tw_invalid_action_penalty=0.5)
        for transcript in write_transcripts(tmp_path / mode, group, TOKENIZER, every=1):
            samples = [sample for sample in group.samples if sample.episode_id == transcript["episode_id"]]
            turns, ids = transcript["turns"], [sample.input_ids.tolist() for sample in samples]
            parts = [turn["prompt_ids"] + turn["ids"] for turn in turns]
            assert ids == (parts if mode == "window" else [list(chain(*parts))])
            trained = [sample.labels != UNTRAINED for sample in samples]
            for name, field in (("logprobs", "old_logprobs"), ("advantages", "token_advantages")):
                expected = np.concatenate([getattr(sample, field)[where] for sample, where in zip(samples, trained, strict=True)])
                assert list(chain(*(turn[name] for turn in turns))) == pytest.approx(expected.tolist(), abs=1e-4)
            assert (transcript["outcome"], transcript["group_rewards"]) == ("samples", group.rewards.tolist())
            for turn in turns:
                texts = [TOKENIZER.text_of(token_id) for token_id in turn["prompt_ids"] + turn["ids"]]
                assert texts == turn["prompt_tokens"] + turn["tokens"]


def test_a_readable_file_says_the_same(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Whatever stands in its strings: brackets, quotes, line breaks, spaces."""
    group = collect(games_dir, episode_ids=(0,))
    group.records[0]["game"] = '[ "a"  \n ] {,} [\n 1, 2\n]'
    group.records[0]["odd"] = [["[", "]"], [" [ ", "\n"], [], [{"a": [1, 2]}]]
    [written] = write_transcripts(tmp_path, group, TOKENIZER, every=1)
    [path] = tmp_path.iterdir()
    assert json.loads(path.read_text()) == written


def test_a_transcript_says_where_nothing_was_trained(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    no_signal = collect(games_dir, episode_ids=(3,))
    [transcript] = write_transcripts(tmp_path, no_signal, TOKENIZER, every=1)
    assert (transcript["outcome"], {turn["advantages"] for turn in transcript["turns"]}) == ("zero_std", {None})
    evaluation, *_ = write_transcripts(tmp_path, collect(games_dir, kind="eval"), TOKENIZER, every=1)
    assert (evaluation["outcome"], evaluation["advantage"], evaluation["group_rewards"]) == (None, None, None)
    assert {turn["advantages"] for turn in evaluation["turns"]} == {None}


def test_nothing_of_a_game_or_a_model_is_markdown(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    [transcript] = write_transcripts(tmp_path, collect(games_dir, episode_ids=(0,)), TOKENIZER, every=1)
    attack = "\n\n# heading\n```\n<script>alert(1)</script>\n[link](javascript:alert(1))"
    transcript["turns"][0] |= {"message": attack, "reply": attack}
    lines = transcript_as_markdown(transcript | {"last_observation": attack}).splitlines()
    assert sum("script" in line for line in lines) == 6
    assert all(line.startswith("    ") for line in lines if any(word in line for word in ("heading", "```", "script", "link")))


def test_the_tags_of_a_group(games_dir: Path) -> None:  # noqa: F811
    group = collect(games_dir)
    assert group_values(group, "grpo") == {"GRPO/AdvantageStd": pytest.approx(1.0)}
    values = group_values(collect(games_dir, episode_ids=(2,), rl_algorithm="ppo"), "ppo")
    total, count, largest = values["PPO/RolloutTokenRewardMean"]
    assert (total, largest) == (4, 4)
    assert count == group.episodes[2].num_trained
    assert values["PPO/RolloutRawAdvantageMean"] == (4 * count, count, 4)
    assert values["PPO/RolloutRawAdvantageStd"] == (0, 1, 0)
