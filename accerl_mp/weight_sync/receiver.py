"""vLLM's side of a push: a worker extension. vLLM mixes `WeightReceiver` into its worker class and calls it by `collective_rpc`.

An RPC runs in EngineCore's own loop, between two steps: while it lasts no token is generated. So nothing here blocks but the swap:
forming the group and receiving are done by a thread, into staging memory, while vLLM generates from the old weights.

What differs between vLLM 0.24 and 0.32, all of it (the rest of this project knows one vLLM):

| what | 0.24 | 0.32 | where |
|---|---|---|---|
| tokens of a request | on GPU `req_states` (vllm/v1/worker/gpu) or `requests`, by model | `requests` on CPU | `TokenCounts` |
| a tied LM head in a reload | (not run on CPU) | keeps its packed dummy weights on CPU | `_repack_tied_head` |
| CUDA graphs of steps with prompts | whole, lengths bounded | vLLM's own (not compared) | inference/graphs.py, bounds.py |
| a refused request raises | ValueError | VLLMError | inference/engine.py, `_VLLM_ERROR` |
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from accerl_mp.weight_sync.group import GroupAddress
from accerl_mp.weight_sync.incoming import Incoming, Staging, Weights
from accerl_mp.weight_sync.layout import Manifest, Runs
from accerl_mp.weight_sync.swap import Swap


class WeightReceiver:
    """The RPCs. Each returns plain values (they cross two processes) and, `sync_swap` aside, at once."""

    def sync_connect(self, address: dict[str, Any], first_rank: int) -> None:
        """Start to join the weight group as rank `first_rank` + this worker's own; leaves a group it was in before."""
        state = _state_of(self)
        state.incoming.abort()
        state.incoming = Incoming(state.device, state.incoming)
        state.incoming.start_connect(GroupAddress(**address), first_rank + self.rank)  # type: ignore[attr-defined]

    def sync_layout(self, manifest: Manifest, bucket_bytes: int, is_staged: bool, wanted_swap: str) -> None:
        """Make room for pushes of this model, if there is none yet."""
        state = _state_of(self)
        staging = state.incoming.staging
        wanted = (manifest, bucket_bytes, is_staged)
        if staging is None or (staging.manifest, staging.bucket_bytes, staging.is_whole) != wanted:
            state.swap = None  # before the new memory: it holds the old
            state.incoming.staging = staging = None
            staging = Staging(manifest, bucket_bytes, is_whole=is_staged, device=state.device)
            state.incoming.staging = staging
        if state.swap is None or state.swap.wanted != wanted_swap:
            state.swap = Swap(wanted_swap, staging, self.model_runner.get_model(), _layerwise_loader(self))  # type: ignore[attr-defined]

    def sync_begin(self, version: int, runs: Runs, with_sums: bool) -> None:
        """Start to receive a push into staging; without whole staging straight into the model: the scheduler must be paused."""
        state = _state_of(self)
        state.incoming.start_receive(version, runs, state.load_at_once, with_sums=with_sums)

    def sync_poll(self) -> dict[str, Any]:
        """{"state", "version", "error"} of the thread."""
        return _state_of(self).incoming.report()

    def sync_checksums(self) -> dict[str, str]:
        """Checksum by name of every tensor that has arrived."""
        return _state_of(self).incoming.checksums()

    def sync_swap(self, version: int) -> dict[str, Any]:
        """Load staging into the model. Each step that was given to the device before computes with the old weights, each later one
        with the new: both are in the order of one stream. Returns {"time": time.monotonic(), "seconds", "path", "reason"}.
        """
        start, state = time.monotonic(), _state_of(self)
        weights = state.incoming.take(version)
        if weights is not None:
            state.load(weights)
        state.counts = TokenCounts(self.model_runner)  # type: ignore[attr-defined]
        end = time.monotonic()
        path, reason = (state.swap.path, state.swap.reason) if state.swap is not None else ("", "")
        return {"time": end, "seconds": end - start, "path": path, "reason": reason}

    def sync_counts(self) -> dict[str, int] | None:
        """{internal request id: its output tokens at the last swap}, and the swap is over; None while the device is not there yet."""
        state = _state_of(self)
        assert state.counts is not None
        return state.counts.read()

    def sync_abort(self) -> None:
        """Give up a push, and the group with it: a receive that is under way ends with an error."""
        _state_of(self).incoming.abort()


class _State:
    """What a worker keeps between RPCs."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.device = torch.device(worker.device)
        self.incoming = Incoming(self.device)
        self.swap: Swap | None = None
        self.counts: TokenCounts | None = None

    def load(self, weights: Weights) -> None:
        """Make them the model's, on the current stream. Each microsecond of it is one more between two steps."""
        assert self.swap is not None
        if self.swap.path == "captured":
            self.swap.load(weights)
            return
        with torch.no_grad(), set_current_vllm_config(self._worker.vllm_config):
            self.swap.load(weights)

    def load_at_once(self, weights: Weights) -> None:
        """Without staging: straight into the model, on a thread while the engine stands."""
        self.load(weights)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _state_of(worker: Any) -> _State:
    if not hasattr(worker, "weight_sync_state"):
        worker.weight_sync_state = _State(worker)
    return worker.weight_sync_state


def _layerwise_loader(worker: Any) -> Any:
    def load(weights: Weights) -> None:
        load_layerwise(worker, weights)

    return load


def load_layerwise(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Layerwise reload: works for every layout that a kernel gives its weights, packed CPU linears included."""
    model, config = worker.model_runner.get_model(), worker.vllm_config
    reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = reload_log.level
    reload_log.setLevel(logging.ERROR)  # a push of a part would warn for each layer that is not in it
    try:
        with torch.no_grad(), set_current_vllm_config(config), torch.device(worker.device), _packing_experts(model):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights)
            finally:
                finalize_layerwise_reload(model, worker.model_config)  # also after a failure, or the next reload would begin in its middle
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


class TokenCounts:
    """How many output tokens every request had at one moment between two steps, the step in flight included."""

    def __init__(self, model_runner: Any) -> None:
        """Waits for nothing: what is on the device is copied behind the step in flight, `read` waits for that."""
        self._counts: dict[str, int] = {}
        self._indices: dict[str, int] = {}
        if hasattr(model_runner, "requests"):
            self._counts = {key: len(state.output_token_ids) for key, state in model_runner.requests.items()}
            return
        states = model_runner.req_states  # the runner of vllm/v1/worker/gpu, which 0.24 uses for many models on GPUs
        self._indices = dict(states.req_id_to_index)
        self._prompts = states.prompt_len.np.copy()
        total = states.total_len.gpu
        self._totals = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
        self._totals.copy_(total, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> dict[str, int] | None:
        """By vLLM's internal request id; None until the device has come to that moment. Waits for nothing: the next step would."""
        if self._indices:
            if not self._copied.query():
                return None
            totals = self._totals.tolist()
            self._counts = {key: totals[index] - int(self._prompts[index]) for key, index in self._indices.items()}
        return self._counts
