"""Reward of an env step, from the design's text: what the score gained, less the penalty, and the end's own part."""

import pytest

from accerl_mp.algorithms.rewards import step_reward


def test_a_plain_step_earns_what_the_score_gained_less_the_step_penalty() -> None:
    assert step_reward(2, 5, won=False, lost=False) == 3.0
    assert step_reward(2, 5, won=False, lost=False, step_penalty=0.25) == pytest.approx(2.75)
    assert step_reward(5, 4, won=False, lost=False) == -1.0


def test_winning_adds_the_bonus_and_losing_takes_the_penalty() -> None:
    assert step_reward(0, 1, won=True, lost=False) == 2.0
    assert step_reward(0, 1, won=True, lost=False, win_bonus=5.0) == 6.0
    assert step_reward(3, 3, won=False, lost=True, lost_penalty=2.0) == -2.0
    assert step_reward(3, 3, won=False, lost=True) == 0.0


def test_bonus_and_penalty_do_not_touch_other_steps() -> None:
    assert step_reward(0, 0, won=False, lost=False, win_bonus=9.0, lost_penalty=9.0) == 0.0
