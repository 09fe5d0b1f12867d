"""The trainer alone, on recorded samples: `torchrun --nproc-per-node 2 -m accerl_mp.trainer --replay-samples RUN/samples`."""

import sys

from accerl_mp.trainer.replayed import main
from accerl_mp.transport.process import exit_now

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
