"""Four GPUs: what the placements of a run give there. One part after the other, all of them or those named.

placements   3 ranks + 1 engine, which ends with a saved state; from it 2 ranks + 2 engines go on; beside them 2 ranks + one engine over
             2 GPUs. Through launch.sh, the demo's model: rounds, pushes verified, one version in all engines, ranks equally loaded.
trainer      bench/trainer.py with 1, 2 and 3 ranks, packs of one size
engines      bench/engines.py: generated tokens a second of one engine and of two
mixture      presets/qwen-moe-4gpu.args on a random Qwen-MoE, a push a step: gaps between tokens, GB/s, memory by rank

What is limited here: each part says so where its own script is. `placements` only has to work; its runs share the GPUs.

    python bench/four_gpus.py                                      four GPUs
    python bench/four_gpus.py --parts placements --cpu             the same processes on CPUs, over gloo
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.topology import visible_gpus
from bench.common import ROOT, Result, make_parser, parse, python_path
from bench.mixture import measure_mixture
from bench.run_folder import Failed, RunFolder
from bench.runs import demo_flags

PARTS = ("placements", "trainer", "engines", "mixture")
K3_BOUND = 0.05
"""As tests/gpu/read_run.py: in bfloat16 a few thousandths, wrong weights give whole nats."""


class Bench:
    """The result and where runs are made."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.result = Result("four_gpus", args)
        self.failures: list[str] = []
        self._running: set[subprocess.Popen[str]] = set()

    def end(self) -> None:
        """Whatever still runs, when this script is ended."""
        for popen in list(self._running):
            self._end(popen)

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """One part; the others go on if it fails."""
        started = time.monotonic()
        try:
            work()
        except (Failed, subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
            self.failures.append(name)
            self.result.note(f"{name} FAILED after {time.monotonic() - started:.0f} s: {str(error)[:400]}")
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{name}: done after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def command(self, words: list[str], *, name: str, timeout_s: float, until: Callable[[], bool] | None = None, **variables: str) -> str:
        """Its standard output; Failed with its last words unless it ends with 0 in time. A file NAME.err keeps the rest.

        until: it is told to end (its process group, by SIGTERM) as soon as this holds, which counts as well
        """
        environment = os.environ | {"ACCERL_PYTHON": sys.executable, "PYTHONPATH": python_path()} | variables
        started, is_done = time.monotonic(), False
        with (self.args.logs / f"{name}.out").open("w+") as output, (self.args.logs / f"{name}.err").open("w+") as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            popen = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, start_new_session=True, **streams)
            self._running.add(popen)
            while popen.poll() is None and time.monotonic() < started + timeout_s and not is_done:
                is_done = until is not None and until()
                time.sleep(0.05)
            self._end(popen)
            said = "".join(file.seek(0) * "" + file.read() for file in (output, errors))
            if popen.returncode and not is_done:
                late = f" after {timeout_s:.0f} s" if time.monotonic() > started + timeout_s else ""
                raise Failed(f"{name} ended with exit code {popen.returncode}{late}: {said[-1500:]}")
            output.seek(0)
            return output.read()

    def _end(self, popen: subprocess.Popen[str]) -> None:
        """Asked, killed after 80 s: launch.sh itself takes less."""
        with contextlib.suppress(ProcessLookupError):
            if popen.poll() is None:
                os.killpg(popen.pid, signal.SIGTERM)
        try:
            popen.wait(80)
        except subprocess.TimeoutExpired:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        self._running.discard(popen)

    def run(self, name: str, flags: list[str], *, launcher: tuple[str, ...] = ("bash", "launch.sh"), until: Any = None) -> RunFolder:
        """A run to its end. Whatever becomes of it, its logs' last lines are kept."""
        folder = self.folder / name.split(",")[0].replace(" ", "")
        try:
            words = [*launcher, *flags, "--log-dir", str(folder)]
            name = name.replace(" ", "").replace(",", "-")
            self.command(words, name=name, timeout_s=self.args.limit_s, until=until and (lambda: until(folder)))
        finally:
            if folder.is_dir():
                (self.args.logs / f"{folder.name}.words").write_text(RunFolder(folder).last_words())
        return RunFolder(folder)


# --- placements --------------------------------------------------------------------------------------------------------------------


def measure_placements(bench: Bench) -> None:
    """Two chains of runs side by side: nothing is timed here."""
    chains = {
        "two": ("3 ranks + 1 engine, then 2 + 2", _three_then_two),
        "tp": ("2 ranks + one engine over 2 GPUs", _two_with_tensor_parallel),
    }
    side_by_side(bench, {name: lambda work=work: work(bench) for key, (name, work) in chains.items() if key in bench.args.chains})


