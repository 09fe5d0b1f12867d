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
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from accerl_mp.config import Config
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.recovery import Start
from accerl_mp.topology import visible_gpus
from accerl_mp.trainer.recording import load_step, step_file
from bench.common import ROOT, Result, make_parser, parse, python_path
from bench.runs import demo_flags

PARTS = ("placements", "trainer", "engines", "mixture")
PRESET = ROOT / "accerl_mp" / "presets" / "qwen-moe-4gpu.args"
K3_BOUND = 0.05
"""As tests/gpu/read_run.py: in bfloat16 a few thousandths, wrong weights give whole nats."""
GAP_AFTER_S = 0.05
"""A swap's effect on generation shows within this time."""


class Failed(RuntimeError):
    """A run that did not do what it has to."""


class RunFolder:
    """What a run has left to be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.start = Config.load(folder / "args.json"), Start.load(folder / "resume")

    def log(self, name: str) -> str:
        file = self.folder / "logs" / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "Train/Loss" in line]

    def lines(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def versions_by_engine(self) -> list[list[int]]:
        """Versions of the tokens that each engine sampled, of the recorded samples."""
        num_engines = self.config.inference.infer_size or 1
        found: list[set[int]] = [set() for _ in range(num_engines)]
        for step in self.recorded():
            for sample in (sample for samples in step for sample in samples):
                found[sample.episode_id % num_engines].update(sample.output_versions.tolist())
        return [sorted(versions) for versions in found]

    def recorded(self) -> list[list[list[Any]]]:
        """Samples by step and rank, of the run's last start."""
        folder, ranks = self.folder / "samples", range(self.config.run.fsdp_world_size or 1)
        first = int(Path(self.start.state).name.split("-")[1]) if self.start.state else 0  # the state may be gone by now
        steps = itertools.takewhile(lambda step: all(step_file(folder, step, rank).exists() for rank in ranks), itertools.count(first))
        found = [[load_step(folder, step, rank) for rank in ranks] for step in steps]
        return [[[s for batch in one.micro_batches for s in batch] for one in step] for step in found]

    def loads(self) -> np.ndarray:
        """[steps, ranks]: estimated FLOPs."""
        estimate = FlopsEstimate.of_model(Path(self.config.model.model_path))
        return np.array([[estimate.of(np.array([len(s) for s in samples])) for samples in step] for step in self.recorded()])

    def balance(self) -> list[float]:
        """Largest over mean load of the ranks, a step."""
        loads = self.loads()
        return (loads.max(1) / loads.mean(1)).tolist()

    def last_words(self, num_lines: int = 30) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        logs = [log for log in logs if log.name.split("-")[0] in ("trainer", "inference", "supervisor", "torchrun.log", "ingest")]
        return "".join(f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) + "\n" for log in logs)


class Bench:
    """The result and where runs are made."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.result = Result("four_gpus", args)
        self.failures: list[str] = []
        self._running: set[subprocess.Popen[str]] = set()

    def end(self) -> None:
        """Whatever still runs, when this script is ended: asked, and waited for."""
        for popen in list(self._running):
            popen.terminate()
        for popen in list(self._running):
            popen.wait(90)

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

    def command(self, words: list[str], *, name: str, timeout_s: float, **variables: str) -> str:
        """Its standard output; Failed with its last words unless it ends with 0 in time. A file NAME.err keeps the rest."""
        environment = os.environ | {"ACCERL_PYTHON": sys.executable, "PYTHONPATH": python_path()} | variables
        with (self.args.logs / f"{name}.err").open("w+") as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
            ended = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **streams)
            self._running.add(ended)
            try:
                output, _ = ended.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                ended.terminate()
                output, _ = ended.communicate(timeout=60)
                output += f"\n{name}: ended after {timeout_s:.0f} s"
            finally:
                if ended.poll() is not None:
                    self._running.discard(ended)
            errors.seek(0)
            if ended.returncode:
                raise Failed(f"{name} ended with exit code {ended.returncode}: {(output + errors.read())[-1500:]}")
        return output

    def run(self, name: str, flags: list[str], *, timeout_s: float, launcher: tuple[str, ...] = ("bash", "launch.sh")) -> RunFolder:
        """A run to its end. Whatever becomes of it, its logs' last lines are kept."""
        folder = self.folder / name.split(",")[0].replace(" ", "")
        try:
            words = [*launcher, *flags, "--log-dir", str(folder)]
            self.command(words, name=name.replace(" ", "").replace(",", "-"), timeout_s=timeout_s)
        finally:
            if folder.is_dir():
                (self.args.logs / f"{folder.name}.words").write_text(RunFolder(folder).last_words())
        return RunFolder(folder)


