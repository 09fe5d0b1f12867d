"""Which processes a run has beside the trainer ranks, and how each is started and ended. Standard library only."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from accerl_mp.config import Config
from accerl_mp.launcher.environment import role_environment, vllm_places
from accerl_mp.topology import GpuPlan, RunPaths


@dataclass(frozen=True)
class Role:
    """All processes of one kind. The supervisor starts `command --run-dir DIR --index N` for each index."""

    name: str
    count: int
    command: list[str]
    environment: Callable[[int], dict[str, str]]
    """Index -> all variables of that process."""
    stop_timeout_s: float
    """From SIGTERM to SIGKILL."""
    start_timeout_s: float
    """In state `starting`."""
    start_flag: str = ""
    """The flag that sets `start_timeout_s`."""

    @property
    def names(self) -> list[str]:
        return [f"{self.name}/{index}" for index in range(self.count)]


def build_roles(config: Config, paths: RunPaths, plan: GpuPlan) -> list[Role]:
    """In the order in which they are ended: who produces goes first, who records goes last. Started in reverse."""

    def role(name: str, count: int, stop_timeout_s: float, start_timeout_s: float = 120.0, start_flag: str = "") -> Role:
        def environment(index: int) -> dict[str, str]:
            chosen = role_environment(name, index, config=config, plan=plan, base=os.environ)
            return chosen | (vllm_places(paths.sockets, config, chosen) if name == "inference" else {})

        command = [sys.executable, "-m", f"accerl_mp.{name}"]
        return Role(name, count, command, environment, stop_timeout_s, start_timeout_s, start_flag)

    return [
        role("rollout", config.run.num_rollout_workers or 1, config.run.rollout_stop_timeout),
        role(
            "inference", config.inference.infer_size or 1, 10.0, config.inference.inference_start_timeout_s, "--inference-start-timeout-s"
        ),
        role("ingest", 1, 5.0),
        role("stats", 1, 15.0),  # it waits for the trainer's last round
    ]


def table_names(config: Config, roles: list[Role]) -> list[str]:
    """Every row of the health table."""
    ranks = [f"trainer/{rank}" for rank in range(config.run.fsdp_world_size or 1)]
    return ["supervisor/0", *ranks, *(name for role in roles for name in role.names)]
