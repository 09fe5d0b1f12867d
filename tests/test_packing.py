"""Packing: every index once, limits kept, deterministic; and the choice of packs for an optimizer step."""

import numpy as np
import pytest

from accerl_mp.algorithms.packing import choose_packs, fill_pack, plan_packs


def _demo_lengths(count: int, seed: int = 0) -> list[int]:
    """Episodes of 1 to 8 turns of about 170 tokens."""
    rng = np.random.default_rng(seed)
    return np.clip(170 * rng.integers(1, 9, count) + rng.integers(-30, 30, count), 100, 2048).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_every_index_is_in_exactly_one_pack_within_the_limits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 1000, 100).tolist()
    packs = plan_packs(lengths, token_budget=1000, max_samples=4)
    assert sorted(index for pack in packs for index in pack) == list(range(100))
    assert all(1 <= len(pack) <= 4 and sum(lengths[i] for i in pack) <= 1000 for pack in packs)
    assert packs == plan_packs(lengths, token_budget=1000, max_samples=4)


def test_the_plan_is_first_fit_decreasing() -> None:
    lengths = [100, 3000, 8000, 9, 7000, 50]
    assert plan_packs(lengths, token_budget=16384, max_samples=2) == [[2, 4], [1, 0], [5, 3]]
    assert plan_packs(lengths, token_budget=8100, max_samples=9) == [[2, 0], [4, 5, 3], [1]]
    assert plan_packs([], token_budget=10, max_samples=1) == []


def test_first_fit_decreasing_stays_near_the_optimum() -> None:
    lengths = _demo_lengths(500)
    packs = plan_packs(lengths, token_budget=8192, max_samples=500)
    assert len(packs) <= np.ceil(11 / 9 * sum(lengths) / 8192) + 1


def test_a_sample_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sample 2 has 11 tokens"):
        plan_packs([1, 10, 11], token_budget=10, max_samples=4)
    with pytest.raises(ValueError, match="max_samples"):
        plan_packs([1], token_budget=10, max_samples=0)


def test_a_pack_starts_with_the_oldest_and_is_filled_by_size() -> None:
    lengths = [60, 10, 50, 30, 40]
    assert fill_pack(lengths, range(5), token_budget=100, max_samples=9) == [0, 1, 3]
    assert fill_pack(lengths, range(5), token_budget=100, max_samples=2) == [0, 1]


def test_a_step_waits_until_its_packs_are_full() -> None:
    limits = {"num_packs": 2, "token_budget": 100, "max_samples": 3, "pool_size": 12}
    assert choose_packs([10] * 5, **limits) is None
    assert choose_packs([10] * 6, **limits) == [[0, 1, 2], [3, 4, 5]]
    assert choose_packs([60, 60, 60], **limits) == [[0], [1]]  # a third does not fit beside either
    assert choose_packs([60, 60], **limits) is None
    assert choose_packs([60, 98], **limits) is None
    assert choose_packs([98, 98], **limits) == [[0], [1]]


def test_a_step_that_must_start_has_no_empty_pack() -> None:
    limits = {"token_budget": 100, "max_samples": 8, "pool_size": 16, "must_start": True}
    assert choose_packs([10] * 5, num_packs=4, **limits) == [[0, 1], [2], [3], [4]]
    assert choose_packs([10] * 3, num_packs=4, **limits) is None


def test_a_small_pool_does_not_hold_a_step_up() -> None:
    packs = choose_packs([10] * 20, num_packs=2, token_budget=100, max_samples=8, pool_size=4)
    assert packs == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_packs_of_the_demo_mix_are_full_and_no_sample_waits_long() -> None:
    """At least 97 % of the tokens a pack may hold are real, and nobody waits for more than two pools."""
    lengths, budget, pool_size = _demo_lengths(4000), 4096, 64
    waiting, oldest_unseen, used, packs = list(range(256)), 256, [], 0
    while oldest_unseen + 64 < len(lengths):
        chosen = choose_packs([lengths[i] for i in waiting], num_packs=8, token_budget=budget, max_samples=64, pool_size=pool_size)
        assert chosen is not None
        taken = [waiting[i] for pack in chosen for i in pack]
        assert max(oldest_unseen - index for index in taken) <= 256 + 2 * pool_size
        used += taken
        packs += len(chosen)
        gone = set(taken)
        waiting = [index for index in waiting if index not in gone] + list(range(oldest_unseen, oldest_unseen + len(taken)))
        oldest_unseen += len(taken)
    assert len(used) == len(set(used))
    assert sum(lengths[i] for i in used) / (packs * budget) >= 0.97
