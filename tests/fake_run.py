"""A whole run with everything real but vLLM: launcher, torchrun, supervisor, ranks, rings, ingest, stats, rollouts and games.

    python -m tests.fake_run start --run-dir DIR     as launch.sh does after `prepare`
    (torchrun) -m tests.fake_run --run-dir DIR       a trainer rank; rank 0 forks the supervisor

Inference is a process that answers with random tokens under the version on the board, and pushes reach nobody.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accerl_mp import log
from accerl_mp.config import Config
from accerl_mp.launcher.environment import gpu_plan
from accerl_mp.launcher.roles import Role, build_roles
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.topology import RunPaths


def roles(run_dir: Path) -> list[Role]:
    config, paths = Config.load(run_dir / "args.json"), RunPaths(run_dir)
    fake = [
        sys.executable,
        "-c",
        "from tests.fake_run import answer, run_process; run_process('inference', answer)",
    ]
    return [replace(role, command=fake) if role.name == "inference" else role for role in build_roles(config, paths, gpu_plan(config))]


def run_process(*arguments: Any) -> None:
    from accerl_mp.transport.process import run_process

    run_process(*arguments)


def answer(process: Any) -> None:
    """The inference process."""
    import time

    import numpy as np

    from tests.fake_peers import FakeInference, reply_fields

    rng = np.random.default_rng()

    def reply(request: dict[str, Any], _: int) -> dict[str, Any]:
        return reply_fields(rng.integers(10, 200, 3).tolist(), version=process.board.get("policy_version"))

    peer = FakeInference(process.paths, reply).start()
    process.health.set_state("running")
    try:
        while True:
            with process.health.waiting("requests", timeout_s=0) as wait:
                wait.check()
            time.sleep(0.05)
            peer.requests.clear()
    finally:
        peer.stop()


class NoSync:
    """Stands where WeightSync does."""

    is_to_be_verified = False

    def __init__(self, process: Any, *_: Any, **__: Any) -> None:
        self._version = -1

    def connect(self) -> None:
        return

    def has_new_replica(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False

    def start_push(self, version: int, *, trainable_only: bool) -> None:
        self._version = version

    def finish_push(self) -> Any:
        from accerl_mp.weight_sync.report import PushReport

        return PushReport(version=self._version)

    def close(self) -> None:
        return


def train(process: Any) -> None:
    import time

    from accerl_mp.trainer import loop

    class Stepper(loop.Stepper):
        """Never comes to a step's collectives once DIR/stick-RANK is there."""

        def run(self, *arguments: Any, **options: Any) -> Any:
            while (process.paths.run_dir / f"stick-{process.index}").exists():
                time.sleep(0.1)
            return super().run(*arguments, **options)

    loop.WeightSync, loop.Stepper = NoSync, Stepper  # type: ignore[misc,assignment]
    loop.run_trainer(process)


def main(words: list[str]) -> None:
    run_dir = Path(words[words.index("--run-dir") + 1])
    if words[0] == "start":
        from accerl_mp.launcher.torchrun import Launcher, torchrun_flags

        flags = torchrun_flags(Config.load(run_dir / "args.json").run.fsdp_world_size or 1, "127.0.0.1:0")
        sys.exit(Launcher(RunPaths(run_dir), flags, module="tests.fake_run").run())
    rank = int(os.environ.get("RANK", "0"))
    log.keep_terminal()
    supervisor_pid = fork_supervisor(run_dir, roles(run_dir)) if rank == 0 else None

    from accerl_mp.launcher.rank import run_rank

    run_rank(run_dir, rank, supervisor_pid, train)


if __name__ == "__main__":
    main(sys.argv[1:])
