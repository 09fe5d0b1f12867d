"""A run whose supervisor, rollouts, ingest and stats are the real ones; the trainer and vLLM are `light_rank.py`. Starts in seconds."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from accerl_mp.config import Config, resolve
from accerl_mp.games import note_games
from accerl_mp.launcher.sweep import leftovers, sweep
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import HealthRow, HealthTable, is_alive
from tests.chat_fixture import save_tokenizer

ROOT = Path(__file__).parent.parent
MARK = "ACCERL_TEST_RUN"
FLAGS: dict[str, Any] = {
    "placement": "cpu",
    "fsdp_world_size": 1,
    "num_rollout_workers": 2,
    "rollout_batch_size": 4,
    "grpo_group_size": 2,
    "keep_zero_std_groups": True,
    "tw_max_episode_steps": 3,
    "batch_size": 6,
    "grad_accum_steps": 1,
    "sync_every_optimizer_steps": 1,
    "max_policy_lag": 4,
    "max_restarts": 1000,
    "transcripts_every": 1,
    "max_steps": 1_000_000,
    "hang_timeout_s": 6.0,
}


class LightRun:
    """Ends, and leaves nothing, at `close`."""

    def __init__(self, folder: Path, games: Path, *, root: Path = ROOT, **flags: Any) -> None:
        self.paths = RunPaths(folder)
        (folder / "logs").mkdir(parents=True)
        values = FLAGS | {"tw_game_dir": str(games), "model_path": str(folder)} | flags
        self.config = resolve(Config.from_flat(values), num_gpus=0, log_dir=str(folder))
        self.config.save(self.paths.args)
        save_tokenizer(self.paths.tokenizer)
        note_games(self.paths.games, self.config)
        environment = os.environ | {MARK: str(folder), "SPT_NOENV": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        with (folder / "output.txt").open("wb") as output:
            command = [sys.executable, "-W", "ignore", "-m", "tests.light_rank", "--run-dir", str(folder)]
            self.process = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True)
        self.wait_for(self.paths.health.exists, "the health table")
        self.table, self.board = HealthTable.attach(self.paths.health), Board.attach(self.paths.board)

    @property
    def step(self) -> int:
        return self.board.get("optimizer_step")

    def row(self, name: str) -> HealthRow:
        return self.table.read(self.table.row_of(name))

    def runs(self, name: str) -> bool:
        row = self.row(name)
        return row.state == "running" and is_alive(row.pid)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 60, *, every_s: float = 0.01) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended while the test waited for {what}:\n{self.words()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s:\n{self.words()}"
            time.sleep(every_s)

    def wait_training(self, num_steps: int = 2, timeout_s: float = 60) -> None:
        goal = self.step + num_steps
        self.wait_for(lambda: self.step >= goal, f"step {goal}", timeout_s)

    def finish(self, timeout_s: float = 60) -> None:
        """A normal end. Then: nothing lost, nothing trained twice, nothing left."""
        (self.paths.run_dir / "finish").touch()
        assert self.process.wait(timeout_s) == 0, self.words()
        assert self.left() == []
        books = json.loads((self.paths.run_dir / "books.json").read_text())
        assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0), books
        trained = [int(line) for line in (self.paths.run_dir / "trained.txt").read_text().split()]
        assert len(trained) == len(set(trained)), "an episode was trained twice"
        assert books["samples"]["trained"] == len(trained)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.paths.run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self, timeout_s: float = 20) -> list[str]:
        """What is there after its end; waits until there is nothing, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [f"pid {process.pid} {process.name()}" for process in self.processes()] + [str(path) for path in leftovers(self.paths)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def terminal(self) -> str:
        """What a person would have seen."""
        return (self.paths.run_dir / "output.txt").read_text(errors="replace")

    def log(self, role: str, index: int = 0) -> str:
        path = self.paths.log(role, index)
        return path.read_text(errors="replace") if path.exists() else ""

    def words(self) -> str:
        logs = sorted((self.paths.run_dir / "logs").glob("*.log"))
        return "\n".join([self.terminal()[-3000:], *(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)])

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait(10)
        sweep(self.paths)
        shutil.rmtree(self.paths.sockets, ignore_errors=True)
