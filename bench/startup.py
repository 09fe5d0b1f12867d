"""From the command to the first trained sample, by phase; with `--vs ray` against starting Ray alone.

What is limited here: importing. torch and vLLM are imported in processes of their own before anything else can happen, so the limit is
the time of `import torch` and `import vllm` in a fresh interpreter, measured in the same run. The run is the demo's, without evaluation,
for one optimizer step; phases are read from its own logs. Seconds count from the command; the games have been made before.

`--vs ray` starts a Ray of one node and one actor in between (bench/ray_buffer.py, in a throw-away environment): what a system that is
built on Ray spends before it can start any of the same.
"""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from bench.common import Result, alternate, make_parser, parse, stopwatch
from bench.runs import demo_flags, finished_run
from bench.scratch import ray_driver, ray_python

PHASES = {
    "flags checked, processes start": ("supervisor-0", "starts"),
    "trainer's model ready": ("trainer-0", "model ready"),
    "vLLM ready": ("inference-0", "is ready after"),
    "first weights pushed and verified": ("trainer-0", "push 0 verified"),
}
"""Phase: the log and the line that end it."""
LAST = "first samples trained and pushed"


def start_ours() -> dict[str, float]:
    with finished_run(demo_flags("--max-steps", "1", "--batch-size", "2", "--lr-warmup-steps", "0")) as run:
        seconds = {phase: run.logged_s(*line) for phase, line in PHASES.items()}
        return seconds | {LAST: run.metrics()[0]["time"] - run.started, "run has ended, nothing is left": run.wall_s}


def start_ray() -> dict[str, float]:
    started = time.monotonic()
    with ray_driver() as ray:
        return {"ray.init": ray.started["init_s"], "first actor answers, from the command": time.monotonic() - started}


def import_seconds(module: str) -> float:
    with stopwatch() as seconds:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, capture_output=True)
    return seconds()


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--vs", choices=("ray",), help="start this as well, alternating (installs it into a throw-away environment)")
    args = parse(parser)
    if args.quick:
        args.repeats = 1
    result = Result("startup", args)
    sides = {"accerl_mp": start_ours}
    if args.vs:
        ray_python()  # installing it is not starting it
        sides["ray alone"] = start_ray
    starts = alternate(sides, repeats=args.repeats, warmup=0 if args.quick else 1)
    for side, values in starts.items():
        for phase in values[0]:
            result.add(phase, [value[phase] for value in values], "s", "lower", side=side)
    if args.vs:
        firsts = [value["first actor answers, from the command"] for value in starts["ray alone"]]
        whole = [value[LAST] for value in starts["accerl_mp"]]
        ours = [value["flags checked, processes start"] for value in starts["accerl_mp"]]
        result.ratio("our command to first trained sample / Ray's to its first actor", whole, firsts)
        result.ratio("our command to processes started / Ray's to its first actor", ours, firsts)
    for module in ("torch", "vllm"):
        result.add(f"limit: import {module}", [import_seconds(module) for _ in range(args.repeats)], "s", "lower")
    result.finish()


if __name__ == "__main__":
    main()