# --- placements --------------------------------------------------------------------------------------------------------------------


def measure_placements(bench: Bench) -> None:
    """Two chains of runs side by side: nothing is timed here."""
    with_state = threading.Thread(target=lambda: bench.attempt("3 ranks + 1 engine, then 2 + 2", lambda: _three_then_two(bench)))
    with_state.start()
    if not bench.args.cpu or bench.args.tp:
        bench.attempt("2 ranks + one engine over 2 GPUs", lambda: _two_with_tensor_parallel(bench))
    with_state.join()


def _three_then_two(bench: Bench) -> None:
    args, rounds = bench.args, bench.args.rounds
    run = bench.run("3 + 1", _placement_flags(args, rounds, ranks=3, engines=1), timeout_s=args.limit_s)
    _check_placement(bench, run, "3 + 1", rounds)
    loads = run.loads().sum(0)
    bench.result.add("largest over mean load of 3 ranks, a step", run.balance(), "", "lower")
    bench.result.target("largest over mean load of 3 ranks, all steps together", loads.max() / loads.mean(), at_most=1.05)
    flags = [*_placement_flags(args, 2 * rounds, ranks=2, engines=2), "--resume", "auto"]
    run = bench.run("3 + 1, then 2 + 2", flags, timeout_s=args.limit_s)
    if f"optimizer step {rounds}, round {rounds}" not in (said := run.log("trainer-1")):
        raise Failed(f"rank 1 of 2 did not go on from step {rounds} of three ranks: {said[-1500:]}")
    _check_placement(bench, run, "2 + 2, from the state of 3 ranks", 2 * rounds)


def _two_with_tensor_parallel(bench: Bench) -> None:
    args = bench.args
    flags = [*_placement_flags(args, args.rounds, ranks=2, engines=1), "--infer-tp-size", "2"]
    _check_placement(bench, bench.run("2 + tp 2", flags, timeout_s=args.limit_s), "2 + one over 2", args.rounds)


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
    args = bench.args
    flags = ["--model", args.model, "--settings", "base", "--ranks", "1", "2", "3", "--warmup", "2", "--repeats", str(args.repeats)]
    flags += ["--budgets", str(args.budget), "--packs", str(args.packs)]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "8"}
    found = _script(bench, "trainer", flags, **variables)
    rates = {one["labels"]["ranks"]: one["median"] for one in found["measures"] if one["name"] == "throughput"}
    for ranks, wanted in ((2, 1.9), (3, 2.7)):
        if ranks in rates:
            bench.result.target(f"tokens/s of {ranks} trainer ranks / one", rates[ranks] / rates[1], at_least=wanted)


def measure_engines(bench: Bench) -> None:
    args = bench.args
    flags = ["--model", args.model, "--workers", str(args.workers), "--repeats", str(args.repeats), "--seconds", str(args.seconds)]
    flags += ["--games", str(args.games)] if args.games else []
    flags += ["--eager"] if args.eager else []
    flags += ["--start-when", str(args.engines_when)] if args.engines_when else []
    _script(bench, "engines", flags)


def _script(bench: Bench, name: str, flags: list[str], **variables: str) -> dict[str, Any]:
    """Its result, which becomes part of this one."""
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if bench.args.cpu else {}
    output = bench.command([sys.executable, f"bench/{name}.py", *flags], name=name, timeout_s=bench.args.limit_s, **variables)
    found = json.loads(output.strip().splitlines()[-1])
    result = bench.result
    result._measures += found["measures"]
    result._ratios += found["ratios"]
    result._targets += found["targets"]
    for note in found["notes"]:
        result.note(f"{name}: {note}")
    return found


# --- the mixture -------------------------------------------------------------------------------------------------------------------


def measure_mixture(bench: Bench) -> None:
    args, folder = bench.args, bench.folder / "mixture-model"
    if args.mixture.is_dir():
        folder = args.mixture
    else:
        bench.command([sys.executable, "bench/models.py", str(args.mixture), str(folder)], name="model", timeout_s=args.limit_s)
    os.environ |= {"MODEL_PATH": str(folder), "TEXTWORLD_GAME_DIR": str((args.games or ROOT / "runs/demo_games/train").resolve())}
    launcher = (sys.executable, "-m", "bench.watched_run", "start")
    memory = CardMemory()
    run = bench.run("mixture", _mixture_flags(args), timeout_s=args.limit_s, launcher=launcher)
    memory.stop()
    _report_mixture(bench.result, run, memory)


