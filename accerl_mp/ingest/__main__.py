"""The ingest process: between the rollouts and the trainer ranks' rings.

python -m accerl_mp.ingest --run-dir DIR
"""

from accerl_mp.ingest.loop import Ingest
from accerl_mp.transport.process import Process, run_process


def main(process: Process) -> None:
    Ingest(process).run()


if __name__ == "__main__":
    run_process("ingest", main)
