"""A run without a trainer: real inference, ingest and rollout processes, and this process in the place of trainer rank 0 and stats.

The demo's weights are pushed once; what is generated is read from the ring, so that rollouts never wait for room. Used by bench/rollout.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from accerl_mp.config import Config, resolve
from accerl_mp.launcher.environment import gpu_plan
from accerl_mp.launcher.roles import build_roles
from accerl_mp.launcher.sweep import sweep
from accerl_mp.launcher.tokenizer import export_tokenizer
from accerl_mp.models.build import compute_dtype, load_model
from accerl_mp.samples import RLSample
from accerl_mp.topology import GpuPlan, RunPaths
from accerl_mp.transport import sockets
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import MetricsReceiver
from accerl_mp.transport.health import PARENT_PID, Health, HealthTable
from accerl_mp.transport.process import Process
from accerl_mp.transport.ring import SharedRing
from accerl_mp.weight_sync.report import PushReport
from accerl_mp.weight_sync.sender import WeightSync
from bench.common import ROOT, python_path

GAMES = ROOT / "runs" / "demo_games"
_STARTED = ("ingest", "inference", "rollout")
_GPU_KV_CACHE_GIB = 16.0
_PARTS = {"rollout": "rollouts", "inference": "inference, front", "ingest": "ingest"}
"""Role: its part in the seconds of CPU time."""


def make_games() -> Path:
    """The demo's training games, made where they are not there yet."""
    if not (GAMES / "train").is_dir():
        command = [sys.executable, "-m", "accerl_mp.tools.make_games", "--out", str(GAMES)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return GAMES / "train"


def generation_config(model: Path, folder: Path, **settings: Any) -> Config:
    """The demo's games and lengths; every group is kept, nothing is too old, and games are played for ever."""
    num_gpus = torch.cuda.device_count()
    values = {
        "model_path": str(model),
        "tw_game_dir": settings.get("tw_game_dir") or str(make_games()),
        "tw_max_episode_steps": 6,
        "tw_history_token_window": 1536,
        "max_length": 1536,
        "fsdp_world_size": 1,
        "keep_zero_std_groups": True,
        "max_policy_lag": 0,
        "replay_capacity": 512,
        "verify_sync": 0,
        "env_step_timeout_s": 3600.0,  # rollouts are stopped while the other side is measured
        "request_timeout_s": 3600.0,
        # On a GPU that others use as well (this process, a second engine) vLLM must not measure what is free.
        "kv_cache_gib": _GPU_KV_CACHE_GIB if num_gpus else None,
    }
    return resolve(Config.from_flat(values | settings), num_gpus=num_gpus, log_dir=str(folder))


class Generation:
    """Its processes. Rollouts play from the push on, and are stopped (SIGSTOP) when `measure` ends, until the next one."""

    def __init__(self, config: Config, paths: RunPaths, plan: GpuPlan | None = None) -> None:
        """`plan`: which engine gets which GPUs, where that is not what a run does."""
        self.config, self._paths = config, paths
        self._roles = {role.name: role for role in build_roles(config, paths, plan or gpu_plan(config)) if role.name in _STARTED}
        names = ["trainer/0", "stats/0", *(name for role in self._roles.values() for name in role.names)]
        self._board = Board.create(paths.board)
        self._table = HealthTable.create(paths.health, names)
        sockets.make_folder(paths)
        self._metrics = MetricsReceiver(paths)
        self._processes = {name: self._start(role, index) for role in _STARTED for index, name in enumerate(self._roles[role].names)}
        self.samples: list[RLSample] = []
        """The latest that were read, for their prompts."""

    def _start(self, role: str, index: int) -> subprocess.Popen[bytes]:
        command = [*self._roles[role].command, "--run-dir", str(self._paths.run_dir), "--index", str(index)]
        environment = self._roles[role].environment(index) | {PARENT_PID: str(os.getpid()), "PYTHONPATH": python_path()}
        with self._paths.log(role, index).open("a") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def push(self) -> None:
        """Become trainer rank 0 and push the model's weights: rollouts begin to play. RuntimeError if a process has died before."""
        self._await_engine()
        health = Health("trainer/0", table=HealthTable.attach(self._paths.health), board=self._board, run_dir=self._paths.run_dir)
        process = Process("trainer", 0, self._paths, self.config, health, self._board)
        device = torch.device("cuda" if self.config.run.placement != "cpu" else "cpu")
        self.model, dtype = load_model(self.config, device), compute_dtype(self.config, device)
        self._sync = WeightSync(process, self.model, rank=0, world_size=1, dtype=dtype, forced_logprobs=lambda ids: NotImplemented)
        self._sync.connect()
        self._sync.start_push(0, trainable_only=False)
        self._sync.finish_push()
        self._board.set("policy_version", 0)
        self._reader = SharedRing.attach_reader(self._paths.ring(0))

    def push_next(self) -> PushReport:
        """Push `model` as it is now, under the next version, while the rollouts play on."""
        version = self._board.get("policy_version") + 1
        self._sync.start_push(version, trainable_only=True)
        report = self._sync.finish_push()
        self._board.set("policy_version", version)
        return report

    def _await_engine(self) -> None:
        """Until the engine runs, however long it takes to start; a process that dies meanwhile is named, with its last words."""
        row = self._table.row_of("inference/0")
        while self._table.read(row).state != "running":
            self._check_alive()
            time.sleep(0.1)

    def measure(self, seconds: float, *, settle_s: float = 1.0) -> dict[str, float]:
        """Let the rollouts play; what the processes reported meanwhile: sums of seconds by phase, requests, env steps, CPU seconds."""
        self._signal(signal.SIGCONT)
        self._collect(settle_s)
        started, cpu = time.monotonic(), self._cpu_seconds()
        totals = self._collect(seconds)
        totals["seconds"] = time.monotonic() - started
        totals |= {f"CPU {part}": after - cpu[part] for part, after in self._cpu_seconds().items()}
        self._signal(signal.SIGSTOP)
        return totals

    def play(self, seconds: float) -> dict[str, float]:
        """What `measure` gives, of rollouts that play before and after it too."""
        started = time.monotonic()
        totals = self._collect(seconds)
        return totals | {"seconds": time.monotonic() - started}

    def _cpu_seconds(self) -> dict[str, float]:
        """So far, by part; vLLM's own processes are children of the inference process."""
        parts = dict.fromkeys([*_PARTS.values(), "inference, vLLM's processes"], 0.0)
        for name, started in self._processes.items():
            process = psutil.Process(started.pid)
            parts[_PARTS[name.partition("/")[0]]] += sum(process.cpu_times()[:2])
            for child in process.children(recursive=True):
                parts["inference, vLLM's processes"] += sum(child.cpu_times()[:2])
        return parts

    def _collect(self, seconds: float) -> dict[str, float]:
        totals: dict[str, float] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check_alive()
            for record in self._metrics.receive(timeout_s=0.05):
                self._add(totals, record)
            self._drain()
        return totals

    def _add(self, totals: dict[str, float], record: dict[str, Any]) -> None:
        if record["kind"] == "episode":
            for name in ("num_env_steps", "num_turns", "num_tokens"):
                totals[name] = totals.get(name, 0.0) + record["episode"][name]
        for tag, (total, count, _) in record.get("values", {}).items():
            totals[tag] = totals.get(tag, 0.0) + total
            totals[f"{tag} count"] = totals.get(f"{tag} count", 0.0) + count

    def _drain(self) -> None:
        """Read and release: rollouts never wait for room."""
        records = self._reader.ready()
        self.samples = [*self.samples, *(sample for sample in self._reader.read_all(records) if sample is not None)][-512:]
        for record in records:
            self._reader.release(record, "trained")

    def _signal(self, number: signal.Signals) -> None:
        for name, process in self._processes.items():
            if name.startswith("rollout"):
                process.send_signal(number)

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                role, index = name.split("/")
                raise RuntimeError(
                    f"{name} ended with exit code {process.returncode}: {self._paths.log(role, int(index)).read_text()[-2000:]}"
                )

    def close(self) -> None:
        """End everything, whatever state it is in."""
        self._signal(signal.SIGCONT)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if hasattr(self, "_sync"):
            self._sync.close()
        self._metrics.close()
        self._board.unlink()
        self._table.unlink()


@contextmanager
def generation(model: Path, *, plan: GpuPlan | None = None, **settings: Any) -> Iterator[Generation]:
    """Started, to be pushed to; ended with the block."""
    folder = Path(tempfile.mkdtemp(prefix="accerl-bench-"))
    paths = RunPaths(folder / "run")
    (paths.run_dir / "logs").mkdir(parents=True)
    paths.tokenizer.mkdir()
    config = generation_config(model, paths.run_dir, **settings)
    config.save(paths.args)
    if problems := export_tokenizer(config.model, paths.tokenizer):
        raise RuntimeError("\n".join(problems))
    run = None
    try:
        run = Generation(config, paths, plan)
        yield run
    finally:
        if run is not None:
            run.close()
        sweep(paths)
        shutil.rmtree(folder, ignore_errors=True)
