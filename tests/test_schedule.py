"""Learning rate: warm-up that starts above 0, cosine, floor."""

import math

import pytest

from accerl_mp.trainer.schedule import learning_rate


def test_the_first_step_has_a_share_of_the_peak_and_the_warm_up_is_linear() -> None:
    rates = [learning_rate(step, peak=1e-3, warmup_steps=4, max_steps=100) for step in range(4)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


def test_the_cosine_goes_from_peak_to_the_floor() -> None:
    settings = {"peak": 2.0, "warmup_steps": 10, "max_steps": 110, "min_lr_ratio": 0.1}
    assert learning_rate(10, **settings) == 2.0
    assert learning_rate(60, **settings) == pytest.approx(0.2 + 0.9)
    assert learning_rate(35, **settings) == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(110, **settings) == pytest.approx(0.2)
    assert learning_rate(500, **settings) == pytest.approx(0.2)


def test_the_references_numbers_after_its_warm_up() -> None:
    rates = [learning_rate(step, peak=1e-6, warmup_steps=5, max_steps=10) for step in range(6, 10)]
    assert rates == pytest.approx([9.045e-7, 6.545e-7, 3.455e-7, 0.955e-7], rel=1e-3)


@pytest.mark.parametrize(("warmup_steps", "step", "expected"), [(0, 0, 1.0), (10, 9, 1.0), (20, 4, 0.25)])
def test_no_warm_up_and_a_warm_up_as_long_as_the_run(warmup_steps: int, step: int, expected: float) -> None:
    assert learning_rate(step, peak=1.0, warmup_steps=warmup_steps, max_steps=10) == pytest.approx(expected)
