"""Generated tokens a second of one inference engine and of two, each engine with the same number of episodes.

What is limited here: the engines. Rollout, ingest and inference are the real processes, started without a trainer (bench/generation.py)
and pushed to once. Two groups of them stand side by side, one with one engine, one with two and twice the rollouts; they alternate, and
the rollouts of the one that is not measured are stopped. On GPUs: the first one pushes, the last two hold the engines.

    python bench/engines.py --model 0.75b --workers 16        three GPUs or more
    python bench/engines.py --quick                           this machine, the demo's model on the CPU
"""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.launcher.environment import rank_environment
from accerl_mp.topology import GpuPlan, visible_gpus
from bench.common import Result, alternate, make_parser, parse
from bench.models import model_folder

NUM_ENGINES = (1, 2)


def plans(gpus: list[str]) -> list[GpuPlan | None]:
    """For one engine and for two. The one that is alone shares its GPU with one of the two, which has nothing to do then."""
    if not gpus:
        return [None, None]
    return [GpuPlan(gpus[:1], [gpus[-1:]]), GpuPlan(gpus[:1], [gpus[-2:-1], gpus[-1:]])]


def settings(num_engines: int, args: Any, *, on_gpu: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "infer_size": num_engines,
        "num_rollout_workers": num_engines * args.workers,
        "rollout_batch_size": args.batch_size,
        "vllm_max_num_seqs": max(64, args.workers * args.batch_size),
        "placement": "dedicated" if on_gpu else "cpu",
    }
    if on_gpu:
        values |= {"kv_cache_gib": args.kv_cache_gib, "gpu_memory_utilization": 0.2, "enforce_eager": args.eager}
    if args.games:
        values["tw_game_dir"] = str(args.games.resolve())
    return values


def report(result: Result, measured: dict[int, list[dict[str, float]]], args: Any) -> None:
    tokens = {}
    for number, stretches in measured.items():
        labels = {"engines": number, "episodes_an_engine": args.workers * args.batch_size}
        # Each engine reports what it made in the last second: tokens over seconds is the mean of an engine.
        tokens[number] = [number * one["Infer/TokensPerSec"] / one["Infer/TokensPerSec count"] for one in stretches]
        result.add("generated", tokens[number], "tokens/s", "higher", **labels)
        result.add("env steps", [one["num_env_steps"] / one["seconds"] for one in stretches], "steps/s", "higher", **labels)
        for tag in ("Time/rollout/reply", "Time/rollout/work"):
            shares = [100 * one.get(tag, 0.0) / (one["seconds"] * number * args.workers) for one in stretches]
            result.add(f"share of a rollout's time: {tag.rpartition('/')[2]}", shares, "%", **labels)
    ratio = result.ratio("generated tokens/s, two engines / one", tokens[2], tokens[1])
    result.target("generated tokens/s, two engines / one", ratio, at_least=1.9)


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--model", default="demo", help="demo, 4m, 25m, 0.75b, or a model folder (default demo)")
    parser.add_argument("--workers", type=int, default=2, help="rollout processes an engine")
    parser.add_argument("--batch-size", type=int, default=8, help="episodes that a rollout process plays at a time")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each stretch in which rollouts play")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in vLLM")
    parser.add_argument("--kv-cache-gib", type=float, default=8.0, help="of each engine, on a GPU")
    parser.add_argument("--games", type=Path, help="folder of games (default: the demo's)")
    parser.add_argument("--start-when", type=Path, help="start the engines at once, but measure only once this file is there")
    args = parse(parser)
    if args.quick:
        args.repeats, args.seconds, args.workers, args.batch_size = 1, 3.0, 1, 4
    gpus = visible_gpus()
    if 0 < len(gpus) <= max(NUM_ENGINES):
        parser.error(f"{len(gpus)} GPUs are visible: {1 + max(NUM_ENGINES)} are needed, or none (CUDA_VISIBLE_DEVICES=)")
    result = Result("engines", args)
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        measure(result, args, gpus, Path(temporary), stack)
    result.finish()


def measure(result: Result, args: Any, gpus: list[str], temporary: Path, stack: ExitStack) -> None:
    from accerl_mp.config import Config

    placement = "dedicated" if gpus else "cpu"
    # Before torch: NCCL's settings must be vLLM's. How a rank allocates is not the engines' business, which inherit the rest.
    of_rank = rank_environment(Config.from_flat({"placement": placement, "fsdp_world_size": 1}), GpuPlan(gpus[:1], []))
    os.environ |= {name: value for name, value in of_rank.items() if not name.startswith("PYTORCH_")}
    from bench.generation import generation

    model = model_folder(args.model, temporary)
    runs = {}
    for number, plan in zip(NUM_ENGINES, plans(gpus), strict=True):
        options = settings(number, args, on_gpu=bool(gpus))
        runs[number] = stack.enter_context(generation(model, plan=plan, **options))
    for run in runs.values():  # only now: the engines have started side by side
        run.push()
        run.measure(0.0)
    print("engines: all are ready", file=sys.stderr, flush=True)
    while args.start_when and not args.start_when.exists():
        time.sleep(0.1)
    sides = {str(number): lambda run=run: run.measure(args.seconds) for number, run in runs.items()}
    measured = alternate(sides, repeats=args.repeats, warmup=1)
    report(result, {int(side): stretches for side, stretches in measured.items()}, args)


if __name__ == "__main__":
    main()
