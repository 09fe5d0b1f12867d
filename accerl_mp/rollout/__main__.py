"""A rollout process: plays the groups that ingest deals, with replies from inference. No torch.

python -m accerl_mp.rollout --run-dir DIR --index 3
"""

from accerl_mp.rollout.worker import Worker
from accerl_mp.transport.loop import run_loop
from accerl_mp.transport.process import Process, run_process


def main(process: Process) -> None:
    async def run() -> None:
        # Inside the loop: asyncio's sockets and semaphores belong to the loop that runs when they are made.
        await Worker(process).run()

    run_loop(run())


if __name__ == "__main__":
    run_process("rollout", main)
