"""A trainer rank: `torchrun --nproc-per-node N -m accerl_mp.launcher --run-dir DIR`. Rank 0 first forks the supervisor."""

import os
import sys
from pathlib import Path

from accerl_mp import log
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.topology import RunPaths

if __name__ == "__main__":
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and RunPaths(run_dir).stop.exists():  # asked to end before it has begun; the other ranks see that no table comes
        sys.exit(0)
    log.keep_terminal()
    # Before anything beyond the standard library is imported: threads do not survive a fork, their locks do.
    supervisor_pid = fork_supervisor(run_dir) if rank == 0 else None

    from accerl_mp.launcher.rank import run_rank

    run_rank(run_dir, rank, supervisor_pid)
