"""The inference process: token ids in and out, stop tokens, logprobs, salts, errors."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import torch
from engine_fixture import (  # noqa: F401 (fixtures)
    ENDS_WITH_NEWLINE,
    EOS,
    NEWLINE,
    InferenceRun,
    RequestClient,
    _write_tokenizer,
    client,
    engine,
    greedy_of,
)

from accerl_mp.config import Config
from accerl_mp.inference.engine import Engine
from accerl_mp.inference.stops import find_stop_ids
from accerl_mp.inference.versions import VersionLedger
from accerl_mp.models.build import compute_dtype
from accerl_mp.transport.channels import MetricsReceiver

pytestmark = pytest.mark.timeout(180)


def _prompt(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(10, 500, length).tolist()


def test_ledger_cuts_where_the_worker_says() -> None:
    ledger = VersionLedger()
    ledger.version = 4
    for key in ("early", "late", "ended"):
        ledger.start(key)
    ledger.cut({"early": 3, "ended": 9}, 5)
    ledger.cut({"early": 3, "late": 2, "ended": 9}, 6)
    assert ledger.finish("early", 5) == [4, 4, 4, 6, 6]
    assert ledger.finish("late", 4) == [5, 5, 6, 6]
    assert ledger.finish("ended", 4) == [4] * 4, "a worker may have sampled past the end"
    assert len(ledger) == 0


@pytest.mark.parametrize(("text", "expected"), [("\\n", [EOS, NEWLINE, ENDS_WITH_NEWLINE]), ("", [EOS]), ("end", [EOS, ENDS_WITH_NEWLINE])])
def test_stop_text_is_found_in_every_token_that_holds_it(tmp_path: Path, text: str, expected: list[int]) -> None:
    _write_tokenizer(tmp_path / "tokenizer")
    assert find_stop_ids(tmp_path / "tokenizer", text) == expected


ENGINE_FLAGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"dtype": "float32", "seed": 8, "logprobs_mode": "processed_logprobs", "enforce_eager": True}),
    ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ({"dtype": "float32", "placement": "colocated"}, {"dtype": "float32", "enforce_eager": False, "gpu_memory_utilization": 0.5}),
    ({"placement": "colocated"}, {"dtype": "bfloat16"}),
    ({"seed": 40}, {"seed": 41}),
    ({"vllm_max_num_seqs": 5, "vllm_max_num_batched_tokens": 77}, {"max_num_seqs": 5, "max_num_batched_tokens": 77}),
    ({"vllm_max_model_len": 99}, {"max_model_len": 99}),
    ({"disable_vllm_prefix_caching": True}, {"enable_prefix_caching": False}),
    # Every step that --vllm-max-num-batched-tokens allows has a CUDA graph, one with new prompts in it too.
    (
        {"placement": "colocated", "vllm_max_num_batched_tokens": 300},
        {"cudagraph_capture_sizes": [1, 2, 4, *range(8, 257, 8), 288], "block_size": 64},
    ),
    ({"infer_tp_size": 2, "enable_expert_parallel": True}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
]
"""(flags, what vLLM is started with) of the second inference process."""


@pytest.mark.vllm
def test_vllm_is_started_with_what_the_flags_say(tmp_path: Path) -> None:
    """In a process of its own: importing vLLM changes the one it is in. The dtype is the trainer's."""
    base = {"placement": "cpu", "dtype": "auto", "seed": 7, "gpu_memory_utilization": 0.5, "model_path": str(tmp_path)}
    configs = [base | flags for flags, _ in ENGINE_FLAGS]
    program = (
        "import json, sys; from accerl_mp.config import Config; from accerl_mp.inference.engine import engine_arguments;"
        "print(json.dumps([engine_arguments(Config.from_flat(flags), 1) for flags in json.loads(sys.argv[1])]))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-c", program, json.dumps(configs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    started = json.loads(done.stdout.splitlines()[-1])
    for flags, (_, expected), got in zip(configs, ENGINE_FLAGS, started, strict=True):
        assert {name: got[name] for name in expected} == expected
        device = torch.device("cpu" if flags["placement"] == "cpu" else "cuda")
        assert getattr(torch, got["dtype"]) == compute_dtype(Config.from_flat(flags), device)


@pytest.mark.vllm
def test_greedy_replies_equal_transformers(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    for seed in range(6):
        reply = client.ask(_prompt(seed), max_tokens=16, temperature=0.0)
        assert reply["ids"].tolist() == greedy_of(engine.model, _prompt(seed), 16)


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_old_logprobs_are_the_models_at_that_temperature(engine: InferenceRun, client: RequestClient, temperature: float) -> None:  # noqa: F811
    prompts = {
        client.send(_prompt(seed, 20 + seed), max_tokens=12, temperature=temperature): _prompt(seed, 20 + seed) for seed in range(12)
    }
    for _ in range(12):
        reply = client.receive()
        ids = torch.tensor([prompts.pop(reply["id"]) + reply["ids"].tolist()])
        with torch.no_grad():
            expected = (engine.model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(reply["logprobs"], expected[-len(reply["ids"]) :], atol=1e-4)
        assert reply["versions"].tolist() == [engine.sync._version] * len(reply["ids"])


@pytest.mark.vllm
def test_a_reply_with_a_seed_is_the_same_again_whatever_else_is_sampled(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """What an evaluation rests on: two runs with one seed and the same weights play the same episodes."""

    def replies(num_others: int, seeds: list[int | None]) -> list[list[int]]:
        others = [client.send(_prompt(100 + number), max_tokens=12) for number in range(num_others)]
        numbers = [client.send(_prompt(seed_of), max_tokens=12, seed=seed) for seed_of, seed in enumerate(seeds)]
        found = {reply["id"]: reply["ids"].tolist() for reply in (client.receive() for _ in others + numbers)}
        return [found[number] for number in numbers]

    seeded = [7 * number for number in range(8)]
    first = replies(0, seeded)
    assert replies(12, seeded) == first
    assert replies(0, [seed + 1 for seed in seeded]) != first, "another seed draws anew"
    assert replies(0, [None] * 8) != replies(0, [None] * 8), "and so does the engine's own generator"


@pytest.mark.vllm
def test_a_reply_with_a_seed_is_the_same_where_its_prompt_is_read_in_parts(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """14 prompts of 240 tokens where a step takes 1,024: the engine died of the first that was cut."""
    prompts = [_prompt(300 + number, 240) for number in range(14)]
    alone = [client.ask(prompt, max_tokens=12, seed=number)["ids"].tolist() for number, prompt in enumerate(prompts)]
    for salt in (1000, 1001):  # a cache of its own: the prompts are read again
        salted = [client.send(prompt, max_tokens=12, seed=number, salt_version=salt) for number, prompt in enumerate(prompts)]
        found = {reply["id"]: reply["ids"].tolist() for reply in (client.receive() for _ in salted)}
        assert [found[number] for number in salted] == alone


@pytest.mark.vllm
def test_replies_end_with_the_stop_token_or_at_the_length(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    stops, num_stopped = {EOS, NEWLINE, ENDS_WITH_NEWLINE}, 0
    for seed in range(40):
        client.send(_prompt(seed), max_tokens=100, temperature=2.0)
    for _ in range(40):
        reply = client.receive()
        ids = reply["ids"].tolist()
        assert len(ids) == len(reply["logprobs"]) == len(reply["versions"])
        assert not stops & set(ids[:-1])
        assert (reply["finish_reason"] == "stop") == (ids[-1] in stops)
        assert reply["finish_reason"] == "stop" or len(ids) == 100
        num_stopped += reply["finish_reason"] == "stop"
    assert num_stopped > 5


@pytest.mark.vllm
def test_what_vllm_refuses_is_answered(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    for prompt, options in [
        (_prompt(0, 300), {}),
        ([], {}),
        ([600], {}),
        ([-1], {}),
        (_prompt(0), {"max_tokens": 0}),
        (_prompt(0), {"temperature": -1.0}),
    ]:
        reply = client.ask(prompt, **options)
        assert reply["error"], (len(prompt), options)
        assert len(reply["ids"]) == 0
    client._socket.send(msgpack.packb({"id": 77, "prompt": "text"}))
    assert "MessageError: request.episode_id" in client.receive()["error"]
    client._socket.send(b"no msgpack at all")
    assert client.receive()["id"] == -1
    assert client.ask(_prompt(1))["error"] is None


@pytest.mark.vllm
def test_an_episode_keeps_its_prefix_through_a_push_and_tags_arrive(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """--prefix-cache-scope episode: the salt is the version that the episode began with."""
    receiver = MetricsReceiver(engine.paths)
    try:
        _collect_tags(receiver)  # of the tests before
        start = engine.sync._version
        ids, salt_version = _prompt(99, 120), -1
        for turn in range(5):
            reply = client.ask(ids, max_tokens=4, salt_version=salt_version)
            salt_version = reply["salt_version"]
            assert salt_version == start
            ids += reply["ids"].tolist()
            if turn == 2:
                engine.push(start + 1, trainable_only=True)
        assert set(reply["versions"].tolist()) == {start + 1}
        assert client.ask(ids, salt_version=-1)["salt_version"] == start + 1
        tags = _collect_tags(receiver)
    finally:
        receiver.close()
    assert tags["Infer/PrefixCacheHitRate"][0] >= 4 * 96, "in every turn but the first, 3 blocks of 32 tokens are found"
    assert tags["Infer/TokensPerSec"][0] >= 5


def _collect_tags(receiver: MetricsReceiver) -> dict[str, list[float]]:
    """Sums over some seconds, since the first records may have been sent before anybody listened."""
    tags: dict[str, list[float]] = {}
    for _ in range(4):
        for record in receiver.receive(timeout_s=0.5):
            for tag, triple in record["values"].items():
                tags[tag] = [old + new for old, new in zip(tags.get(tag, [0, 0, 0]), triple, strict=True)]
    return tags


@pytest.mark.vllm
def test_vllm_does_not_warn_of_the_scheduler_that_it_was_given(engine: InferenceRun) -> None:  # noqa: F811
    assert "make_scheduler" not in engine.log


@pytest.mark.vllm
def test_the_engine_leaves_its_core_to_others_while_it_waits(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    """Spinning, it would take all that it can get of a core; a third is far from both."""
    children = {" ".join(child.cmdline()): child for child in psutil.Process(engine.popen.pid).children(recursive=True)}
    core, worker = (next(child for name, child in children.items() if part in name) for part in ("EngineCore", "Worker"))
    shares = []
    for seed in range(3):
        number = client.send(_prompt(seed), max_tokens=200)
        time.sleep(0.05)
        worker.suspend()
        try:
            start, before = time.monotonic(), sum(core.cpu_times()[:2])
            time.sleep(0.5)  # after a second without an answer it would sleep anyway
            shares.append((sum(core.cpu_times()[:2]) - before) / (time.monotonic() - start))
        finally:
            worker.resume()
        assert client.receive()["id"] == number
    assert max(shares) < 1 / 3, shares


def test_an_engine_that_ends_leaves_the_shared_memory_of_another_in_the_same_process() -> None:
    """A tool and its tests may have two; both have their processes below the same one."""
    code = (
        "from multiprocessing.shared_memory import SharedMemory; m = SharedMemory(create=True, size=64); print(m.name, flush=True); input()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    files = [Path("/dev/shm") / process.stdout.readline().strip() for process in processes]
    first = Engine.__new__(Engine)
    first._processes, first._llm = {processes[0].pid}, SimpleNamespace(shutdown=lambda timeout: None)
    first.close()
    assert [file.exists() for file in files] == [False, True]
    for process in processes:
        process.communicate("\n", timeout=30)
