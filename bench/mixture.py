"""The part `mixture` of bench/four_gpus.py: the preset qwen-moe-4gpu on a random Qwen-MoE, a push a step."""

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.topology import visible_gpus
from bench.common import ROOT, Result
from bench.run_folder import Failed, RunFolder, lines_of
from bench.token_times import read_tokens

PRESET = ROOT / "accerl_mp" / "presets" / "qwen-moe-4gpu.args"
GAP_AFTER_S = 0.05
"""A swap's effect on generation shows within this time."""


def measure_mixture(bench: Any) -> None:
    args, folder = bench.args, bench.folder / "mixture-model"
    if args.mixture.is_dir():
        folder = args.mixture
    else:
        bench.command([sys.executable, "bench/models.py", str(args.mixture), str(folder)], name="model", timeout_s=args.limit_s)
    os.environ |= {"MODEL_PATH": str(folder), "TEXTWORLD_GAME_DIR": str((args.games or ROOT / "runs/demo_games/train").resolve())}
    launcher = (sys.executable, "-m", "bench.watched_run", "start")
    memory = CardMemory()

    def has_pushed(run_dir: Path) -> bool:
        num_rounds = sum("Train/Loss" in line for line in lines_of(run_dir / "metrics.jsonl"))
        memory.is_counting = num_rounds > 0
        return num_rounds >= args.pushes

    # Told to end before it has: what it would save of a mixture is many times what a machine's memory and disk do in this time.
    try:
        bench.run("mixture", _mixture_flags(args), launcher=launcher, until=has_pushed)
    finally:
        memory.stop()
        if (bench.folder / "mixture" / "pushes-0.npy").exists():  # what was measured counts, whatever came then
            _report_mixture(bench.result, RunFolder(bench.folder / "mixture"), memory)


def _mixture_flags(args: argparse.Namespace) -> list[str]:
    """What differs from the preset: what a random model needs, and less of everything that takes time."""
    flags = [f"@{PRESET}", "--keep-zero-std-groups", "--tw-invalid-action-penalty", "0.01", "--old-new-kl-coef", "0.01"]
    flags += ["--learning-rate", "1e-4", "--lr-warmup-steps", "1", "--resume-every-rounds", "0", "--max-trainer-restarts", "0"]
    flags += ["--grad-accum-steps", str(args.grad_accum), "--verify-sync", "6", "--record-samples", "--min-replay-size-per-rank", "8"]
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
        self.is_counting = False
        self._stopping = threading.Event()
        if visible_gpus():
            self.start()

    def run(self) -> None:
        while not self._stopping.wait(1.0):
            if not self.is_counting:
                continue
            command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
            for index, used in (line.split(",") for line in listing.splitlines() if "," in line):
                self.most_mib[index] = max(self.most_mib.get(index, 0), int(used))

    def stop(self) -> None:
        self._stopping.set()


def _report_mixture(result: Result, run: RunFolder, memory: CardMemory) -> None:
    tokens, pushes = read_tokens(run.folder / "tokens-0.f64"), np.load(run.folder / "pushes-0.npy")[1:]  # the first one is waited for
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
        said = [line for line in run.log(f"trainer-{rank}").splitlines() if "warmed up" in line]
        result.note(f"mixture: rank {rank}: " + "; ".join(line.partition(" INFO ")[2] or line for line in said))
    for index, used in memory.most_mib.items():
        result.add("mixture: memory, nvidia-smi's largest", used / 1024, "GiB", gpu=index)
    rounds = run.rounds()
    peaks = [line["Train/PeakMemoryGiB"] for line in rounds if "Train/PeakMemoryGiB" in line]
    if peaks:
        result.add("mixture: memory that a rank had allocated, largest", max(peaks), "GiB")
    result.add("mixture: trained tokens", [line["Train/TokensPerSec"] for line in rounds], "tokens/s", "higher")
    generated = [line["Infer/TokensPerSec"] for line in rounds if "Infer/TokensPerSec" in line]
    result.add("mixture: generated tokens", generated, "tokens/s", "higher")
    result.add("mixture: largest over mean load of the ranks", run.balance(), "", "lower")
