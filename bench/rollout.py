"""Generation alone: env steps a second, requests a second against vLLM alone on the same prompts, where a rollout's time goes, and what
the prefix cache and its salt give.

What is limited here: vLLM, and the games' interpreter. Both limits are measured in the same run: vLLM alone is an AsyncLLM of this
process with the same settings and weights, which is given the prompts that the rollouts have sent (each episode's turns one after the
other, as many episodes at a time, replies of the same length, in the same kind of event loop); TextWorld alone is its own env without
ours around it.

Rollout, ingest and inference are the real processes, started without a trainer (bench/generation.py); what they make is read from the
ring and forgotten. The two sides alternate: rollouts are stopped while vLLM alone runs.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np

from accerl_mp.samples import RLSample
from bench.common import Result, alternate, make_parser, parse
from bench.models import model_folder

SALTS = {
    "one salt": lambda episode, number: "one",
    "a salt an episode": lambda episode, number: f"episode {episode}",
    "a salt a request (no reuse)": lambda episode, number: f"request {number}",
}
_run_number = itertools.count()
_GROUP = 8


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    num_reply: int


def turns_of(sample: RLSample) -> list[Turn]:
    """The requests that made this episode."""
    ids, turns = sample.input_ids.tolist(), []
    for number in range(int(sample.response_indices.max()) + 1):
        places = np.flatnonzero(sample.response_indices == number)
        if len(places):
            turns.append(Turn(ids[: places[0]], len(places)))
    return turns


class VllmAlone:
    """AsyncLLM with the checkpoint's own weights and the run's settings."""

    def __init__(self, config: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from accerl_mp.inference.engine import engine_arguments

        arguments = engine_arguments(config, 0) | {"load_format": "auto"}
        del arguments["worker_extension_cls"]
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._numbers = itertools.count()
        self.cpu_s_a_request: list[float] = []
        """Of this process, for each replay: vLLM's own front."""

    async def replay(self, episodes: list[list[Turn]], *, at_a_time: int, salt: str) -> float:
        """Requests a second."""
        slots, run = asyncio.Semaphore(at_a_time), next(_run_number)

        async def play(index: int, turns: list[Turn]) -> None:
            async with slots:
                for number, turn in enumerate(turns):
                    await self._ask(turn, f"{run} {SALTS[salt](index, (index, number))}")

        started, cpu, num_requests = time.monotonic(), time.process_time(), sum(map(len, episodes))
        await asyncio.gather(*(play(index, turns) for index, turns in enumerate(episodes)))
        self.cpu_s_a_request.append((time.process_time() - cpu) / num_requests)
        return num_requests / (time.monotonic() - started)

    async def _ask(self, turn: Turn, salt: str) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=turn.num_reply, min_tokens=turn.num_reply, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            skip_clone=True, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        collector = await self._llm.add_request(str(next(self._numbers)), tokens_input(turn.prompt, cache_salt=salt), params)
        await collector.get()

    def close(self) -> None:
        self._llm.shutdown(timeout=1.0)
        del self._llm  # now: at the interpreter's end its destructor finds nothing left to call


def env_steps_per_cpu_second(path: str, num_steps: int, *, wrapped: bool) -> float:
    """Random admissible commands, through our env or TextWorld's own."""
    import textworld

    from accerl_mp.rollout.env import TextWorldEnv

    rng, done, commands = random.Random(0), True, ()
    env = TextWorldEnv(path) if wrapped else textworld.start(path, textworld.EnvInfos(admissible_commands=True, won=True, lost=True))
    started = time.process_time()
    for seed in range(1, num_steps + 1):
        if done:
            seen = env.reset(seed) if wrapped else env.reset()
        else:
            seen = env.step(rng.choice(commands)) if wrapped else env.step(rng.choice(commands))[0]
        commands = seen.commands if wrapped else seen["admissible_commands"]
        done = not commands or bool(seen.won or seen.lost if wrapped else seen["won"] or seen["lost"])
    env.close()
    return num_steps / (time.process_time() - started)


