"""What an engine's workers can do beside vLLM's own: take weights, and leave their CUDA graphs."""

from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from accerl_mp.inference.graphs import is_measured
from accerl_mp.inference.seeds import rewind_what_is_discarded
from accerl_mp.weight_sync.receiver import WeightReceiver

if is_measured(vllm.__version__) and not current_platform.is_cpu():
    register_backend(AttentionBackendEnum.FLASH_ATTN, "accerl_mp.inference.bounds.BoundedBackend")

if current_platform.is_cpu():
    rewind_what_is_discarded()

_SWITCHES = (("cudagraph_manager", "_graphs_captured"), ("cudagraph_dispatcher", "keys_initialized"))
"""What vLLM's two model runners ask before each step."""


class EngineWorker(WeightReceiver):
    """vLLM mixes it into its worker class; each method is an RPC between two steps."""

    def graphs_on(self, is_on: bool) -> bool:
        """Replay CUDA graphs, or run every step without. False: this vLLM has no such switch."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        for chooser, switch in _SWITCHES:
            if hasattr(getattr(runner, chooser, None), switch):
                setattr(getattr(runner, chooser), switch, is_on)
                return True
        return False