def _mixture_flags(args: argparse.Namespace) -> list[str]:
    """What differs from the preset: what a random model needs, and less of everything that takes time."""
    flags = [f"@{PRESET}", "--keep-zero-std-groups", "--tw-invalid-action-penalty", "0.01", "--old-new-kl-coef", "0.01"]
    flags += ["--max-steps", str(args.pushes), "--max-sync-rounds", str(args.pushes), "--verify-sync", str(args.pushes)]
    flags += ["--grad-accum-steps", str(args.grad_accum), "--replay-sample-timeout-seconds", "300", "--record-samples"]
    if args.eager:
        flags += ["--enforce-eager"]
    if args.cpu:
        sizes = {"--tw-max-episode-steps": 3, "--tw-history-token-window": 1024, "--max-length": 1024, "--train-token-budget": 2048}
        sizes |= {"--num-rollout-workers": 3, "--rollout-batch-size": 4, "--replay-capacity": 64, "--min-replay-size-per-rank": 2}
        flags += ["--placement", "cpu", "--dtype", "float32", *(word for name, value in sizes.items() for word in (name, str(value)))]
    return flags + args.mixture_flags


class CardMemory(threading.Thread):
    """The most that nvidia-smi says is used, by GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_mib: dict[str, int] = {}
        self._stopping = threading.Event()
        if visible_gpus():
            self.start()

    def run(self) -> None:
        while not self._stopping.wait(1.0):
            command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
            for index, used in (line.split(",") for line in listing.splitlines() if "," in line):
                self.most_mib[index] = max(self.most_mib.get(index, 0), int(used))

    def stop(self) -> None:
        self._stopping.set()


def _report_mixture(result: Result, run: RunFolder, memory: CardMemory) -> None:
    tokens, pushes = np.load(run.folder / "tokens-0.npy"), np.load(run.folder / "pushes-0.npy")[1:]  # the first one is waited for
    if not len(pushes) or not len(tokens):
        raise Failed(f"{len(pushes)} pushes after the first, {len(tokens)} steps with tokens")
    around = [tokens[(tokens[:, 0] >= began) & (tokens[:, 0] <= end + GAP_AFTER_S)] for _, began, _, end in pushes]
    inside = np.zeros(len(tokens), bool)
    for _, began, _, end in pushes:
        inside |= (tokens[:, 0] >= began) & (tokens[:, 0] <= end + GAP_AFTER_S)
    playing = tokens[(tokens[:, 0] > pushes[0, 1]) & ~inside]
    result.add("mixture: longest gap between tokens around a push", [1e3 * rows[:, 2].max(initial=0.0) for rows in around], "ms", "lower")
    if len(playing):
        gaps = [1e3 * float(np.percentile(playing[:, 2], share)) for share in (50, 95, 100)]
        result.note(f"mixture: longest gap in a step's tokens without a push: p50 {gaps[0]:.1f}, p95 {gaps[1]:.1f}, max {gaps[2]:.1f} ms")
    result.add("mixture: swap", [1e3 * (end - start) for _, _, start, end in pushes], "ms", "lower")
    result.add(
        "mixture: push, from its announcement to the swap's end", [1e3 * (end - began) for _, began, _, end in pushes], "ms", "lower"
    )
    for line in (line for line in run.log("trainer-0").splitlines() if "GB/s on the wire" in line):
        result.note(f"mixture: {line.partition('push ')[1]}{line.partition('push ')[2]}")
    for rank in range(run.config.run.fsdp_world_size or 1):
        said = [line for line in run.log(f"trainer-{rank}").splitlines() if "training is over" in line or "warmed up" in line]
        result.note(f"mixture: rank {rank}: " + "; ".join(line.partition(" INFO ")[2] or line for line in said))
    for index, used in memory.most_mib.items():
        result.add("mixture: memory, nvidia-smi's largest", used / 1024, "GiB", gpu=index)
    rounds = run.rounds()
    result.add("mixture: trained tokens", [line["Train/TokensPerSec"] for line in rounds], "tokens/s", "higher")
    generated = [line["Infer/TokensPerSec"] for line in rounds if "Infer/TokensPerSec" in line]
    result.add("mixture: generated tokens", generated, "tokens/s", "higher")
    result.add("mixture: largest over mean load of the ranks", run.balance(), "", "lower")


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="the same processes on CPUs")
    parser.add_argument("--tp", action="store_true", help="with --cpu: one engine over two processes too")
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
        args.cpu, args.parts, args.rounds = True, ["placements"], 2
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
