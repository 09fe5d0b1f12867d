"""What a step of vLLM's engine loop costs with short replies, vLLM alone: requests and tokens a second, steps, CPU by thread, kernels.

What is limited here: one process of vLLM, whose loop gives each step to the GPU. No game, no rollout: episodes of random tokens grow
turn by turn like those of the games (the first prompt of a group's episodes is the same, each turn's prompt is the one before, its reply
and a message), and each asks for the next reply when it has had the last, `--think-ms` later. The engine is the product's, with a run's
settings; `--set NAME=VALUE` changes one of vLLM's own arguments.

    python bench/engine_loop.py --model MODEL --cases trained:128 stock:128 trained:256 --trace
    python bench/engine_loop.py --model MODEL --cases long:64 --set scheduler_cls=null        # vLLM's own scheduler: a message a step
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np
import psutil

from bench.common import Result, make_parser, parse
from bench.models import model_folder

_TRACE_S = 1.0
_CHECKED = 48
_CHECKED_AGAIN = 12
"""By transformers."""
Made = tuple[dict[str, Any], list[tuple[list[int], list[float]]]]
"""Labels; (prompt and reply, the reply's logprobs)."""
_LENGTHS = (3, 20, 70, 150, 400, 1000, 1500)
"""Of prompts, in tokens: with those of the episodes one of every kind of CUDA graph."""
_NO_NUMBER = 1e9
"""Stands for NaN."""
_MOST_NATS = 0.15
"""bfloat16 in another batch: 0.10 to 0.14 were seen; graphs that read the wrong keys gave 13 and more."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of episodes: tokens of the first message, of each other one and of a reply (the latter exactly), turns, ms between two turns."""

    first: int = 250
    message: int
    reply: int
    turns: int
    think_ms: float


SHAPES = {
    "trained": Shape(message=110, reply=5, turns=4, think_ms=15.0),
    "stock": Shape(message=200, reply=12, turns=17, think_ms=3.0),
    "short": Shape(first=20, message=30, reply=8, turns=6, think_ms=3.0),
    "long": Shape(first=20, message=10, reply=400, turns=1, think_ms=0.0),
}
"""SmolLM2-135M in easy TextWorld games: after some steps of sft, and as it is (its replies name no command, so no game goes on);
prompts of a few dozen tokens, whose steps are small; long replies, whose steps are decoding alone."""
_SYSTEM_TOKENS, _GROUP = 100, 8
"""What every prompt begins with; episodes with the same first prompt."""


class Episodes:
    """Prompts; after so many episodes another game begins."""

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        self._shape, self._rng, self._high = shape, random.Random(0), vocab_size - 1
        self._system = self._tokens(_SYSTEM_TOKENS)
        self._first: list[int] = []
        self._num_begun = 0

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(10, self._high) for _ in range(number)]

    def begin(self) -> list[int]:
        """The first prompt of the next episode."""
        if self._num_begun % _GROUP == 0:
            self._first = self._system + self._tokens(self._shape.first)
        self._num_begun += 1
        return list(self._first)

    def message(self) -> list[int]:
        return self._tokens(self._rng.randint(self._shape.message // 2, 3 * self._shape.message // 2))

    def num_turns(self) -> int:
        return self._rng.randint(max(1, self._shape.turns // 2), max(1, 3 * self._shape.turns // 2))


class Load:
    """Keeps episodes going and counts."""

    def __init__(self, engine: Any, shape: Shape) -> None:
        self._engine, self._shape, self._episodes = engine, shape, Episodes(shape, engine.vocab_size)
        self.num_requests = self.num_tokens = self.num_cached = self.num_prompt = 0
        self.latencies: list[float] = []
        self.made: deque[tuple[list[int], list[float]]] = deque(maxlen=_CHECKED)
        """(prompt and reply, the reply's logprobs), the latest."""

    async def play_for_ever(self) -> None:
        """One place of the batch."""
        await asyncio.sleep(random.random() * 0.2)
        while True:
            prompt = self._episodes.begin()
            for _ in range(self._episodes.num_turns()):
                if len(prompt) + self._shape.reply >= self._engine.max_model_len:
                    break
                prompt += await self._reply(prompt) + self._episodes.message()
                await asyncio.sleep(self._shape.think_ms / 1000)

    async def _reply(self, prompt: list[int]) -> list[int]:
        started = time.monotonic()
        made = await self._engine.generate("r", prompt, max_tokens=self._shape.reply, temperature=1.0, salt="s")
        self.latencies.append(time.monotonic() - started)
        self.num_requests += 1
        self.num_tokens += len(made.ids)
        self.num_prompt += len(prompt)
        self.num_cached += made.num_cached_tokens
        self.made.append(([*prompt, *made.ids], made.logprobs))
        return made.ids


async def measure(result: Result, engine: Any, args: argparse.Namespace, case: str, when: str) -> Made:
    """What stretches of `--seconds` show. Some of what was generated."""
    shape, _, number = case.partition(":")
    load = Load(engine, SHAPES[shape])
    labels = {"episodes": shape, "at_a_time": int(number)} | ({"when": when} if when else {})
    tasks = [asyncio.ensure_future(load.play_for_ever()) for _ in range(int(number))]
    try:
        await asyncio.sleep(args.warm_s)
        for _ in range(args.repeats):
            await _stretch(result, engine, load, args, labels)
        if args.profiler and case in args.watched:
            await _watch(args, case)
        if args.trace and case in args.watched:
            await _trace(result, engine, labels)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await _check(result, engine, load, labels)
    return labels, list(load.made)[:_CHECKED_AGAIN]


async def _check(result: Result, engine: Any, load: Load, labels: dict[str, Any]) -> None:
    """Is what comes out under load, and of prompts of many lengths one by one, what each request gets alone without CUDA graphs?"""
    longest = max((ids for ids, _ in load.made), key=len)
    prompts = [longest[:length] for length in _LENGTHS if length < len(longest)] + [longest]
    in_graphs = [await engine.forced_logprobs("check", ids) for ids in prompts]
    under_load: list[float] = []
    await engine.call_workers("graphs_on", False)
    try:
        for ids, logprobs in load.made:
            under_load += _differences(logprobs, await engine.forced_logprobs("check", ids))
        prompted = [_differences(seen, await engine.forced_logprobs("check", ids)) for ids, seen in zip(prompts, in_graphs, strict=True)]
    finally:
        await engine.call_workers("graphs_on", True)
    result.add("|logprob under load - alone|", under_load, "nats", "lower", **labels)
    result.add("|logprob in graphs - without|, most of a prompt", [max(values) for values in prompted], "nats", "lower", **labels)
    everywhere = list(itertools.chain(*prompted))
    for name, found in (("|logprob under load - alone|", under_load), ("|logprob of a prompt in graphs - without|", everywhere)):
        result.target(f"{labels}: p95 of {name}", float(np.percentile(found, 95)), at_most=_MOST_NATS)
    seen = [f"{np.percentile(found, 95):.3g} {max(found):.3g}" for found in (under_load, everywhere)]
    print(f"off by (p95, most): under load {seen[0]}, prompts {seen[1]}", file=sys.stderr, flush=True)


def _differences(logprobs: list[float], alone: list[float]) -> list[float]:
    """Of the last ones, in nats."""
    found = [abs(one - other) for one, other in zip(logprobs, alone[-len(logprobs) :], strict=True)]
    return [difference if math.isfinite(difference) else _NO_NUMBER for difference in found]


async def _stretch(result: Result, engine: Any, load: Load, args: argparse.Namespace, labels: dict[str, Any]) -> None:
    core = _core()
    load.latencies.clear()
    await engine.call_workers("loop_start")
    before, threads, own, started = dict(vars(load)), _threads(core), time.process_time(), time.monotonic()
    await asyncio.sleep(args.seconds)
    seconds = time.monotonic() - started
    (seen, *_) = await engine.call_workers("loop_stop")
    made = {name: value - before[name] for name, value in vars(load).items() if name.startswith("num_")}
    requests = made["num_requests"]
    result.add("requests", requests / seconds, "requests/s", "higher", **labels)
    result.add("generated tokens", made["num_tokens"] / seconds, "tokens/s", "higher", **labels)
    result.add("a reply", [1e3 * one for one in load.latencies], "ms", "lower", **labels)
    result.add("of the prompts in the prefix cache", 100 * made["num_cached"] / made["num_prompt"], "%", **labels)
    result.add("prompt", made["num_prompt"] / requests, "tokens", **labels)
    _add_steps(result, seen["steps"], labels)
    result.note(f"{labels}: CUDA graphs of the steps: {seen['modes']}")
    result.add("CPU time a request: front, this process", 1e6 * (time.process_time() - own) / requests, "us", "lower", **labels)
    for name, cpu in sorted(_threads(core).items(), key=lambda item: -item[1]):
        if (used := cpu - threads.get(name, 0.0)) > 0.01 * seconds:
            result.add("CPU time a request: EngineCore", 1e6 * used / requests, "us", "lower", thread=name, **labels)
            result.add("CPU", 100 * used / seconds, "% of a core", thread=name, **labels)
    print(f"at {labels}: {requests / seconds:,.0f} requests/s, {made['num_tokens'] / seconds:,.0f} tokens/s", file=sys.stderr, flush=True)


async def _watch(args: argparse.Namespace, case: str) -> None:
    """`--profiler`, a command that watches a process, beside the load."""
    words = args.profiler.format(pid=_core().pid, seconds=max(1, int(args.seconds) - 1), case=case.replace(":", "-")).split()
    process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.DEVNULL)
    await asyncio.wait_for(process.wait(), args.seconds + 30)


def _add_steps(result: Result, steps: list[tuple[float, int, int, int]], labels: dict[str, Any]) -> None:
    gaps = [(1e3 * (after[0] - before[0]), before[3]) for before, after in itertools.pairwise(steps)]
    fresh, others = [gap for gap in gaps if gap[1]], [gap for gap in gaps if not gap[1]]
    for name, chosen in (("all", gaps), ("with new requests", fresh), ("without", others)):
        if chosen:
            result.add("a step", [milliseconds for milliseconds, _ in chosen], "ms", "lower", which=name, **labels)
    for index, name in ((1, "tokens"), (2, "requests"), (3, "new requests")):
        result.add(f"{name} of a step", statistics.fmean(step[index] for step in steps), name, **labels)


async def _trace(result: Result, engine: Any, labels: dict[str, Any]) -> None:
    """Slower than without: shares count, not seconds."""
    await engine.call_workers("trace_start")
    await asyncio.sleep(_TRACE_S)
    (seen, *_) = await engine.call_workers("trace_stop")
    result.add("GPU busy, traced", 100 * seen["busy_s"] / seen["seconds"], "%", **labels)
    for what in ("kernels", "calls"):
        for name, (seconds, number) in seen[what].items():
            result.note(f"{labels}: traced {what}: {1e3 * seconds:9.2f} ms in {number:6d}: {name}")


def _core() -> psutil.Process:
    """EngineCore; its threads are vLLM's."""
    children = psutil.Process().children(recursive=True)
    return max(children, key=lambda child: sum(child.cpu_times()[:2]))


def _threads(core: psutil.Process) -> dict[str, float]:
    """CPU seconds by thread: its name in the kernel and its number."""
    names = {}
    for thread in core.threads():
        try:
            name = Path(f"/proc/{core.pid}/task/{thread.id}/comm").read_text().strip()
        except FileNotFoundError:
            continue
        names["loop" if thread.id == core.pid else f"{name} {thread.id - core.pid}"] = thread.user_time + thread.system_time
    return names


async def measure_all(result: Result, engine: Any, args: argparse.Namespace, made: list[Made]) -> None:
    for gate in [Path(file) for file in args.when] or [None]:
        print(f"waits for {gate}" if gate else "begins", file=sys.stderr, flush=True)
        while gate is not None and not gate.exists():
            await asyncio.sleep(0.02)
        if gate is not None and gate.stat().st_size:
            break
        made += [await measure(result, engine, args, case, gate.name if gate else "") for case in args.cases]
        if gate is not None:
            gate.with_name(f"{gate.name}-{os.getpid()}-done").touch()


def compare_with_transformers(result: Result, model: Path, made: list[Made]) -> None:
    """Logprobs under load against those of the same tokens by transformers in float32: the rounding of vLLM's dtype, and no more."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    for labels, sequences in made:
        differences: list[float] = []
        for ids, logprobs in sequences:
            tokens = torch.tensor([ids], device=device)
            with torch.no_grad():
                rows = reference(tokens).logits[0, -len(logprobs) - 1 : -1].float().log_softmax(-1)
            wanted = rows.gather(1, tokens[0, -len(logprobs) :, None])[:, 0]
            differences += _differences(logprobs, wanted.tolist())
        result.add("|logprob under load - transformers, float32|", differences, "nats", "lower", **labels)
        seen = f"median {statistics.median(differences):.3g}, p95 {np.percentile(differences, 95):.3g}, most {max(differences):.3g}"
        print(f"off from transformers {labels}: {seen}", file=sys.stderr, flush=True)


def settings(args: argparse.Namespace, model: Path, folder: str) -> Any:
    """A run's Config, on this machine."""
    import torch

    from accerl_mp.config import Config, resolve

    num_gpus = torch.cuda.device_count()
    values = {
        "model_path": str(model), "tw_game_dir": folder, "tw_history_token_window": args.window, "max_length": args.window,
        "fsdp_world_size": 1, "vllm_max_num_seqs": max(int(case.partition(":")[2]) for case in args.cases),
        "vllm_max_num_batched_tokens": args.step_tokens, "kv_cache_gib": args.kv_cache_gib if num_gpus else None,
        "placement": "colocated" if num_gpus else "cpu",
    }  # fmt: skip
    return resolve(Config.from_flat(values), num_gpus=num_gpus, log_dir=folder)


def start(args: argparse.Namespace, model: Path, folder: str) -> Any:
    from accerl_mp.inference import engine
    from accerl_mp.launcher.environment import gpu_plan, role_environment

    config = settings(args, model, folder)
    given = {name: os.environ[name] for name in args.keep_env if name in os.environ}
    os.environ.update(role_environment("inference", 0, config=config, plan=gpu_plan(config), base={}) | given)
    arguments = engine.engine_arguments
    changed = {name: json.loads(value) for name, _, value in (word.partition("=") for word in args.set)}
    changed["worker_extension_cls"] = "bench.loop_worker.LoopWatcher"
    engine.engine_arguments = lambda config, replica: arguments(config, replica) | changed
    return engine.Engine.start(config, [], load_format="auto")


def main() -> None:
    parser = make_parser(__doc__, repeats=2)
    parser.add_argument("--model", default="demo", help="demo, 4m, 25m, 0.75b, or a model folder (default demo)")
    shapes = ", ".join(SHAPES)
    parser.add_argument("--cases", nargs="+", default=["trained:128"], metavar="EPISODES:N", help=f"one after the other: {shapes}")
    parser.add_argument("--watched", nargs="*", metavar="EPISODES:N", help="cases for --trace and --profiler (default: the first)")
    parser.add_argument("--window", type=int, default=4096, help="longest prompt and reply")
    parser.add_argument("--step-tokens", type=int, default=8192, help="most tokens of one vLLM step")
    parser.add_argument("--kv-cache-gib", type=float, default=12.0, help="on a GPU")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each stretch")
    parser.add_argument("--warm-s", type=float, default=4.0, help="before the first")
    parser.add_argument("--trace", action="store_true", help="after the stretches: kernels of a second, by torch's profiler")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="arguments of vLLM")
    parser.add_argument("--keep-env", nargs="*", default=[], metavar="NAME", help="variables that the run's own table must not set")
    parser.add_argument("--profiler", default="", help="a command run beside each stretch; {pid}, {seconds} and {case} in it")
    parser.add_argument("--when", nargs="+", default=[], help="start the engine at once, and measure when each of these files is there")
    args = parse(parser)
    if args.quick:
        args.repeats, args.seconds, args.warm_s, args.window, args.cases = 1, 3.0, 2.0, 2048, ["trained:16"]
    args.watched = args.watched or args.cases[:1]
    result = Result("engine_loop", args)
    from accerl_mp.transport.loop import run_loop

    with TemporaryDirectory() as temporary:
        Path(temporary, "none.z8").touch()
        started, model = time.monotonic(), model_folder(args.model, Path(temporary))
        engine = start(args, model, temporary)
        made: list[Made] = []
        result.add("engine's start", time.monotonic() - started, "s", "lower")
        try:
            run_loop(measure_all(result, engine, args, made))
        finally:
            engine.close()
        compare_with_transformers(result, model, made)
    result.finish()


if __name__ == "__main__":
    main()
