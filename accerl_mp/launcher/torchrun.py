"""torchrun for one run: `python -m accerl_mp.launcher.torchrun --run-dir DIR --nproc-per-node N --rdzv-endpoint HOST:PORT`.

torchrun's own talk goes to DIR/logs/torchrun.log; its ranks inherit the terminal.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser("accerl_mp.launcher.torchrun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--rdzv-endpoint", default="127.0.0.1:0")
    args = parser.parse_args()
    log_file = args.run_dir / "logs" / "torchrun.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # Python's streams only: the descriptors 1 and 2 stay the terminal, for the ranks.
    sys.stdout = sys.stderr = log_file.open("a", buffering=1)
    os.environ["OMP_NUM_THREADS"] = "1"  # else torchrun warns; ranks choose their own
    sys.argv = ["torchrun", *torchrun_flags(args.nproc_per_node, args.rdzv_endpoint)]
    sys.argv += ["-m", "accerl_mp.launcher", "--run-dir", str(args.run_dir)]
    runpy.run_module("accerl_mp.trainer.loopback", run_name="__main__")


def torchrun_flags(num_ranks: int, endpoint: str) -> list[str]:
    """One machine; a port of 0 lets torchrun choose a free one."""
    host = endpoint.rpartition(":")[0]
    # With the address given, torchrun does not resolve the machine's host name, which a container need not know.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", host]
    return ["--nnodes", "1", "--nproc-per-node", str(num_ranks), "--max-restarts", "0", *rendezvous]


if __name__ == "__main__":
    main()
