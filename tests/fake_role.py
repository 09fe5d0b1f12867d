"""A small real process for the supervisor's tests: `python -m tests.fake_role --run-dir DIR --index N`, FAKE_MODE in the environment."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from accerl_mp.transport.errors import EXIT_GAME_HUNG
from accerl_mp.transport.process import Process, run_process


def main(process: Process) -> None:
    mode = os.environ["FAKE_MODE"]
    if mode == "die":
        raise ValueError("no such weights")
    if mode == "grandchild":
        _start_grandchild(process.paths.run_dir)
    if mode in ("shares", "shares-while-it-starts"):
        process.shared = SharedMemory(create=True, size=4096)  # type: ignore[attr-defined]  # held open as long as the process
        (process.paths.run_dir / "shared").write_text(process.shared.name)  # type: ignore[attr-defined]
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "hung-games":
        time.sleep(0.1)
        os._exit(EXIT_GAME_HUNG)
    if mode == "breakpoint":
        breakpoint()
    if mode in ("hangs-in-its-start", "shares-while-it-starts"):
        _stand_still()
    while mode == "told-when-ready" and not (process.paths.run_dir / "ready").exists():
        time.sleep(0.02)
    if mode != "never-ready":
        process.health.set_state("running")
    if mode == "crashes-in-a-game":
        process.health.note_played(7)
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "plays":
        process.health.note_played(7)
    if mode == "stuck":
        _stand_still()
    with (process.paths.run_dir / "order.txt").open("a") as file:
        file.write(f"start {process.name} {os.getpid()}\n")
    try:
        with process.health.waiting("the test to end it", timeout_s=0) as wait:
            while True:
                if mode != "deaf":
                    wait.check()
                time.sleep(0.02)
    finally:
        with (process.paths.run_dir / "order.txt").open("a") as file:
            file.write(f"end {process.name} {os.getpid()}\n")


def _stand_still() -> None:
    """Alive, with a heartbeat, but its loop does not move."""
    time.sleep(600)


def _start_grandchild(run_dir: Path) -> None:
    """As vLLM's EngineCore: in a session of its own, deaf to SIGTERM, and it does not notice its parent's death."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    (run_dir / "grandchild.pid").write_text(str(child.pid))


if os.environ.get("FAKE_MODE") == "never-enters":  # a module that is imported
    _stand_still()

if __name__ == "__main__":
    run_process("fake", main)
