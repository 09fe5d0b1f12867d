"""vLLM's real schedulers, synchronous and asynchronous, with outputs held: steps are scheduled by it, and made up here."""

import os
import random
from collections import defaultdict, deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from accerl_mp.inference.scheduler import HoldingAsyncScheduler, HoldingScheduler, make_scheduler

pytestmark = pytest.mark.timeout(120)
BLOCK, NUM_BLOCKS = 16, 24
"""Of KV: too few for all, so that requests are put back and begin again."""
STOP = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(path)
    return path


class Run:
    """A scheduler, its requests, and what has come out of it."""

    def __init__(self, folder: Path, seed: int, *, is_async: bool) -> None:
        self._random, self._is_async = random.Random(seed), is_async
        self.scheduler: Any = _scheduler(folder, is_async=is_async)
        init_none_hash(sha256)
        self.requests: dict[str, Request] = {}
        self.ids, self.logprobs = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        self.num_ends = defaultdict[str, int](int)
        self.aborted: set[str] = set()
        self.num_put_back = 0
        self._in_flight: deque[tuple[Any, list[int]]] = deque()
        self._last_id = 10

    def add(self) -> None:
        key = f"request-{len(self.requests)}"
        params = SamplingParams(max_tokens=self._random.choice([1, 5, 30, 150]), logprobs=0, stop_token_ids=[STOP])
        prompt = [self._random.randrange(10, 90) for _ in range(self._random.choice([3, 20, 100]))]
        self.requests[key] = Request(
            request_id=key,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(self.requests[key])

    def step(self) -> None:
        """Schedule, and take in the outputs of a step before (asynchronous) or of this one."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.num_put_back += len(getattr(scheduled, "preempted_req_ids", None) or ())
            self._in_flight.append((scheduled, [self._sample(key) for key in scheduled.num_scheduled_tokens]))
        if len(self._in_flight) > self._is_async or not self.scheduler.has_requests():
            self.take_in()

    def take_in(self) -> None:
        if not self._in_flight:
            return
        scheduled, sampled = self._in_flight.popleft()
        keys, ids = list(scheduled.num_scheduled_tokens), np.array(sampled, np.int32)
        made = ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: index for index, key in enumerate(keys)},
            sampled_token_ids=[[one] if one else [] for one in sampled],
            logprobs=LogprobsLists(ids[:, None], -ids[:, None].astype(np.float32), ids, None),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self._take(self.scheduler.update_from_output(scheduled, made))

    def abort(self, *, gives: bool) -> None:
        """Some of them; `gives`: all, as a drain does, which loses no token."""
        keys = list(self.scheduler.requests)
        if gives:
            while self._in_flight:
                self.take_in()
            self._take(self.scheduler.give())
            keys = list(self.scheduler.requests)
            assert {key: self.ids[key] for key in keys} == {key: list(self.requests[key].output_token_ids) for key in keys}
        else:
            keys = self._random.sample(keys, min(2, len(keys)))
        self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        self.aborted |= set(keys)

    def check_counts(self) -> None:
        """What has come out and what is held are together what `num_made` says."""
        held = {key: len(begun.ids) for key, begun in self.scheduler._begun.items()}
        assert held.keys() <= self.scheduler.requests.keys()
        assert self.scheduler.num_made() == {key: len(self.ids[key]) + held.get(key, 0) for key in self.scheduler.requests}

    def _sample(self, key: str) -> int:
        """An id of its own, seldom the one that ends a reply; 0: only a part of the prompt was read."""
        if self.requests[key].is_prefill_chunk:
            return 0
        self._last_id += 1
        return STOP if self._random.random() < 0.01 else self._last_id

    def _take(self, messages: dict[int, Any]) -> None:
        for output in (output for message in messages.values() for output in message.outputs):
            self.ids[output.request_id] += output.new_token_ids
            if output.new_logprobs is not None:
                self.logprobs[output.request_id] += (-output.new_logprobs.logprobs[:, 0]).astype(int).tolist()
            self.num_ends[output.request_id] += output.finish_reason is not None


def _scheduler(folder: Path, *, is_async: bool) -> Any:
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 26,
    )
    with mock.patch.dict(os.environ):  # vLLM sets variables for its processes
        config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # vLLM's CPU platform turns it off
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    options = {"block_size": BLOCK, "hash_block_size": BLOCK, "log_stats": False, "include_finished_set": False}
    return make_scheduler(vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config), **options)


@pytest.mark.parametrize("gives", [False, True], ids=["aborts", "drains"])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_leaves_once_in_order_however_it_is_scheduled(folder: Path, seed: int, is_async: bool, gives: bool) -> None:
    run, dice = Run(folder, seed, is_async=is_async), random.Random(seed)
    assert type(run.scheduler) is (HoldingAsyncScheduler if is_async else HoldingScheduler)
    for number in range(1500):
        if number < 800 and dice.random() < 0.3 and len(run.scheduler.requests) < 24:
            run.add()
        if dice.random() < 0.02 and run.scheduler.requests:
            run.abort(gives=gives and dice.random() < 0.5)
        run.check_counts()
        run.step()
    assert not run.scheduler.requests
    assert not run.scheduler._begun
    assert run.num_put_back > 5
    whole = run.requests.keys() - run.aborted
    assert len(whole) > 20
    for key in whole:
        assert run.ids[key] == list(run.requests[key].output_token_ids)
        assert run.logprobs[key] == run.ids[key]
        assert run.num_ends[key] == 1
    assert not any(run.num_ends[key] for key in run.aborted)
