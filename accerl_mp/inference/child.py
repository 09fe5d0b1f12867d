"""Runs first in every process that vLLM spawns: it dies with whoever started it, can show its stacks, and leaves cores to others.

vLLM's own processes outlive a front that is killed (measured: EngineCore and worker lived on under pid 1), so each asks the
kernel for the end itself. See `__main__.py` for how this module gets there.
"""

import faulthandler
import os
import signal
import time

from accerl_mp.transport.process import die_with_parent

die_with_parent()
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)

_SPIN_S, _NAP_S = 2e-3, 1e-4


class _Patience:
    """Called between two looks for another process: spins for 2 ms, then naps, 0.15 ms each with what the kernel adds."""

    def __init__(self) -> None:
        self._since = self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > _SPIN_S:  # nobody has waited meanwhile
            self._since = now
        if now - self._since < _SPIN_S:
            os.sched_yield()
        else:
            time.sleep(_NAP_S)
        self._last = time.monotonic()


def _nap_instead_of_spinning() -> None:
    """On CPU: let EngineCore and worker sleep between two looks for each other.

    vLLM looks into shared memory without a pause, for up to a second: EngineCore took 97 % of a core while its worker computed a
    step of 65 ms. A GPU's host has cores for that; here they train and carry the weights. Short steps are waited for as before.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = _Patience()


_nap_instead_of_spinning()
