"""An inference process whose workers forget to pack a tied LM head again after a reload: what the probe is there for."""

import importlib.util

from accerl_mp.inference import __main__ as inference
from accerl_mp.inference import engine
from accerl_mp.transport.process import run_process
from accerl_mp.weight_sync import receiver

__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


class ForgetfulReceiver(receiver.WeightReceiver):
    """vLLM mixes it into its worker, in the worker's own process."""

    def sync_swap(self, version: int) -> dict:
        receiver._repack_tied_head = lambda model: None  # type: ignore[assignment]
        return super().sync_swap(version)


if __name__ == "__main__":
    arguments = engine.engine_arguments
    extension = {"worker_extension_cls": "faulty_inference.ForgetfulReceiver"}
    engine.engine_arguments = lambda config, replica: arguments(config, replica) | extension
    run_process("inference", inference.main)
