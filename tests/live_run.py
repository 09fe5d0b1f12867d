"""A real run through launch.sh, to break things in: its processes by name and moment, its progress, and what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from accerl_mp.launcher.sweep import leftovers, sweep
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import HealthRow, HealthTable, is_alive

ROOT = Path(__file__).parent.parent
MARK = "ACCERL_TEST_RUN"
"""Environment variable that every process of the run inherits."""
REAL_PYTHON = "ACCERL_TEST_PYTHON"
"""Environment variable: the interpreter behind a `python` that is a script."""


class LiveRun:
    """One `bash launch.sh FLAGS --log-dir FOLDER`."""

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        *,
        output: Path | None = None,
        root: Path = ROOT,
        prefix: tuple[str, ...] = (),
        python: Path = Path(sys.executable),
    ) -> None:
        """`python`: what stands for the environment's, for example `held_push.PYTHON`."""
        self.paths, self.output = RunPaths(folder), output or folder.parent / f"{folder.name}.output.txt"
        # SPT_NOENV: setproctitle would write over the environment, by which the run's processes are found.
        environment = os.environ | {"ACCERL_PYTHON": str(python), REAL_PYTHON: sys.executable, MARK: str(folder), "SPT_NOENV": "1"}
        command = [*prefix, "bash", str(root / "launch.sh"), *flags, "--log-dir", str(folder)]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=root, env=environment, stdout=file, stderr=file, start_new_session=True)

    def attach(self, timeout_s: float = 120) -> None:
        self.wait_for(self.paths.health.exists, "the health table", timeout_s)
        self.table, self.board = HealthTable.attach(self.paths.health), Board.attach(self.paths.board)

    def follow(self, timeout_s: float = 240) -> None:
        """After the death of a rank: to the tables of the start that comes next."""
        before = self.row("supervisor/0").pid

        def has_begun() -> bool:
            with contextlib.suppress(FileNotFoundError):
                self.table, self.board = HealthTable.attach(self.paths.health), Board.attach(self.paths.board)
            return self.row("supervisor/0").pid not in (0, before)

        self.wait_for(has_begun, "the run to start again", timeout_s, every_s=0.1)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 120, *, every_s: float = 0.02) -> None:
        """Until `condition()`; AssertionError with the run's own words if the run ends first, or in `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended while the test waited for {what}:\n{self.words()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:.0f} s:\n{self.words()}"
            time.sleep(every_s)

    def wait_training(self, num_steps: int = 1, timeout_s: float = 240) -> None:
        """Until so many more optimizer steps are done."""
        goal = self.step + num_steps
        self.wait_for(lambda: self.step >= goal, f"optimizer step {goal}", timeout_s)

    @property
    def step(self) -> int:
        return self.board.get("optimizer_step")

    def row(self, name: str) -> HealthRow:
        return self.table.read(self.table.row_of(name))

    def runs(self, name: str) -> bool:
        row = self.row(name)
        return row.state == "running" and is_alive(row.pid)

    def vllm_pids(self, name: str = "inference/0") -> list[int]:
        """Front, engine core, workers."""
        with contextlib.suppress(psutil.Error):
            front = psutil.Process(self.row(name).pid)
            spawned = [child.pid for child in front.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
            return [front.pid, *spawned]
        return []

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run, launch.sh included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.paths.run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self, timeout_s: float = 30) -> list[str]:
        """What is left of it after its end: processes, shared memory, sockets. Waits until there is nothing, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [f"pid {process.pid} {process.name()}" for process in self.processes()] + [str(path) for path in leftovers(self.paths)]
            if not found:
                return []
            time.sleep(0.1)
        return found

    def stop(self, timeout_s: float = 120) -> int:
        """As Ctrl+C does; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Whatever happened: nothing is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop(60)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait(10)
        sweep(self.paths)

    def words(self) -> str:
        """What a person would have seen, and the ends of the logs."""
        logs = sorted((self.paths.run_dir / "logs").glob("*.log")) if self.paths.run_dir.exists() else []
        ends = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.output.read_text(errors="replace")[-4000:], *ends])

    def log(self, role: str, index: int = 0) -> str:
        return self.paths.log(role, index).read_text(errors="replace")

    def books(self) -> dict[str, Any]:
        return json.loads((self.paths.run_dir / "books.json").read_text())
