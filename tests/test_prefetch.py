"""The next micro-batch is built while the current one computes: the order, the bound, the errors, and in a real optimizer step."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
from trainer_cases import CPU, config_for, made_samples, sharded_model, single_rank, train_steps

from accerl_mp.trainer import step
from accerl_mp.trainer.batches import build_micro_batch
from accerl_mp.trainer.prefetch import built_ahead
from accerl_mp.trainer.ranks import Ranks

WAIT_S = 30.0


class Builder:
    """Builds part k as "k", and knows which builds have begun."""

    def __init__(self, count: int) -> None:
        self.begun = [threading.Event() for _ in range(count)]

    def __call__(self, part: int) -> str:
        self.begun[part].set()
        return str(part)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


def test_the_next_part_is_built_while_the_caller_has_the_one_before_and_no_further() -> None:
    build = Builder(4)
    for part, built in enumerate(built_ahead(range(4), build, device=CPU)):
        assert built == str(part)
        if part + 1 < 4:
            assert build.begun[part + 1].wait(WAIT_S), "the next part is not built ahead"
        assert not any(event.is_set() for event in build.begun[part + 2 :])


@pytest.mark.parametrize("count", [0, 1])
def test_few_parts_are_no_problem(count: int) -> None:
    assert list(built_ahead(range(count), str, device=CPU)) == [str(part) for part in range(count)]


def test_an_error_is_raised_where_its_part_is_due_and_no_thread_stays() -> None:
    def build(part: int) -> int:
        if part == 2:
            raise ValueError("part 2 is broken")
        return part

    got = []
    with pytest.raises(ValueError, match="part 2 is broken"):
        got.extend(built_ahead(range(4), build, device=CPU))
    assert got == [0, 1]
    with closing(built_ahead(range(4), build, device=CPU)) as parts:
        assert next(parts) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("packs")]


def test_a_step_builds_each_pack_while_the_one_before_computes(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pack's backward waits until the build of the next has begun: without a thread it would wait in vain."""
    tiny.save_tiny(tmp_path)
    config, samples = config_for(tmp_path), made_samples(8)
    micro_batches = [samples[start : start + 2] for start in range(0, 8, 2)]
    begun, computed = [threading.Event() for _ in micro_batches], []
    backward = step.Stepper._backward

    def build(pack: list[Any], **options: Any) -> Any:
        begun[micro_batches.index(pack)].set()
        return build_micro_batch(pack, **options)

    def waiting_backward(stepper: step.Stepper, batch: Any, *arguments: Any) -> Any:
        computed.append(batch.lengths)
        if len(computed) < len(micro_batches):
            assert begun[len(computed)].wait(WAIT_S), "the next pack is not built meanwhile"
        return backward(stepper, batch, *arguments)

    monkeypatch.setattr(step, "build_micro_batch", build)
    monkeypatch.setattr(step.Stepper, "_backward", waiting_backward)
    (result,) = train_steps(sharded_model(config), config, ranks, [micro_batches])
    assert computed == [[len(sample) for sample in pack] for pack in micro_batches]
    assert [pack.num_tokens for pack in result.packs] == [sum(lengths) for lengths in computed]
