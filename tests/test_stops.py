"""Signals that are put off: none acts in the block, none is lost, none is swallowed later on."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from accerl_mp.stops import put_off

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)
"""Any two will do; these two are nobody else's here."""


class Came(Exception):
    pass


@pytest.fixture
def acted() -> Iterator[list[int]]:
    """Which signals have acted: each raises, as Ctrl+C does."""
    seen: list[int] = []

    def act(number: int, _frame: object) -> None:
        seen.append(number)
        raise Came(number)

    before = {number: signal.signal(number, act) for number in NUMBERS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def all_act(seen: list[int]) -> bool:
    """Whether both do what they did before anything was put off."""
    seen.clear()
    for number in NUMBERS:
        with pytest.raises(Came):
            signal.raise_signal(number)
    return seen == list(NUMBERS)


def hold(named: Sequence[signal.Signals], came: Sequence[signal.Signals], acted: list[int]) -> None:
    with put_off(*named):
        for number in came:
            signal.raise_signal(number)
        assert not acted


def test_without_a_signal_nothing_is_left(acted: list[int]) -> None:
    hold(NUMBERS, [], acted)
    assert all_act(acted)


@pytest.mark.parametrize("order", [NUMBERS, NUMBERS[::-1]], ids=["as named", "reversed"])
def test_two_signals_act_after_the_block_each_once_in_their_order(acted: list[int], order: tuple[signal.Signals, ...]) -> None:
    with pytest.raises(Came):
        hold(NUMBERS, [*order, *order], acted)
    assert acted == list(order)
    assert all_act(acted)


def test_one_that_is_not_named_acts_at_once(acted: list[int]) -> None:
    with pytest.raises(Came):
        hold(NUMBERS[:1], NUMBERS, acted)
    assert acted == [signal.SIGUSR2, signal.SIGUSR1]
    assert all_act(acted)


def hold_in_another_block(acted: list[int]) -> None:
    with put_off(*NUMBERS):
        hold(NUMBERS, NUMBERS[:1], acted)
        signal.raise_signal(signal.SIGUSR2)
        assert not acted


def test_within_another_block_they_wait_for_the_outer_one(acted: list[int]) -> None:
    with pytest.raises(Came):
        hold_in_another_block(acted)
    assert acted == list(NUMBERS)
    assert all_act(acted)


def test_an_ignored_one_stays_ignored(acted: list[int]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    hold(NUMBERS, NUMBERS[:1], acted)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert not acted


def test_what_would_have_ended_the_process_ends_it_after_the_block() -> None:
    code = """import signal; from accerl_mp.stops import put_off
with put_off(signal.SIGTERM):
    signal.raise_signal(signal.SIGTERM)
    print("still here", flush=True)
print("and not ended")"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "still here\n"), ended.stderr


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", range(4), ids=["first set", "both set", "first restored", "both restored"])
def test_one_that_comes_while_handlers_change_acts_once_and_leaves_none_behind(
    acted: list[int], monkeypatch: pytest.MonkeyPatch, moment: int, number: signal.Signals
) -> None:
    set_handler, calls = signal.signal, 0

    def set_and_raise(changed: int, handler: Callable | int) -> object:
        nonlocal calls
        before = set_handler(changed, handler)
        calls += 1
        if calls == moment + 1:
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", set_and_raise)
    with pytest.raises(Came):
        hold(NUMBERS, [], acted)
    assert acted == [number]
    assert all_act(acted)
