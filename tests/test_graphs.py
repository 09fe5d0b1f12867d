"""Whole CUDA graphs: where an engine takes them, and that it leaves them if they compute something else."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fixture import InferenceRun, RequestClient, engine, logprobs_of, start_inference  # noqa: F401 (fixtures)

from accerl_mp.config import Config
from accerl_mp.inference.graphs import WHOLE, GraphGuard, graph_arguments
from accerl_mp.inference.replies import Generation

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("flags", "version", "expected"),
    [
        ({}, "0.24.0", True),
        ({}, "0.32.0", False),
        ({"infer_tp_size": 2}, "0.24.0", False),
        ({"enable_expert_parallel": True, "infer_tp_size": 1}, "0.24.0", False),
        ({"vllm_max_model_len": 32768}, "0.24.0", True),
        ({"vllm_max_model_len": 65536}, "0.24.0", False),
    ],
)
def test_whole_graphs_are_taken_where_they_were_compared(flags: dict[str, Any], version: str, expected: bool) -> None:
    inference = Config.from_flat({"vllm_max_model_len": 4096} | flags).inference
    arguments = graph_arguments(inference, version, 300)
    assert arguments.pop("cudagraph_capture_sizes") == [1, 2, 4, *range(8, 257, 8), 288]
    assert arguments == (WHOLE if expected else {})


class Graphs:
    """An engine whose logprobs are off by `wrong` nats in graphs, in every `share`-th reply or prompt of fewer than `below` tokens."""

    vocab_size, has_whole_graphs = 500, True

    def __init__(self, wrong: float = 0.0, *, share: int = 1, below: int = 9999, max_model_len: int = 4096, switches: bool = True) -> None:
        self.wrong, self.share, self.below, self.max_model_len, self.switches = wrong, share, below, max_model_len, switches
        self.is_on = True
        self.num_made = self.num_running = 0
        self.most_running = 0
        self.sent: list[int] = []
        self.delay_s = 0.0

    async def generate(self, key: str, ids: list[int], *, max_tokens: int, **_: Any) -> Generation:
        self.sent.append(len(ids))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _step in range(max_tokens):
            await asyncio.sleep(self.delay_s)
        self.num_running -= 1
        made = list(range(1, max_tokens + 1))
        logprobs = self._logprobs([*ids, *made], len(ids))[-max_tokens:]
        return Generation(ids=made, logprobs=logprobs, finish_reason="length", num_cached_tokens=0)

    async def forced_logprobs(self, key: str, ids: list[int]) -> list[float]:
        return self._logprobs(ids, len(ids))

    async def call_workers(self, method: str, is_on: bool) -> list[bool]:
        assert method == "graphs_on"
        if self.switches:
            self.is_on = is_on
        return [self.switches]

    def _logprobs(self, ids: list[int], prompt: int) -> list[float]:
        self.num_made += 1
        is_wrong = self.is_on and self.num_made % self.share == 0 and prompt < self.below
        return [-1.0 - token / 100 + (self.wrong if is_wrong else 0.0) for token in ids]


def ask(engine: Graphs, timeout_s: float = 20.0) -> GraphGuard:  # noqa: F811
    guard = GraphGuard(engine, timeout_s)  # type: ignore[arg-type]
    asyncio.run(guard.ask())
    return guard


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"wrong": 0.0}, True),
        ({"wrong": 0.1}, True),
        ({"wrong": 5.0}, False),
        ({"wrong": 5.0, "share": 12}, False),
        ({"wrong": 5.0, "below": 9}, False),
        ({"wrong": math.nan, "share": 30}, False),
        ({"wrong": 5.0, "max_model_len": 40}, False),
        ({"wrong": 5.0, "max_model_len": 8}, True),
    ],
)
def test_graphs_stay_on_only_if_they_are_right(fault: dict[str, Any], expected: bool) -> None:
    engine = Graphs(**fault)  # noqa: F811
    guard = ask(engine)
    assert engine.is_on is expected
    assert (guard.difference <= 0.15) is expected


def test_the_load_has_steps_of_every_kind() -> None:
    engine = Graphs()  # noqa: F811
    ask(engine)
    assert min(engine.sent) < 10, "steps of a few tokens are another kind of graph"
    assert max(engine.sent) >= 1000
    assert engine.most_running > 8, "prompts come in while others decode"


def test_an_engine_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its group is formed anew, and requests are opened anew, whenever a rank is started again."""
    engine = Graphs(wrong=5.0)  # noqa: F811
    guard = ask(engine)
    num_sent = len(engine.sent)
    asyncio.run(guard.ask())
    assert engine.is_on is False
    assert len(engine.sent) == num_sent


def test_an_engine_that_cannot_be_asked_in_time_goes_on_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    engine = Graphs()  # noqa: F811
    engine.delay_s = 30.0
    guard = ask(engine, timeout_s=0.1)
    assert engine.is_on is False
    assert math.isinf(guard.difference)
    assert "could not be compared" in caplog.text


def test_graphs_that_cannot_be_turned_off_are_not_said_to_agree(caplog: pytest.LogCaptureFixture) -> None:
    guard = ask(Graphs(switches=False))
    assert math.isinf(guard.difference)
    assert "is not known" in caplog.text


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_whose_graphs_are_wrong_goes_on_without_and_its_pushes_are_verified(tmp_path: Path) -> None:
    with start_inference(tmp_path, program=Path(__file__).parent / "wrong_graphs_inference.py") as run:
        run.connect()
        run.push(0)
        run.push(1)
        assert len({line for line in run.log.splitlines() if "vLLM goes on without them" in line}) == 1, "asked once"
        client = RequestClient(run)
        prompts = {client.send(prompt := list(range(10, 20 + index)), max_tokens=6): prompt for index in range(12)}
        try:
            for _ in range(len(prompts)):
                reply = client.receive()
                assert reply is not None
                assert reply["error"] is None
                wanted = logprobs_of(run.model, [*prompts[reply["id"]], *reply["ids"].tolist()])[-len(reply["ids"]) :]
                np.testing.assert_allclose(reply["logprobs"], wanted, atol=1e-4)
        finally:
            client.close()


@pytest.mark.vllm
def test_an_engine_without_graphs_is_not_asked(engine: InferenceRun) -> None:  # noqa: F811
    assert "CUDA graphs" not in engine.log
