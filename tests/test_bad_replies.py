"""Games and replies that nobody would send on purpose: named where they must be, survived everywhere."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_peers import FakeInference, reply_fields
from games_fixture import games_dir  # noqa: F401
from test_rollout import TOKENIZER, generate

from accerl_mp.config import Config
from accerl_mp.ingest.dealer import MAX_STRIKES, Dealer, Schedule
from accerl_mp.rollout.client import MAX_ERRORS, InferenceError
from accerl_mp.rollout.collect import Deal, build_group, play_group
from accerl_mp.rollout.env import EnvError, Observation, TextWorldEnv
from accerl_mp.rollout.episode import Player, Reply
from accerl_mp.rollout.transcript import ChatFormat
from accerl_mp.timing import Timer
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from tests.poisoned_games import _JSON, poison, types_swapped

pytestmark = pytest.mark.filterwarnings("ignore::Warning:jericho")


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path)
    sockets.make_folder(paths)
    yield paths
    shutil.rmtree(paths.sockets)


# Games


@pytest.mark.parametrize("kind", ["damaged", "without json", *_JSON])
def test_a_game_with_nonsense_in_its_files_is_an_error_that_names_it(games_dir: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    bad = poison(games_dir / "room-0.z8", tmp_path / "bad.z8", kind)
    with pytest.raises(EnvError, match=r"bad\.z8"):
        TextWorldEnv(bad).reset(1)


def test_a_json_whose_values_have_other_types_is_an_error_that_names_the_game(games_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    bad = poison(games_dir / "room-0.z8", tmp_path / "bad.z8", "json: a list")
    bad.with_suffix(".json").write_bytes(types_swapped(games_dir / "room-0.z8"))
    with pytest.raises(EnvError, match=r"bad\.z8"):
        TextWorldEnv(bad).reset(1)


class Desert:
    """A game without an admissible command."""

    path = "/games/desert.z8"

    def reset(self, seed: int) -> Observation:
        return Observation(objective="Get out.", text="Sand.", inventory="", commands=(), score=0.0, max_score=1.0)

    def step(self, command: str) -> Observation:
        raise AssertionError("nothing may be done here")

    def close(self) -> None: ...


class OneEnv:
    """In place of the pool."""

    def acquire(self, path: str) -> Desert:
        return Desert()

    def release(self, env: Any) -> None: ...

    def discard(self, env: Any) -> None: ...


class Says:
    """In place of inference: any ids at all."""

    def __init__(self, rng: random.Random, finish_reason: str = "stop") -> None:
        self._rng, self._finish_reason = rng, finish_reason

    async def generate(self, **_request: Any) -> Reply:
        ids = np.array([self._rng.randrange(0, 10_000) for _ in range(self._rng.randrange(0, 16))], np.int32)
        ones = np.ones(len(ids), np.float32)
        return Reply(ids=ids, logprobs=-ones, versions=ones.astype(np.int32), finish_reason=self._finish_reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_game_without_admissible_commands_and_replies_of_any_ids_make_valid_samples(algorithm: str) -> None:
    config = Config.from_flat({"tw_max_episode_steps": 3, "keep_zero_std_groups": True, "rl_algorithm": algorithm})
    player = Player(
        config=config,
        tokenizer=TOKENIZER,
        chat=ChatFormat.probe(TOKENIZER),
        envs=OneEnv(),  # type: ignore[arg-type]
        inference=Says(random.Random(0)),
        timer=Timer(),
        guard=lambda _path: nullcontext(),
    )
    deal = Deal(group_id=0, episode_ids=tuple(range(6)), seeds=tuple(range(6)), game_id=0, game_path="/games/desert.z8", kind="train")

    async def play() -> Any:
        return await play_group(player, deal, asyncio.Semaphore(6))

    episodes = asyncio.run(play())
    group = build_group(deal, episodes, config, worker=0)
    assert all(episode.truncated and not episode.lost and episode.num_env_steps == 0 for episode in episodes)
    assert group.samples, "they are trained like any other"
    for sample in group.samples:
        sample.validate()


# Replies


@pytest.mark.parametrize(
    "fields",
    [
        reply_fields([5]) | {"ids": b"abc"},
        reply_fields([5]) | {"logprobs": b"\0\0\xc0\x7f"},
        reply_fields([5]) | {"versions": np.array([-1], np.int32).tobytes()},
        reply_fields([-5]),
        reply_fields([5], finish_reason="tired"),
    ],
    ids=["cut", "not a number", "of no version", "negative ids", "no known end"],
)
def test_a_reply_with_impossible_numbers_is_refused_and_asked_for_again(paths: RunPaths, fields: dict[str, Any]) -> None:
    answers = [fields, reply_fields([6])]
    inference = FakeInference(paths, lambda _request, number: answers[min(number, 1)]).start()
    reply, num_resubmitted = generate(paths)
    inference.stop()
    assert (reply.ids.tolist(), num_resubmitted) == ([6], 1)


def test_a_reply_that_stays_impossible_ends_the_turn_by_name(paths: RunPaths) -> None:
    inference = FakeInference(paths, lambda _request, _number: reply_fields([-5])).start()
    with pytest.raises(InferenceError, match="impossible numbers"):
        generate(paths)
    inference.stop()
    assert len(inference.requests) == MAX_ERRORS


class Babbler(FakeInference):
    """Sends nonsense before each answer."""

    def answer(self, channel: str, identity: bytes, frames: list[bytes]) -> None:
        for data in (b"", b"\xff" * 40, b"{}", channels.pack("wait", {"op": "wait"})):
            self.send(channel, identity, data)
        super().answer(channel, identity, frames)


def test_messages_that_are_no_reply_are_dropped(paths: RunPaths) -> None:
    inference = Babbler(paths, lambda _request, _number: reply_fields([6])).start()
    reply, num_resubmitted = generate(paths)
    inference.stop()
    assert (reply.ids.tolist(), num_resubmitted) == ([6], 0)


# Strikes


def test_a_crash_in_an_env_step_is_that_games_strike_and_nobody_elses() -> None:
    dealer = Dealer(Schedule(seed=0, num_games=5, group_size=2), num_workers=1)
    bad = dealer.next_deal(0, 1, may_train=True)
    good = dealer.next_deal(0, 1, may_train=True)
    for life in range(2, 2 + MAX_STRIKES):
        assert dealer.set_aside == set()
        dealer.hear(0, life, [], died_playing=bad.group_id)
        again = {deal.group_id for _ in range(2) if (deal := dealer.next_deal(0, life, may_train=False))}
        assert good.group_id in again, "it was only there"
    assert dealer.set_aside == {bad.game_id}
    assert "in the middle of an env step" in dealer.reasons[bad.game_id]
    assert dealer.take_given_up() == [bad.group_id]
    assert dealer.take_given_up() == []


@pytest.mark.parametrize("plays", [0, -1], ids=["in a step of the game", "in no step"])
def test_processes_that_somebody_kills_count_against_no_game_however_many_in_a_row(plays: int) -> None:
    dealer = Dealer(Schedule(seed=0, num_games=5, group_size=2), num_workers=1)
    held = [dealer.next_deal(0, 1, may_train=True) for _ in range(2)]
    assert held[0].group_id == 0
    for life in range(2, 2 + 2 * MAX_STRIKES):
        dealer.hear(0, life, [], died_playing=plays, was_killed=True)
        assert [dealer.next_deal(0, life, may_train=False) for _ in range(2)] == held
    assert dealer.set_aside == set()
    assert dealer.strikes()["strikes"] == []


def test_after_a_crash_that_is_known_the_other_groups_get_no_strike_however_often_it_happens() -> None:
    dealer = Dealer(Schedule(seed=0, num_games=50, group_size=2), num_workers=1)
    innocent = dealer.next_deal(0, 1, may_train=True)
    for life in range(2, 12):
        culprit = dealer.next_deal(0, life - 1, may_train=True)
        dealer.hear(0, life, [], died_playing=culprit.group_id)
        while deal := dealer.next_deal(0, life, may_train=False):
            if deal.group_id != innocent.group_id:
                dealer.finish(deal.group_id)
    assert innocent.game_id not in dealer.set_aside
