"""vLLM's side of a push: a worker extension. vLLM mixes `WeightReceiver` into its worker class and calls it by `collective_rpc`.

An RPC runs in EngineCore's own loop: while it lasts no token is generated. So nothing here blocks but the swap: forming the
group and receiving are done by a thread, into staging memory, while vLLM generates from the old weights.
Everything that differs between vLLM 0.24 and 0.32 on this side is in this file.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from accerl_mp.weight_sync.group import GroupAddress, WeightGroup, join_group
from accerl_mp.weight_sync.layout import Slot, checksum, iter_messages, plan_layout
from accerl_mp.weight_sync.protocol import CONNECTING, FAILED, IDLE, READY, RECEIVED, RECEIVING


class WeightReceiver:
    """The RPCs. Each returns plain values (they cross two processes) and, `sync_swap` aside, at once."""

    def sync_connect(self, address: dict[str, Any], first_rank: int) -> None:
        """Start to join the weight group as rank `first_rank` + this worker's own; leaves a group it was in before."""
        self.weight_sync_state = Receiver(torch.device(self.device))  # type: ignore[attr-defined]
        self.weight_sync_state.start_connect(GroupAddress(**address), first_rank + self.rank)  # type: ignore[attr-defined]

    def sync_begin(self, version: int, manifest: list[Any], bucket_bytes: int) -> None:
        """Start to receive a push into staging."""
        self.weight_sync_state.start_receive(version, manifest, bucket_bytes)

    def sync_poll(self) -> dict[str, Any]:
        """{"state", "version", "error", "seconds"} of the thread."""
        return self.weight_sync_state.report()

    def sync_checksums(self) -> dict[str, str]:
        """Checksum by name of every tensor in staging."""
        return self.weight_sync_state.checksums()

    def sync_swap(self, version: int) -> dict[str, Any]:
        """Load staging into the model. The scheduler must be paused: the counts are exact only while nothing is generated.

        Returns {"num_tokens": {internal request id: output tokens that exist now}, "seconds"}.
        """
        start = time.monotonic()
        slots, staging = self.weight_sync_state.take(version)
        load_weights(self, [(slot.name, slot.view(staging)) for slot in slots])
        num_tokens = count_output_tokens(self.model_runner)  # type: ignore[attr-defined]
        return {"num_tokens": num_tokens, "seconds": time.monotonic() - start}

    def sync_abort(self) -> None:
        """Give up a push, and the group with it: a receive that is under way ends with an error."""
        if (state := getattr(self, "weight_sync_state", None)) is not None:
            state.abort()


class Receiver:
    """One worker's end of the weight group: at most one thread, one push, one staging buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: WeightGroup | None = None
        self._thread: threading.Thread | None = None
        self._state, self._error, self._seconds = IDLE, "", 0.0
        self._version = -1
        self._slots: list[Slot] = []
        self._num_bytes = 0
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def start_connect(self, address: GroupAddress, rank: int) -> None:
        def connect() -> None:
            self._group = join_group(address, rank, self._device)

        self._start(CONNECTING, READY, connect)

    def start_receive(self, version: int, manifest: list[Any], bucket_bytes: int) -> None:
        if self._state != READY:
            raise RuntimeError(f"push {version} cannot begin: this worker is {self._state} {self._error}".strip())
        self._slots, self._num_bytes = plan_layout(manifest)
        if len(self._staging) < self._num_bytes:
            self._staging = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        self._version = version

        def receive() -> None:
            for message in iter_messages(self._num_bytes, bucket_bytes):
                self._group.receive(self._staging[message])  # type: ignore[union-attr]

        self._start(RECEIVING, RECEIVED, receive)

    def report(self) -> dict[str, Any]:
        return {"state": self._state, "version": self._version, "error": self._error, "seconds": self._seconds}

    def checksums(self) -> dict[str, str]:
        self._expect_received(self._version)
        return {slot.name: checksum(slot.bytes_of(self._staging)) for slot in self._slots}

    def take(self, version: int) -> tuple[list[Slot], torch.Tensor]:
        """The slots and staging of a push that has arrived whole; the next may begin after this."""
        self._expect_received(version)
        self._state = READY
        return self._slots, self._staging

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._state = FAILED
        self._error = self._error or "the push was given up"

    def _expect_received(self, version: int) -> None:
        if self._state != RECEIVED or self._version != version:
            raise RuntimeError(f"push {version} has not arrived: this worker is {self._state} with {self._version} {self._error}".strip())

    def _start(self, during: str, after: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread. Waits for nothing; ends with the group's own timeout at the latest."""
        start = time.monotonic()

        def run() -> None:
            try:
                work()
            except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
                self._error = f"{type(error).__name__}: {error}"
                self._state = FAILED
            else:
                self._seconds = time.monotonic() - start
                # Last: the front acts as soon as it sees the state. Unless abort() came first.
                self._state = after if self._state == during else self._state

        self._state = during
        self._thread = threading.Thread(target=run, name=f"weights-{during}", daemon=True)
        self._thread.start()


def load_weights(worker: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Layerwise reload: works for every layout that a kernel gives its weights, packed CPU linears included."""
    model, config = worker.model_runner.get_model(), worker.vllm_config
    reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = reload_log.level
    reload_log.setLevel(logging.ERROR)  # a push of a part would warn for each layer that is not in it
    try:
        with torch.no_grad(), set_current_vllm_config(config), torch.device(worker.device), _packing_experts(model):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, worker.model_config)
            _repack_tied_head(model)
    finally:
        reload_log.setLevel(level)


@contextlib.contextmanager
def _packing_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let experts that are reloaded inside the block be packed for vLLM's CPU kernel, as when they were loaded first.

    vLLM packs them where it builds their kernel, which a reload skips: the kernel would read plain weights as packed ones (seen with
    0.32: a tiny Qwen3-MoE off by 1.6 nats a token). Without a kernel it builds a new one; experts that aren't reloaded keep theirs.
    """
    from vllm.platforms import current_platform

    methods = [getattr(module, "quant_method", None) for module in model.modules()] if current_platform.is_cpu() else []
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            method.moe_kernel = method.moe_kernel or kernel


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied LM head again on CPU.

    vLLM packs the head's weights for its CPU kernel when it loads them. A tied head gets none of its own in a reload, so
    it would keep the packed copy of the dummy weights (seen with 0.32: every logprob -log(vocabulary)).
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    embedding_weights = {id(m.weight) for n, m in model.named_modules() if n.endswith("embed_tokens")}
    for name, module in model.named_modules():
        if name.endswith("lm_head") and id(getattr(module, "weight", None)) in embedding_weights:
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def count_output_tokens(model_runner: Any) -> dict[str, int]:
    """Output tokens of every request that the model runner knows, by vLLM's internal id."""
    if hasattr(model_runner, "requests"):
        return {key: len(state.output_token_ids) for key, state in model_runner.requests.items()}
    states = model_runner.req_states  # the runner of vllm/v1/worker/gpu, which 0.24 uses on GPUs
    total, prompt = states.total_len.gpu.tolist(), states.prompt_len.np
    return {key: total[index] - int(prompt[index]) for key, index in states.req_id_to_index.items()}
