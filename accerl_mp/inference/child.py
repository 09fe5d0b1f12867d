"""Runs first in every process that vLLM spawns: it dies with whoever started it, can show its stacks, and leaves cores to others.

vLLM's own processes outlive a front that is killed (measured: EngineCore and worker lived on under pid 1), so each asks the
kernel for the end itself. See `__main__.py` for how this module gets there.
"""

import faulthandler
import logging
import signal
import tempfile
import time

from accerl_mp.transport.process import die_with_spawner

die_with_spawner()
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)

# Of `scheduler.py`, which is taken on purpose, and schedules asynchronously where vLLM's own would.
logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in str(record.msg))

_SPIN_S, _NAP_S = 2e-3, 1e-4


def _settle_on_cpu() -> None:
    """vLLM leaves the file over which its CPU workers have met in the temporary folder: that of its sockets goes with the run."""
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        tempfile.tempdir = envs.VLLM_RPC_BASE_PATH
        _nap_instead_of_spinning()


def _nap_instead_of_spinning() -> None:
    """Let EngineCore and worker sleep between two looks for each other, 0.15 ms at a time with what the kernel adds.

    vLLM looks into shared memory without a pause, for a second after it last found something: EngineCore took 97 % of a core while
    its worker computed a step of 65 ms. A GPU's host has cores for that; here they train and carry the weights. For 2 ms it still
    spins, so that the steps of a tiny model take no longer.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def wait_patiently(self: SpinCondition, timeout_ms: int | None = None) -> None:
        if _SPIN_S < time.monotonic() - self.last_read <= self.busy_loop_s:
            time.sleep(_NAP_S)
        else:
            wait(self, timeout_ms)

    SpinCondition.wait = wait_patiently


_settle_on_cpu()
