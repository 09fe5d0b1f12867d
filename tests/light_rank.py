"""Trainer rank 0 of a run without torch and vLLM: `python -m tests.light_rank --run-dir DIR`.

It forks the real supervisor with the real rollouts, ingest and stats; beside it a thread answers their turns, and its main loop
takes samples out of its ring as a trainer would, a "push" a step. Every trained episode is a line in DIR/trained.txt.
"""

import re
import sys
import time
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.launcher.environment import gpu_plan
from accerl_mp.launcher.rank import run_rank
from accerl_mp.launcher.roles import Role, build_roles
from accerl_mp.launcher.supervisor import fork_supervisor
from accerl_mp.topology import RunPaths
from accerl_mp.transport.process import Process

BATCH = 6
REPLIES_S = 0.01


def roles(run_dir: Path) -> list[Role]:
    paths = RunPaths(run_dir)
    config = Config.load(paths.args)
    return [role for role in build_roles(config, paths, gpu_plan(config)) if role.name != "inference"]


def main(process: Process) -> None:
    import numpy as np

    from accerl_mp.rollout.tokenizer import Tokenizer
    from accerl_mp.transport.ring import SharedRing
    from tests.fake_peers import FakeInference, reply_fields

    tokenizer = Tokenizer.load(process.paths.tokenizer)

    def answer(request: dict, number: int) -> dict:
        time.sleep(REPLIES_S)
        commands = re.findall(r"^- (.*)$", tokenizer.decode(np.frombuffer(request["prompt"], np.int32).tolist()), re.MULTILINE)
        if (process.paths.run_dir / "mute").exists():
            return reply_fields([0, 1, 255, 299, 10**6], version=process.board.get("policy_version"))
        command = commands[(request["episode_id"] + number) % len(commands)] if commands else "look"
        return reply_fields(tokenizer.encode(command + "<|im_end|>"), version=process.board.get("policy_version"))

    inference = FakeInference(process.paths, answer).start()
    process.board.set("policy_version", 0)
    path = process.paths.ring(0)
    with process.health.waiting("ingest/0 to make ring/0", 60) as wait:
        while not path.exists():
            wait.check()
            time.sleep(0.01)
    ring, trained = SharedRing.attach_reader(path), (process.paths.run_dir / "trained.txt").open("a", buffering=1)
    process.health.set_state("running")
    try:
        with process.health.waiting("ring/0 to hold samples", 0) as wait:
            while not (process.paths.run_dir / "finish").exists():
                wait.check()
                if not (process.paths.run_dir / "pause").exists():
                    _train(process, ring, trained)
                time.sleep(0.005)
        process.board.set("finished", 1)
    finally:
        inference.stop()
        ring.close()


def _train(process: Process, ring: object, trained: object) -> None:
    ready = ring.ready()  # type: ignore[attr-defined]
    if len(ready) < BATCH:
        ring.num_wanted = BATCH  # type: ignore[attr-defined]
        return
    ring.num_wanted = 0  # type: ignore[attr-defined]
    for record in ready[:BATCH]:
        sample = ring.read(record)  # type: ignore[attr-defined]
        trained.write(f"{sample.episode_id}\n")  # type: ignore[attr-defined]
        ring.mark_used(record)  # type: ignore[attr-defined]
        ring.release(record, "trained")  # type: ignore[attr-defined]
    step = process.board.get("optimizer_step") + 1
    process.board.set("optimizer_step", step)
    process.board.set("saved_step", step)  # it learns nothing, so nothing can be lost
    process.board.set("round_step", step)
    process.board.set("round_used", step * BATCH)
    process.board.set("policy_version", step)
    process.sender.round({"step": step, "version": step, "round": step, "values": {"Train/Loss": 0.5}})  # type: ignore[attr-defined]


def run(process: Process) -> None:
    from accerl_mp.transport.channels import MetricsSender

    process.sender = MetricsSender(process.paths, process.name)  # type: ignore[attr-defined]
    try:
        main(process)
    finally:
        process.sender.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    run_rank(run_dir, 0, fork_supervisor(run_dir, roles(run_dir)), run)
