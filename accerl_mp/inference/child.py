"""Runs first in every process that vLLM spawns: it dies with whoever started it, and can show its stacks.

vLLM's own processes outlive a front that is killed (measured: EngineCore and worker lived on under pid 1), so each asks the
kernel for the end itself. See `__main__.py` for how this module gets there.
"""

import faulthandler
import signal

from accerl_mp.transport.process import die_with_parent

die_with_parent()
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)
