"""The sentence a round, on situations that were recorded from real runs (`situations/`, made by `record_situation.py`).

trainer-bound     every sample may be reused without limit
sync-bound        small steps with a push after each, an engine that takes one request at a time
generation-bound  the same engine with a push every third step; the last two rounds
CPU-bound         the demo on two cores, beside other work; the only one in which the free cores were measured
env-bound         the last ten rounds of a longer demo run: most groups are won, give no signal, and more have to be played
"""

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from accerl_mp.config import Config
from accerl_mp.stats.bottleneck import NUM_ROUNDS, Doctor

FOLDER = Path(__file__).parent / "situations"
FLAG_OF = {
    "trainer-bound": "--fsdp-world-size",
    "generation-bound": "--infer-size",
    "env-bound": "--num-rollout-workers",
    "sync-bound": "--sync-every-optimizer-steps",
    "CPU-bound": "--placement",
}


def recorded(kind: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{kind.lower()}.json").read_text())


@pytest.mark.parametrize("kind", FLAG_OF)
def test_a_recorded_run_is_bound_by_what_its_settings_bind(kind: str) -> None:
    """In most of its rounds; and every sentence of it names the flag to change."""
    run = recorded(kind)
    config = Config.from_flat(run["flags"])
    doctor = Doctor(config)
    said = [doctor.say(values) for values in run["rounds"]]
    assert len(said) >= 2
    kinds = collections.Counter(one.partition(":")[0] for one in said)
    assert kinds.most_common(1)[0][0] == kind, said
    assert kinds[kind] > len(said) / 2, said
    assert all(FLAG_OF[kind] in one for one in said if one.startswith(kind)), said


@pytest.mark.parametrize("kind", FLAG_OF)
def test_what_bounds_a_recorded_run_does_not_change_from_round_to_round(kind: str) -> None:
    """Once there are as many rounds as a sentence stands for."""
    run = recorded(kind)
    doctor = Doctor(Config.from_flat(run["flags"]))
    kinds = [doctor.say(values).partition(":")[0] for values in run["rounds"]][NUM_ROUNDS - 1 :]
    assert sum(before != now for before, now in itertools.pairwise(kinds)) <= 1, kinds


@pytest.mark.parametrize("kind", FLAG_OF)
def test_recorded_shares_are_shares(kind: str) -> None:
    """Phases of one process exclude each other, but for the time between two of its reports."""
    for values in recorded(kind)["rounds"]:
        assert all(0 <= value <= 1 for tag, value in values.items() if tag != "Run/FreeCores")
        assert sum(value for tag, value in values.items() if tag.startswith("Time/trainer/")) <= 1.05
