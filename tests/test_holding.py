"""Replies leave vLLM's scheduler whole: every token once, in order, with its logprob. The real scheduler: tests that use `engine`."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from accerl_mp.inference.engine import Engine, EngineError
from accerl_mp.inference.scheduler import Holding

pytestmark = pytest.mark.timeout(60)


class Script:
    """A scheduler of vLLM's whose steps are given."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.steps: list[dict[int, list[EngineCoreOutput]]] = []
        self.ended: set[str] | None = None
        self.stats: Any = None

    def update_from_output(self, _scheduled: Any, _made: Any) -> dict[int, EngineCoreOutputs]:
        said = {"finished_requests": self.ended, "scheduler_stats": self.stats}
        return {client: EngineCoreOutputs(outputs=list(step), **said) for client, step in self.steps.pop(0).items()}

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
        assert all(len(begun.logprobs) < 128 for begun in scheduler._begun.values()), "joined now and then"
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


@pytest.mark.parametrize("said", [{"ended": {"b"}}, {"stats": object()}], ids=["who has ended", "statistics"])
def test_what_else_a_message_says_is_said_even_where_no_reply_is_over(said: dict[str, Any]) -> None:
    scheduler = Scheduler()
    vars(scheduler).update(said)
    assert scheduler.step({0: [output("a", [5])], 1: []}) == {0: [], 1: []}


def test_a_reply_that_is_over_in_a_step_survives_what_is_aborted_in_it() -> None:
    scheduler = Scheduler()
    scheduler.requests = {"a": object(), "b": object()}
    scheduler.step({0: [output("a", [5]), output("b", [6])]})
    del scheduler.requests["a"]  # as vLLM does with one that is over, before the step's outputs come here
    scheduler.finish_requests(["b"], None)
    (whole,) = scheduler.step({0: [output("a", [7], reason=FinishReason.STOP)]})[0]
    assert whole.new_token_ids == [5, 7]


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


class FakeLLM:
    """The parts of AsyncLLM that a pause and a swap touch."""

    def __init__(self, calls: list[Any], answers: dict[str, Any]) -> None:
        self._calls, self._answers = calls, answers
        self.errored, self.output_handler = False, None
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 9)
        self.engine_core = SimpleNamespace(
            outputs_queue=None, get_output_async=None, pause_scheduler_async=self._pause, call_utility_async=self._utility
        )

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        self._calls.append((mode, clear_cache))

    async def _utility(self, method: str, *args: Any) -> Any:
        self._calls.append((method, *args))
        answer = self._answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def collective_rpc(self, method: str, args: tuple) -> Any:
        return await self._utility(method, *args)


def engine_with(calls: list[Any], answers: dict[str, Any]) -> Engine:
    return Engine(FakeLLM(calls, answers), [], num_workers=1, max_model_len=8, has_whole_graphs=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "wanted"), [("keep", [("keep", True)]), ("abort", [("keep", False), ("give_outputs",), ("abort", True)])], ids=["", "abort"]
)
def test_replies_are_given_before_they_are_aborted(mode: str, wanted: list[Any]) -> None:
    """And nothing is made in between: the engine stands already."""
    calls: list[Any] = []
    asyncio.run(engine_with(calls, {}).pause(mode=mode, clear_cache=True))
    assert calls == wanted


def test_a_fault_in_vllm_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="give_outputs failed in vLLM: it broke"):
        asyncio.run(engine_with([], {"give_outputs": Exception("it broke")}).pause(mode="abort", clear_cache=True))


def test_the_worker_has_the_last_word_on_tokens_and_the_scheduler_knows_those_that_were_put_back() -> None:
    """The worker counts the step in flight; what was put back it does not know."""
    reports = [{"time": 0.0}]
    answers = {"swap_weights": (reports, {"put-back-0": 4, "running-1": 5}), "sync_counts": [{"running-1": 6, "new-2": 1}]}
    calls: list[Any] = []

    async def swap() -> None:
        async with engine_with(calls, answers).swapped(3) as (found, counts):
            assert found == reports
            assert counts == {"put-back": 4, "running": 6, "new": 1}

    asyncio.run(asyncio.wait_for(swap(), 20))
    assert calls == [("swap_weights", 3), ("sync_counts",)]
