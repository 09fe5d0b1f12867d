"""A real run whose inference processes are bench/watched_inference.py; everything else is what launch.sh starts.

python -m bench.watched_run start FLAGS...         instead of `bash launch.sh FLAGS...`
(torchrun) -m bench.watched_run --run-dir DIR      a trainer rank; rank 0 forks the supervisor
"""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from accerl_mp import log
from accerl_mp.config import Config
from accerl_mp.launcher.environment import gpu_plan
from accerl_mp.launcher.roles import Role, build_roles
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.topology import RunPaths

_WATCHED = Path(__file__).with_name("watched_inference.py")


def start(words: list[str]) -> None:
    """Prepare, then the launcher: exits with the run's code."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        prepare = [sys.executable, "-m", "accerl_mp.launcher.prepare", "--answer", str(answer), "--", *words]
        if code := subprocess.run(prepare, check=False).returncode:
            sys.exit(code)
        named = dict(word.split("=", 1) for line in answer.read_text().splitlines() for word in shlex.split(line))
    from accerl_mp.launcher.torchrun import Launcher, torchrun_flags

    flags = torchrun_flags(int(named["NPROC"]), named["RDZV_ENDPOINT"])
    sys.exit(Launcher(RunPaths(Path(named["RUN_DIR"])), flags, module="bench.watched_run").run())


def roles(run_dir: Path) -> list[Role]:
    config, paths = Config.load(run_dir / "args.json"), RunPaths(run_dir)
    watched = [sys.executable, str(_WATCHED)]
    return [replace(role, command=watched) if role.name == "inference" else role for role in build_roles(config, paths, gpu_plan(config))]


def main(words: list[str]) -> None:
    if words[0] == "start":
        start(words[1:])
    run_dir = Path(words[words.index("--run-dir") + 1])
    rank = int(os.environ.get("RANK", "0"))
    log.keep_terminal()
    supervisor_pid = fork_supervisor(run_dir, roles(run_dir)) if rank == 0 else None

    from accerl_mp.launcher.rank import run_rank

    run_rank(run_dir, rank, supervisor_pid)


if __name__ == "__main__":
    main(sys.argv[1:])