def side_by_side(bench: Bench, works: dict[str, Callable[[], None]]) -> None:
    threads = [threading.Thread(target=bench.attempt, args=work) for work in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _three_then_two(bench: Bench) -> None:
    args, rounds = bench.args, bench.args.rounds
    run = bench.run("3 + 1", _placement_flags(args, rounds, ranks=3, engines=1))
    _check_placement(bench, run, "3 + 1", rounds)
    loads = run.loads().sum(0)
    bench.result.add("largest over mean load of 3 ranks, a step", run.balance(), "", "lower")
    bench.result.target("largest over mean load of 3 ranks, all steps together", loads.max() / loads.mean(), at_most=1.05)
    flags = [*_placement_flags(args, 2 * rounds, ranks=2, engines=2), "--resume", "auto"]
    run = bench.run("3 + 1, then 2 + 2", flags)
    if f"optimizer step {rounds}, round {rounds}" not in (said := run.log("trainer-1")):
        raise Failed(f"rank 1 of 2 did not go on from step {rounds} of three ranks: {said[-1500:]}")
    _check_placement(bench, run, "2 + 2, from the state of 3 ranks", 2 * rounds)


def _two_with_tensor_parallel(bench: Bench) -> None:
    args = bench.args
    flags = [*_placement_flags(args, args.rounds, ranks=2, engines=1), "--infer-tp-size", "2"]
    _check_placement(bench, bench.run("2 + tp 2", flags), "2 + one over 2", args.rounds)


def _placement_flags(args: argparse.Namespace, rounds: int, *, ranks: int, engines: int) -> list[str]:
    others = ["--placement", "cpu"] if args.cpu else ["--placement", "dedicated", "--gpu-memory-utilization", "0.15", "--enforce-eager"]
    sizes = {"--fsdp-world-size": ranks, "--infer-size": engines, "--num-rollout-workers": max(4, ranks), "--max-steps": 1000}
    sizes |= {"--max-sync-rounds": rounds, "--verify-sync": 3}
    sizes |= {"--train-token-budget": 4096, "--batch-size": 8} if args.cpu else {}
    games = ["--tw-game-dir", str(args.games.resolve())] if args.games else []
    words = [word for name, value in sizes.items() for word in (name, str(value))]
    return demo_flags(*words, *others, *games, "--record-samples", "--keep-zero-std-groups")


def _check_placement(bench: Bench, run: RunFolder, name: str, rounds: int) -> None:
    """Everything that has to be so; Failed names what is not."""
    lines, ended = run.lines(), run.rounds()
    mismatches = [line["KL/TrainerInferK3"] for line in lines if "KL/TrainerInferK3" in line]
    verified = sum(line.get("Sync/VerifiedPushes", 0) for line in lines)
    inference, versions = run.config.inference, run.versions_by_engine()
    num_engines, num_workers = inference.infer_size or 1, (inference.infer_size or 1) * inference.infer_tp_size
    newest = [max(known, default=-1) for known in versions]
    swapped = [run.log(f"inference-{index}").count("weights are swapped") for index in range(num_engines)]
    problems = {
        f"the last round is {ended[-1]['step'] if ended else 0}, not {rounds}": not ended or ended[-1]["step"] != rounds,
        "no push was verified": verified < 1,
        f"k3 between trainer and vLLM is {mismatches}": not mismatches or max(mismatches) > K3_BOUND,
        f"engines sampled with versions {versions}": min(newest) <= run.start.first_version or max(newest) - min(newest) > 1,
        f"the weight group is not of {1 + num_workers}": f"weight group of {1 + num_workers}: " not in run.log("trainer-0"),
        f"workers that say how weights are swapped: {swapped}": min(swapped) < inference.infer_tp_size,
    }
    if wrong := [text for text, is_so in problems.items() if is_so]:
        raise Failed(f"{name}: " + "; ".join(wrong))
    result, labels = bench.result, {"placement": name}
    result.add("rounds", len(ended), "", **labels)
    result.add("verified pushes", verified, "", **labels)
    result.add("k3 between trainer and vLLM, same weights", mismatches, "nats", "lower", **labels)
    result.add("push", [1e3 * line["Sync/PushSeconds"] for line in lines if "Sync/PushSeconds" in line], "ms", "lower", **labels)
    result.note(f"{name}: newest version of the tokens of each engine {newest}; {_group_line(run)}")


def _group_line(run: RunFolder) -> str:
    lines = [line for line in run.log("trainer-0").splitlines() if "weight group of" in line]
    return lines[-1].partition("weight group")[1] + lines[-1].partition("weight group")[2]


# --- scripts of their own ----------------------------------------------------------------------------------------------------------


def measure_trainer(bench: Bench) -> None:
    """The three start together and measure one after the other; where there are four GPUs, one rank has the last one."""
    args, rates, gpus = bench.args, {}, [] if bench.args.cpu else visible_gpus()
    turn = [str(bench.folder / "turn"), "3"]
    flags = ["--model", args.model, "--settings", "base", "--warmup", "2", "--repeats", str(args.repeats), "--turn", *turn]
    flags += ["--budgets", str(args.budget), "--packs", str(args.packs)]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "8"}

    def measure(ranks: int) -> None:
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[-1:] if ranks == 1 else gpus[:ranks])} if gpus else {}
        found = _script(bench, "trainer", [*flags, "--ranks", str(ranks)], name=f"trainer-{ranks}", **variables, **own)
        rates[ranks] = next(one["median"] for one in found["measures"] if one["name"] == "throughput")

    side_by_side(bench, {f"{ranks} trainer ranks": lambda ranks=ranks: measure(ranks) for ranks in (1, 2, 3)})
    for ranks, wanted in ((2, 1.9), (3, 2.7)):
        if ranks in rates and 1 in rates:
            bench.result.target(f"tokens/s of {ranks} trainer ranks / one", rates[ranks] / rates[1], at_least=wanted)


