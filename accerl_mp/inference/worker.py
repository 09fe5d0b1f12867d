"""What an engine's workers can do beside vLLM's own: take weights, and leave their CUDA graphs."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from accerl_mp.weight_sync.receiver import WeightReceiver

if not current_platform.is_cpu():
    register_backend(AttentionBackendEnum.FLASH_ATTN, "accerl_mp.inference.bounds.BoundedBackend")


class EngineWorker(WeightReceiver):
    """vLLM mixes it into its worker class; each method is an RPC between two steps."""

    def graphs_on(self, is_on: bool) -> None:
        """Replay CUDA graphs, or run every step without. Nothing where there are none."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if getattr(runner, "cudagraph_manager", None) is not None:  # vllm/v1/worker/gpu
            runner.cudagraph_manager._graphs_captured = is_on
        elif getattr(runner, "cudagraph_dispatcher", None) is not None:
            runner.cudagraph_dispatcher.keys_initialized = is_on