def episode_cpu_ms(paths: list[str], num_episodes: int, *, pooled: bool) -> float:
    """Groups of eight episodes side by side, of one game after the other, each of up to three random admissible commands."""
    from accerl_mp.rollout import env as games_env

    def open_anew(path: str) -> games_env.TextWorldEnv:
        games_env._read_files.cache_clear()
        return games_env.TextWorldEnv(path)

    rng, games, pool = random.Random(0), itertools.cycle(paths), games_env.EnvPool(_GROUP)
    started, num_played = time.process_time(), 0
    while num_played < num_episodes:
        path = next(games)
        envs = [pool.acquire(path) if pooled else open_anew(path) for _ in range(_GROUP)]
        for env in envs:
            seen = env.reset(1)
            for _ in range(3):
                seen = seen if seen.done else env.step(rng.choice(seen.commands))
        for env in envs:
            if pooled:
                pool.release(env)
            else:
                env.close()
        num_played += _GROUP
    pool.close()
    return 1e3 * (time.process_time() - started) / num_played


def measure_env(result: Result, repeats: int, num_steps: int) -> None:
    from bench.generation import make_games

    path = str(sorted(make_games().glob("*.z8"))[0])
    sides = {"ours": True, "limit: TextWorld's own": False}
    steps = alternate(
        {name: lambda wrapped=wrapped: env_steps_per_cpu_second(path, num_steps, wrapped=wrapped) for name, wrapped in sides.items()},
        repeats=repeats,
    )
    for name, values in steps.items():
        result.add("env steps", values, "steps/s and core", "higher", side=name)
    result.ratio("env steps ours / TextWorld's own", *steps.values())
    sides = {"the pool's, which go on to the next game": True, "opened for each episode": False}
    games = [str(path) for path in sorted(make_games().glob("*.z8"))]
    costs = alternate(
        {name: lambda pooled=pooled: episode_cpu_ms(games, num_steps // 8, pooled=pooled) for name, pooled in sides.items()},
        repeats=repeats,
    )
    for name, values in costs.items():
        result.add("CPU of an episode's env, the game's start and three steps", values, "ms", "lower", side=name)
    result.ratio("CPU of an episode's env, pool / opened for each", *costs.values())


async def measure_requests(result: Result, run: Any, alone: VllmAlone, args: Any) -> None:
    """Alternating: the rollouts for `--seconds`, then vLLM alone on what they had asked by then."""
    at_a_time = run.config.run.num_rollout_workers * run.config.run.rollout_batch_size
    ours: list[dict[str, float]] = []
    rates: dict[str, list[float]] = {salt: [] for salt in SALTS}
    while len(run.samples) < args.episodes / 4:  # warm up, and the first prompts
        run.measure(args.seconds / 2)
    for index in range(args.repeats + 1):
        episodes = [turns_of(sample) for sample in run.samples[-args.episodes :]]
        for salt in list(SALTS) if index % 2 else reversed(list(SALTS)):
            rate = await alone.replay(episodes, at_a_time=at_a_time, salt=salt)
            if index:  # the first round warms up
                rates[salt].append(rate)
        if index:
            ours.append(await asyncio.to_thread(run.measure, args.seconds))
    report_requests(result, run, ours, rates)
    report_cpu(result, ours, alone)


def report_requests(result: Result, run: Any, ours: list[dict[str, float]], rates: dict[str, list[float]]) -> None:
    labels = {"workers": run.config.run.num_rollout_workers, "episodes_at_a_time": run.config.run.rollout_batch_size}
    requests = [_rate(one) for one in ours]
    result.add("requests, rollouts playing", requests, "requests/s", "higher", **labels)
    for salt, values in rates.items():
        result.add("limit: requests, vLLM alone", values, "requests/s", "higher", salt=salt, **labels)
    result.add("env steps, rollouts playing", [one["num_env_steps"] / one["seconds"] for one in ours], "steps/s", "higher", **labels)
    ratio = result.ratio("requests/s rollouts / vLLM alone, one salt", requests, rates["one salt"])
    result.target("requests/s against vLLM alone on the same prompts", ratio, at_least=0.85)
    others = list(SALTS)[1:]
    for salt in others:
        result.ratio(f"requests/s vLLM alone, one salt / {salt}", rates["one salt"], rates[salt])
    hits = [100 * one["Infer/PrefixCacheHitRate"] / one["Infer/PrefixCacheHitRate count"] for one in ours]
    result.add("prompt tokens found in the prefix cache", hits, "%", "higher", **labels)
    for tag in sorted(tag for tag in ours[0] if tag.startswith("Time/rollout/") and not tag.endswith(" count")):
        shares = [100 * one.get(tag, 0.0) / (one["seconds"] * labels["workers"]) for one in ours]
        result.add(f"share of a rollout's time: {tag.rpartition('/')[2]}", shares, "%", **labels)


def report_cpu(result: Result, ours: list[dict[str, float]], alone: VllmAlone) -> None:
    """What a request costs each process: a front, ours or vLLM's own, is one process and one thread."""
    for name in sorted(name for name in ours[0] if name.startswith("CPU ")):
        costs = [1e6 * one[name] / (one["seconds"] * _rate(one)) for one in ours]
        result.add(f"CPU time a request: {name.removeprefix('CPU ')}", costs, "us", "lower")
    result.add("limit: CPU time a request: front, vLLM alone", [1e6 * cost for cost in alone.cpu_s_a_request[len(SALTS) :]], "us", "lower")


def _rate(one: dict[str, float]) -> float:
    """Requests a second of one stretch."""
    return one["Infer/RequestsPerSec"] / one["Infer/RequestsPerSec count"]


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--model", default="demo", help="demo, 4m, 25m, 0.75b, or a model folder (default demo)")
    parser.add_argument("--workers", type=int, default=2, help="rollout processes")
    parser.add_argument("--batch-size", type=int, default=8, help="episodes that a process plays at a time")
    parser.add_argument("--step-tokens", type=int, default=2048, help="most tokens of one vLLM step, on both sides")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each stretch in which rollouts play")
    parser.add_argument("--env-steps", type=int, default=1500, help="of TextWorld alone, each repeat")
    parser.add_argument("--episodes", type=int, default=96, help="whose prompts vLLM alone is given, the latest")
    parser.add_argument("--only-games", action="store_true", help="no vLLM: what the games themselves cost")
    args = parse(parser)
    if args.quick:
        args.repeats, args.seconds, args.episodes, args.env_steps = 1, 4.0, 32, 300
    result = Result("rollout", args)
    measure_env(result, args.repeats, args.env_steps)
    if args.only_games:
        result.finish()
        return
    from tempfile import TemporaryDirectory

    from accerl_mp.launcher.environment import gpu_plan, role_environment
    from accerl_mp.transport.loop import run_loop
    from bench.generation import generation

    with TemporaryDirectory() as temporary:
        model = model_folder(args.model, Path(temporary))
        sizes = {"num_rollout_workers": args.workers, "rollout_batch_size": args.batch_size, "grpo_group_size": 8}
        sizes |= {"vllm_max_num_seqs": max(128, args.workers * args.batch_size), "vllm_max_num_batched_tokens": args.step_tokens}
        with generation(model, **sizes) as run:
            os.environ.update(role_environment("inference", 0, config=run.config, plan=gpu_plan(run.config), base={}))
            if cache := os.environ.get("VLLM_CACHE_ROOT"):
                os.environ["VLLM_CACHE_ROOT"] = f"{cache}-alone"  # both engines start, and perhaps compile, at the same time
            alone = VllmAlone(run.config)
            try:
                run.push()
                run_loop(measure_requests(result, run, alone, args))
            finally:
                alone.close()
    result.finish()


if __name__ == "__main__":
    main()