def measure_engines(bench: Bench) -> None:
    args = bench.args
    flags = ["--model", args.model, "--workers", str(args.workers), "--repeats", str(args.repeats), "--seconds", str(args.seconds)]
    flags += ["--games", str(args.games)] if args.games else []
    flags += ["--eager"] if args.eager else []
    flags += ["--start-when", str(args.engines_when)] if args.engines_when else []
    _script(bench, "engines", flags)


def _script(bench: Bench, script: str, flags: list[str], *, name: str = "", **variables: str) -> dict[str, Any]:
    """Its result, which becomes part of this one."""
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if bench.args.cpu else {}
    name = name or script
    output = bench.command([sys.executable, f"bench/{script}.py", *flags], name=name, timeout_s=bench.args.limit_s, **variables)
    found = json.loads(output.strip().splitlines()[-1])
    result = bench.result
    result._measures += found["measures"]
    result._ratios += found["ratios"]
    result._targets += found["targets"]
    for note in found["notes"]:
        result.note(f"{name}: {note}")
    return found


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="the same processes on CPUs")
    parser.add_argument("--chains", nargs="+", choices=("two", "tp"), default=["two", "tp"], help="placements: which")
    parser.add_argument("--games", type=Path, help="folder of games (default: the demo's, made where they are not there)")
    parser.add_argument("--rounds", type=int, default=6, help="placements: of each run")
    parser.add_argument("--model", default="0.75b", help="trainer, engines: one of bench/models.py")
    parser.add_argument("--budget", type=int, default=16384, help="trainer: tokens of a pack")
    parser.add_argument("--packs", type=int, default=4, help="trainer: packs a rank and step")
    parser.add_argument("--workers", type=int, default=16, help="engines: rollout processes an engine")
    parser.add_argument("--seconds", type=float, default=4.0, help="engines: of each stretch")
    parser.add_argument("--engines-when", type=Path, help="engines: measure once this file is there")
    parser.add_argument("--eager", action="store_true", help="engines, mixture: no CUDA graphs in vLLM")
    parser.add_argument("--mixture", type=Path, default=Path("moe-5b"), help="mixture: one of bench/models.py, or a folder")
    parser.add_argument("--pushes", type=int, default=12, help="mixture: optimizer steps, each with a push")
    parser.add_argument("--grad-accum", type=int, default=8, help="mixture: packs a rank and step (the preset's is 32)")
    parser.add_argument("--mixture-flags", nargs=argparse.REMAINDER, default=[], help="mixture: further flags of the run (last)")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of each run and script")
    parser.add_argument("--logs", type=Path, help="folder for what runs and scripts have said (default: forgotten)")
    args = parse(parser)
    if args.quick:
        args.cpu, args.parts, args.chains, args.rounds = True, ["placements"], ["two"], 4  # fewer could all be of version 0
    with tempfile.TemporaryDirectory(prefix="accerl-four-") as folder:
        args.logs = args.logs or Path(folder) / "logs"
        args.logs.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, Path(folder))
        measures = {"placements": measure_placements, "trainer": measure_trainer, "engines": measure_engines, "mixture": measure_mixture}
        try:
            for part in args.parts:
                bench.attempt(part, lambda part=part: measures[part](bench))
        finally:
            bench.end()
            bench.result.finish()
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
