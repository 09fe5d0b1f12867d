"""What a rank trains next: order, reuse, expiry, limits, on a real ring. And the metrics of a round that came from it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trainer_cases import LAYOUTS, Rig, made_sample, sharded_model, single_rank

from accerl_mp.samples import count_quarters
from accerl_mp.stats.tags import TAGS, expected
from accerl_mp.trainer.metrics import RoundMetrics
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.replay import Replay
from accerl_mp.trainer.sharded import Reference
from accerl_mp.trainer.step import SUMS, LocalTotals, PackShape, Stepper, StepResult
from accerl_mp.transport import ring_memory as at


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Any]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_a_step_waits_for_all_its_samples_and_says_how_many(make_rig: Any) -> None:
    rig = make_rig()
    assert rig.replay.try_take(0) is None
    assert rig.reader.num_wanted == 8
    rig.put()
    assert rig.replay.try_take(0) is None
    assert rig.reader.num_wanted == 8
    rig.put()
    assert len(rig.train()) == 8
    assert rig.reader.num_wanted == 0


def test_each_sample_is_trained_once_and_in_order_of_age(make_rig: Any) -> None:
    rig = make_rig()
    for _ in range(5):
        rig.put()
    first, second = rig.train(), rig.train()
    assert {group for group, _ in first} == {1, 2}
    assert {group for group, _ in second} == {3, 4}
    assert len(set(first + second)) == 16
    assert rig.replay.try_take(0) is None
    assert rig.reader.num_trained == 16
    assert rig.writer.free_slots == 60


def test_samples_are_given_back_only_when_the_step_starts(make_rig: Any) -> None:
    rig = make_rig()
    rig.put(8)
    taken = rig.replay.try_take(0)
    assert taken is not None
    assert rig.reader.num_live == 8
    rig.replay.commit(taken, 0)
    assert rig.reader.num_live == 0


def test_a_group_whose_oldest_token_is_too_old_goes_as_a_whole(make_rig: Any) -> None:
    """Here for the first token of its second episode alone."""
    rig, rng = make_rig(max_policy_lag=2), np.random.default_rng(1)
    group = [made_sample(rng, group_id=9, episode_id=index) for index in range(4)]
    for sample in group:
        sample.output_versions[:] = 4
    group[1].output_versions[0] = 1
    rig.writer.try_put_group(group)
    rig.put(version=3)
    rig.put(version=4)
    assert {group for group, _ in rig.train(version=4)} == {1, 2}
    counts = rig.replay.take_counts()
    assert (len(counts.expired_lengths), counts.consumed) == (4, 8)
    assert sorted(counts.lags_oldest) == [0] * 4 + [1] * 4
    assert rig.reader.num_expired == 4


def test_without_a_lag_limit_nothing_expires(make_rig: Any) -> None:
    rig = make_rig(max_policy_lag=0)
    rig.put(8, version=0)
    assert len(rig.train(version=1000)) == 8


def test_reuse_trains_each_sample_as_often_as_allowed(make_rig: Any) -> None:
    rig = make_rig(max_sample_reuse=2)
    rig.put(8)
    assert sorted(rig.train()) == sorted(rig.train())
    assert rig.replay.try_take(0) is None
    assert rig.replay.take_counts().uses == 8 * 1 + 8 * 2


def test_expired_and_reused_samples_are_counted_by_length(make_rig: Any) -> None:
    """Quarters of --max-length 100; each number and mean by hand from the samples."""
    rig = make_rig(max_sample_reuse=2, max_policy_lag=2, max_length=100)
    ranks = single_rank()
    metrics = RoundMetrics(rig.config, ranks)
    rig.put(8, version=1)
    first = rig.replay.try_take(1)
    assert first is not None
    rig.replay.commit(first, 1)
    again = rig.replay.try_take(1)
    assert again is not None
    rig.replay.commit(again, 1)
    rig.put(6, version=0)
    tokens = [record.num_tokens for record in rig.reader.ready() if record.uses == 0]
    assert rig.replay.try_take(3) is None
    metrics.add_replay(rig.replay.take_counts())
    values = metrics.close_round()
    ranks.leave()
    for tag, lengths in (("Replay/Expired", tokens), ("Replay/Reused", [len(sample) for sample in again.samples])):
        assert values[tag][0] == len(lengths)
        assert values[f"{tag}TokensMean"][:2] == (sum(lengths), len(lengths))
        quarters = [sum(25 * n < length <= 25 * (n + 1) for length in lengths) for n in range(4)]
        assert [values[f"{tag}Quarter{n}"][0] for n in range(1, 5)] == quarters
        assert sum(count > 0 for count in quarters) > 1
        assert all(name in TAGS for name in values)


def test_lengths_on_a_border_belong_to_the_quarter_below() -> None:
    assert count_quarters([1, 50, 51, 100, 101, 150, 151, 200, 999], 200) == [2, 2, 2, 3]


def test_unlimited_reuse_prefers_what_was_used_least(make_rig: Any) -> None:
    rig = make_rig(max_sample_reuse=0)
    rig.put(8)
    first = rig.train()
    rig.put(4)
    second = rig.train()
    assert {(2, episode) for episode in range(4)} < set(second)
    assert len(set(second) & set(first)) == 4


def test_uniform_order_is_seeded(make_rig: Any) -> None:
    rig = make_rig(replay_order="uniform", max_sample_reuse=0, seed=5)
    rig.put(32)
    first, second = rig.train(), rig.train()
    assert first != second
    again = Replay(rig.reader, rig.config)
    taken = again.try_take(0)
    assert taken is not None
    assert sorted((sample.group_id, sample.episode_id) for sample in taken.samples) == sorted(first)


def test_the_first_step_waits_for_the_minimum(make_rig: Any) -> None:
    rig = make_rig(min_replay_size_per_rank=16)
    rig.put(12)
    assert rig.replay.try_take(0) is None
    assert rig.reader.num_wanted == 16
    rig.put(4)
    rig.train()
    rig.train()  # the gate is for the first step only


def test_packs_keep_their_limits_and_none_is_empty(make_rig: Any) -> None:
    rig = make_rig(train_packing="varlen", train_token_budget=200, max_length=200, batch_size=6, grad_accum_steps=3)
    for _ in range(10):
        rig.put()
    taken = rig.replay.try_take(0)
    assert taken is not None
    assert len(taken.micro_batches) == 3
    for pack in taken.micro_batches:
        assert 1 <= len(pack) <= 6
        assert sum(len(sample) for sample in pack) <= 200


def test_a_full_ring_starts_a_step_that_could_never_get_more(make_rig: Any) -> None:
    """Capacity 10, groups of 4: a third group never fits, so a step of 16 begins with the 8 that are there."""
    rig = make_rig(replay_capacity=10, batch_size=8)
    rig.put()
    assert rig.replay.try_take(0) is None
    rig.put()
    assert not rig.put()
    assert len(rig.train()) == 8


@pytest.mark.parametrize("reuse", [1, 2, 0])
def test_a_ring_that_is_full_by_its_bytes_starts_a_step_too(make_rig: Any, reuse: int) -> None:
    """Nothing in it was trained, so nothing may be evicted, and a step of 32 would never be complete."""
    rig, rng = make_rig(size_bytes=1, batch_size=16, max_length=800, max_sample_reuse=reuse), np.random.default_rng(0)
    num_groups = 0
    while rig.writer.try_put_group([made_sample(rng, 40, group_id=num_groups, episode_id=index) for index in range(4)]):
        num_groups += 1
    assert 1 < num_groups < 8
    assert len(rig.train()) == 4 * num_groups
    assert rig.put(), "there is room again"


def test_after_the_last_step_the_ring_is_emptied_so_that_the_last_evaluation_is_not_blocked(make_rig: Any) -> None:
    rig = make_rig(batch_size=2, grad_accum_steps=1, replay_capacity=4)
    rig.put(4)
    assert rig.writer.free_slots == 0
    rig.replay.let_go()
    assert (rig.writer.free_slots, rig.writer.counters()["left"][0]) == (4, 4)


def test_a_sample_for_another_algorithm_is_refused_and_counted(make_rig: Any) -> None:
    rig = make_rig()
    rig.put(4, algorithm="ppo")
    rig.put(8)
    assert {group for group, _ in rig.train()} == {2}
    counts = rig.replay.take_counts()
    assert (counts.invalid, counts.consumed) == (4, 8)
    assert rig.reader.num_live == 0


def test_a_group_with_a_refused_member_is_dropped_whole(make_rig: Any) -> None:
    """The rest of it would be a biased group: its advantages add up to 0 only together."""
    rig = make_rig()
    rng = np.random.default_rng(1)
    rig.writer.try_put_group([made_sample(rng, group_id=9, algorithm="ppo" if index == 2 else "grpo") for index in range(4)])
    for _ in range(2):
        rig.put(4)
    assert {group for group, _ in rig.train()} == {1, 2}
    assert rig.replay.take_counts().invalid == 4
    assert rig.reader.num_live == 0


def test_a_group_with_a_damaged_member_is_dropped_whole(make_rig: Any) -> None:
    rig = make_rig()
    for _ in range(3):
        rig.put(4)
    second = rig.reader.ready()[1]
    rig.writer.memory.arena[int(rig.reader.memory.slots[second.slot, at.FIRST_PAGE]), 100:120] ^= 0xFF
    assert {group for group, _ in rig.train()} == {2, 3}
    counts = rig.replay.take_counts()
    assert (counts.torn, counts.invalid, counts.consumed) == (4, 0, 8)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_tag_of_the_trainer_is_declared_finite_and_complete(layout: dict, algorithm: str, tmp_path: Path, make_rig: Any) -> None:
    tiny.save_tiny(tmp_path / "model")
    options = {
        "rl_algorithm": algorithm,
        "old_new_kl_coef": 0.1,
        "ref_kl_coef": 0.1,
        "recompute_old_logprobs": True,
        "train_token_budget": 200,
        "max_length": 200,
    }
    rig = make_rig(**layout, **options, model_path=str(tmp_path / "model"))
    ranks = single_rank()
    values = _values_of_a_round(rig, ranks, algorithm)
    ranks.leave()
    for tag, (total, count, largest) in values.items():
        assert TAGS[tag].source == "trainer", tag
        assert count > 0, tag
        assert math.isfinite(total), tag
        assert math.isfinite(largest), tag
    missing = {tag for tag in expected(rig.config) if TAGS[tag].source == "trainer"} - set(values)
    assert missing <= {"Train/PeakMemoryGiB"}
    assert values["Replay/TrainSampleTrainerVersionLagMean"][0] / values["Replay/TrainSampleTrainerVersionLagMean"][1] == 1.0
    assert values["Train/CumulativeGlobalTrainingSamples"][0] == values["Train/SegmentGlobalTrainingSamples"][0]


def test_a_skipped_step_counts_as_bad_and_changes_no_mean(make_rig: Any) -> None:
    rig, ranks = make_rig(train_packing="varlen", train_token_budget=300, max_length=100), single_rank()
    for _ in range(4):
        rig.put()
    first, second = rig.replay.try_take(0), None
    rig.replay.commit(first, 0)
    second = rig.replay.try_take(0)
    zeros, common = dict.fromkeys(SUMS, 0.0), {"learning_rate": 1e-3, "totals": LocalTotals.of([])}
    good = StepResult(
        zeros | {"num_tokens": 50.0, "k3": 2.0}, ratio_max=1.5, grad_norm=1.0, is_bad=False, **common, packs=[PackShape(200, 4, 60, 0.01)]
    )
    bad = StepResult(zeros, ratio_max=math.nan, grad_norm=math.inf, is_bad=True, **common, packs=[PackShape(9, 9, 9, 9.0)])

    def values(*steps: tuple[StepResult, Any]) -> dict[str, tuple[float, float, float]]:
        metrics = RoundMetrics(rig.config, ranks)
        for result, taken in steps:
            metrics.add_step(result, taken.samples, choose_seconds=0.01)
        return metrics.close_round()

    alone, both = values((good, first)), values((good, first), (bad, second))
    ranks.leave()
    assert both.pop("Train/BadSteps")[0] == 1
    seconds = [tag for tag in alone if "PerSec" in tag or "Sec" in tag or "Memory" in tag]
    assert {tag: value for tag, value in both.items() if tag not in seconds} == {tag: alone[tag] for tag in both if tag not in seconds}
    assert both["Train/GlobalTrainingSamplesPerOptimizerStep"][2] == 8


def _values_of_a_round(rig: Rig, ranks: Ranks, algorithm: str) -> dict[str, tuple[float, float, float]]:
    """Two optimizer steps."""
    metrics = RoundMetrics(rig.config, ranks)
    model = sharded_model(rig.config)
    reference = Reference.if_wanted(rig.config, ranks, torch.float32)
    stepper = Stepper(model, rig.config, ranks, unsharded=True, reference=reference)
    for _ in range(12):
        rig.put(algorithm=algorithm)
    for step in range(2):
        taken = rig.replay.try_take(1)
        assert taken is not None
        rig.replay.commit(taken, 1)
        result = stepper.run(taken.micro_batches, LocalTotals.of(taken.samples), step=step, version=0)
        metrics.add_step(result, taken.samples, choose_seconds=0.01)
    metrics.add_replay(rig.replay.take_counts())
    return metrics.close_round()
