"""Replies leave vLLM's scheduler whole: every token once, in order, with its logprob. The real scheduler: tests that use `engine`."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from accerl_mp.inference.scheduler import Holding

pytestmark = pytest.mark.timeout(60)


class Script:
    """A scheduler of vLLM's whose steps are given."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.steps: list[dict[int, list[EngineCoreOutput]]] = []
        self.ended: set[str] | None = None

    def update_from_output(self, _scheduled: Any, _made: Any) -> dict[int, EngineCoreOutputs]:
        return {client: EngineCoreOutputs(outputs=list(step), finished_requests=self.ended) for client, step in self.steps.pop(0).items()}

    def finish_requests(self, keys: list[str], _status: Any) -> list[str]:
        return [key for key in keys if self.requests.pop(key, None)]


class Scheduler(Holding, Script):
    def step(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, list[EngineCoreOutput]]:
        """What comes of a step with these outputs."""
        self.steps.append(outputs)
        return {client: found.outputs for client, found in self.update_from_output(None, None).items()}


def output(key: str, ids: list[int], *, reason: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    """A token's logprob is minus its id, its rank twice its id."""
    array = np.array(ids, np.int32)
    logprobs = LogprobsLists(array[:, None], -array[:, None].astype(np.float32), 2 * array, None) if ids else None
    return EngineCoreOutput(key, list(ids), new_logprobs=logprobs, finish_reason=reason, **fields)


def check_logprobs(found: EngineCoreOutput) -> None:
    if not found.new_token_ids:
        assert found.new_logprobs is None
        return
    ids, logprobs, ranks, _ = found.new_logprobs
    assert ids[:, 0].tolist() == found.new_token_ids
    assert (-logprobs[:, 0]).tolist() == found.new_token_ids
    assert (ranks // 2).tolist() == found.new_token_ids


@pytest.mark.parametrize("gives", [False, True], ids=["alone", "given in between"])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_leaves_once_in_order_with_its_logprob(seed: int, gives: bool) -> None:
    random = np.random.default_rng(seed)
    scheduler, wanted, got = Scheduler(), defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    left = {f"{client}-{number}": int(random.choice([1, 2, 40, 300])) for client in (0, 3) for number in range(8)}
    whole: dict[str, int] = defaultdict(int)
    serial = 0
    while left:
        step: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for key in [key for key in left if random.random() < 0.8]:
            number = min(left[key], int(random.choice([0, 1, 1, 1, 3])))
            ids = list(range(serial, serial + number))
            serial += number
            wanted[key] += ids
            left[key] -= number
            reason = FinishReason.STOP if left[key] == 0 else None
            step[int(key[0])].append(output(key, ids, reason=reason))
            if reason is not None:
                del left[key]
        messages = [scheduler.step(step)]
        if gives and random.random() < 0.3:
            messages.append({client: found.outputs for client, found in scheduler.give().items()})
        for client, found in [item for message in messages for item in message.items()]:
            assert found
            for one in found:
                assert client == int(one.request_id[0])
                check_logprobs(one)
                got[one.request_id] += one.new_token_ids
                whole[one.request_id] += one.finish_reason is not None
                assert gives or one.finish_reason is FinishReason.STOP
    assert got == wanted
    assert set(whole.values()) == {1}
    assert not scheduler.give()


def test_what_the_first_and_the_last_output_say_is_kept() -> None:
    scheduler, stats = Scheduler(), SimpleNamespace(num_cached_tokens=7)
    assert scheduler.step({0: [output("a", [5], prefill_stats=stats)]}) == {}
    (whole,) = scheduler.step({0: [output("a", [6], reason=FinishReason.LENGTH, stop_reason=9, num_nans_in_logits=2)]})[0]
    assert (whole.prefill_stats, whole.finish_reason, whole.stop_reason, whole.num_nans_in_logits) == (stats, FinishReason.LENGTH, 9, 2)


def test_a_reply_of_one_step_passes_as_it_is() -> None:
    """A probe's too, with the logprobs of its prompt."""
    scheduler, probe = Scheduler(), output("p", [5], reason=FinishReason.LENGTH, new_prompt_logprobs_tensors=object())
    assert scheduler.step({0: [probe]})[0] == [probe]


def test_who_has_ended_is_said_even_where_no_reply_is_over() -> None:
    scheduler = Scheduler()
    scheduler.ended = {"b"}
    assert scheduler.step({0: [output("a", [5])], 1: []}) == {0: [], 1: []}


def test_an_aborted_reply_leaves_nothing_behind() -> None:
    scheduler = Scheduler()
    scheduler.requests = {"a": SimpleNamespace(num_output_tokens=1), "b": SimpleNamespace(num_output_tokens=4)}
    assert scheduler.num_made() == {"a": 1, "b": 4}
    scheduler.step({0: [output("a", [5]), output("b", [1, 2, 3, 4])]})
    scheduler.finish_requests(["a"], None)
    (begun,) = scheduler.give()[0].outputs
    assert (begun.request_id, begun.new_token_ids, begun.finish_reason) == ("b", [1, 2, 3, 4], None)
    assert scheduler.num_made() == {"b": 4}


def test_given_outputs_come_ahead_of_what_follows() -> None:
    sent: list[Any] = []
    scheduler = Scheduler()
    scheduler.step({2: [output("a", [5])], 0: [output("b", [6])]})
    core = SimpleNamespace(scheduler=scheduler, output_queue=SimpleNamespace(put_nowait=sent.append))
    EngineCore.give_outputs(core)
    EngineCore.give_outputs(core)
    assert [(client, [one.new_token_ids for one in outputs.outputs]) for client, outputs in sent] == [(2, [[5]]), (0, [[6]])]


def test_a_swap_says_what_each_request_had_at_that_moment() -> None:
    calls: list[Any] = []
    scheduler = Scheduler()
    scheduler.requests = {"a": SimpleNamespace(num_output_tokens=3)}

    def collective_rpc(method: str, args: tuple[int]) -> list[str]:
        calls.append((method, args))
        return ["report"]

    assert EngineCore.swap_weights(SimpleNamespace(scheduler=scheduler, collective_rpc=collective_rpc), 4) == (["report"], {"a": 3})
    assert calls == [("sync_swap", (4,))]
