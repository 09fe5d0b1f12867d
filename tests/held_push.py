"""A run with everything real in which a push can be held half way: vLLM stands as long as DIR/hold is there (with --sync-staging off).

PYTHON is what a test gives launch.sh as ACCERL_PYTHON; instead of the package's launcher and ranks it starts this module:

    python -m tests.held_push --run-dir DIR --nproc-per-node N --rdzv-endpoint HOST:PORT     as accerl_mp.launcher.torchrun
    (torchrun) -m tests.held_push --run-dir DIR                                              as accerl_mp.launcher
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from accerl_mp import log
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.launcher.torchrun import Launcher, torchrun_flags
from accerl_mp.topology import RunPaths

PYTHON = Path(__file__).parent / "held_push.sh"
HOLD = "hold"
HELD = "the test to let the push go on"
"""What rank 0 waits for then."""


def train(process: Any) -> None:
    from accerl_mp.trainer import loop

    class HeldSync(loop.WeightSync):
        """Its first tensors are on the wire, the others follow once they may."""

        def _put(self, unit: Any) -> None:
            super()._put(unit)
            hold = process.paths.run_dir / HOLD
            if hold.exists():
                with process.health.waiting(HELD, timeout_s=0) as wait:
                    while hold.exists():
                        wait.check()
                        time.sleep(0.01)

    loop.WeightSync = HeldSync  # type: ignore[misc]
    loop.run_trainer(process)


def main() -> None:
    parser = argparse.ArgumentParser("tests.held_push")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--rdzv-endpoint")
    args = parser.parse_args()
    if args.nproc_per_node:
        flags = torchrun_flags(args.nproc_per_node, args.rdzv_endpoint)
        sys.exit(Launcher(RunPaths(args.run_dir), flags, module="tests.held_push").run())
    rank = int(os.environ.get("RANK", "0"))
    log.keep_terminal()
    supervisor_pid = fork_supervisor(args.run_dir) if rank == 0 else None

    from accerl_mp.launcher.rank import run_rank

    run_rank(args.run_dir, rank, supervisor_pid, train)


if __name__ == "__main__":
    main()
