"""Whole CUDA graphs: where an engine takes them, and that it leaves them if they compute something else."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fixture import InferenceRun, RequestClient, engine, logprobs_of, start_inference  # noqa: F401 (fixtures)

from accerl_mp.config import Config
from accerl_mp.inference.graphs import WHOLE, graph_arguments, leave_wrong_graphs
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
    """An engine whose logprobs are off by `wrong` nats in every `share`-th reply, in graphs alone."""

    max_model_len, vocab_size = 4096, 500

    def __init__(self, *, wrong: float, share: int) -> None:
        self.wrong, self.share = wrong, share
        self.is_on = True
        self.num_made = 0
        self.lengths: set[int] = set()

    async def generate(self, key: str, ids: list[int], *, max_tokens: int, **_: Any) -> Generation:
        self.num_made += 1
        self.lengths.add(len(ids))
        made, error = list(range(max_tokens)), self.wrong if self.is_on and self.num_made % self.share == 0 else 0.0
        await asyncio.sleep(0)
        seen = [-1.0 - index + error for index in range(max_tokens)]
        return Generation(ids=made, logprobs=seen, finish_reason="length", num_cached_tokens=0)

    async def forced_logprobs(self, key: str, ids: list[int]) -> list[float]:
        self.num_made += 1
        prompt = len(ids) - 6 if ids[-6:] == list(range(6)) else len(ids)
        return [0.0] * prompt + [-1.0 - index for index in range(len(ids) - prompt)]

    async def call_workers(self, method: str, is_on: bool) -> None:
        assert method == "graphs_on"
        self.is_on = is_on


@pytest.mark.parametrize(
    ("wrong", "share", "expected"), [(0.0, 1, True), (0.1, 1, True), (5.0, 1, False), (5.0, 12, False), (math.nan, 30, False)]
)
def test_graphs_stay_on_only_if_they_are_right(wrong: float, share: int, expected: bool) -> None:
    engine = Graphs(wrong=wrong, share=share)  # noqa: F811
    difference = asyncio.run(leave_wrong_graphs(engine))  # type: ignore[arg-type]
    assert engine.is_on is expected
    assert (difference < 0.15) is expected
    assert min(engine.lengths) < 10, "steps of a few tokens are another kind of graph"
    assert max(engine.lengths) > 1024


@pytest.mark.vllm
def test_an_engine_whose_graphs_are_wrong_goes_on_without(tmp_path: Path) -> None:
    with start_inference(tmp_path, program=Path(__file__).parent / "wrong_graphs_inference.py") as run:
        run.connect()
        run.push(0)
        assert "CUDA graphs give wrong logprobs here" in run.log
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
def test_right_ones_stay(engine: InferenceRun) -> None:  # noqa: F811
    """There are no graphs here, so steps with and without them are the same: the engine is not asked at all."""
    assert "CUDA graphs" not in engine.log
