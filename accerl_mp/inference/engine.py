"""vLLM in process: token ids in, token ids out. What differs between vLLM 0.24 and 0.32 is listed in weight_sync/receiver.py.

The engine's loop and its workers are processes of their own; what is here is vLLM's asynchronous front. It must be started from
the main thread: its processes die with the thread that started them.
"""

import asyncio
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any

import numpy as np
import vllm
import vllm.exceptions
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from accerl_mp.config import Config
from accerl_mp.inference.graphs import WHOLE, graph_arguments
from accerl_mp.inference.order import OutputOrder
from accerl_mp.inference.replies import EngineLost, Generation
from accerl_mp.inference.supported import warning_of
from accerl_mp.model_folder import CPU_KV_CACHE_GIB
from accerl_mp.transport.process import spawns
from accerl_mp.transport.shared_files import descendants, remove, used_by

_BLOCK_SIZE = {"cpu": 32, "gpu": 64}
"""Tokens of a KV block. vLLM's CPU default of 128 would share almost nothing of a prompt of 170 tokens; its GPU default of 16 has
four times as many blocks to hash (75 us for 1,000 tokens in blocks of 16, 27 in blocks of 64, at every request) and to keep books of."""

_STOP_S = 1.0
"""Grace of vLLM's processes at the end. They have nothing to save, and left alone they take 6 s to take themselves apart."""

_LOOK_S = 0.001
"""Between two looks at whether a swap has come to its end on the device."""

_VLLM_ERROR = getattr(vllm.exceptions, "VLLMError", ValueError)

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """vLLM refused or lost a request."""


class Engine:
    """One vLLM engine with dummy weights until the first push."""

    def __init__(self, llm: AsyncLLM, stop_ids: list[int], *, num_workers: int, max_model_len: int, has_whole_graphs: bool) -> None:
        self._llm = llm
        self._stop_ids = stop_ids
        self.num_workers = num_workers
        self.max_model_len = max_model_len
        self.has_whole_graphs = has_whole_graphs
        self._processes: set[int] = set()
        """Pids of vLLM's processes."""
        self._outputs = OutputOrder(llm)
        self.vocab_size = llm.model_config.get_vocab_size()
        self._numbers = itertools.count()
        self._templates: dict[tuple[int, float, float], Any] = {}
        """Requests as vLLM makes them of these settings, to be copied."""

    @classmethod
    def start(
        cls, config: Config, stop_ids: list[int], *, replica: int = 0, load_format: str = "dummy", whole_graphs: bool = True
    ) -> "Engine":
        """Start vLLM's processes and wait until they are ready. Holds this thread: 25 s here, longer where vLLM compiles.

        load_format: "dummy" for weights that a push will bring, "auto" for those of the model's folder
        whole_graphs: where they can be; who takes them asks a `graphs.GraphGuard` before it generates
        """
        if warning := warning_of(vllm.__version__):
            _log.warning(warning)
        spawns()
        start, others = time.monotonic(), set(descendants())
        arguments = engine_arguments(config, replica) | {"load_format": load_format}
        if not whole_graphs:
            arguments = {name: value for name, value in arguments.items() if name not in WHOLE}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        _log.info("vLLM %s is ready after %.1f s", vllm.__version__, time.monotonic() - start)
        shape = {"num_workers": config.inference.infer_tp_size, "max_model_len": arguments["max_model_len"]}
        engine = cls(llm, stop_ids, **shape, has_whole_graphs="compilation_config" in arguments)
        engine._processes = set(descendants()) - others  # those of an engine that this process has beside it are not this one's
        return engine

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | np.ndarray,
        *,
        max_tokens: int,
        temperature: float,
        salt: str,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generation:
        """Sample a reply to `ids`. `key` names the request in the workers' reports. EngineError if vLLM refuses it.

        seed: of this reply's own sampling; None: the engine's
        waits for      vLLM, without a limit: the caller's own deadline, or the engine's death (EngineError), ends it
        """
        array = np.asarray(ids)
        self._check(array)
        with _refusals():
            request = await self._request(array.tolist(), salt, max_tokens, temperature, top_p, seed)
            request.external_req_id, request.request_id = key, f"{key}-{next(self._numbers)}"
            reply = self._outputs.replies.expect(request.request_id)
            try:
                self._llm._run_output_handler()
                await self._llm.engine_core.add_request_async(request)
                made = await reply
            finally:
                self._outputs.replies.forget(request.request_id)
        if made.finish_reason == "error":
            raise EngineError("vLLM ended the request with an error; see the log")
        return made

    async def forced_logprobs(self, key: str, ids: list[int]) -> list[float]:
        """Logprob of each of `ids` given those before it; 0 for the first."""
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        output = await self._submit(key, ids, params, salt=key)
        return [0.0, *output.prompt_logprobs.logprobs]

    async def pause(self, *, mode: str, clear_cache: bool) -> None:
        """Stand still between two steps. `keep`: requests stay as they are; `abort`: they end with what they have.

        Not AsyncLLM.pause_generation: that sleeps 20 ms on top.
        """
        core = self._llm.engine_core
        if mode == "abort":
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
            await _answer_of("give_outputs", core.call_utility_async("give_outputs"))
        await core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._llm.engine_core.resume_scheduler_async()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """An RPC of weight_sync/receiver.py on every worker, between two steps of the engine. EngineError if one fails there."""
        return await _answer_of(method, self._llm.collective_rpc(method, args=args))

    @contextlib.asynccontextmanager
    async def swapped(self, version: int) -> AsyncIterator[tuple[list[dict[str, Any]], dict[str, int]]]:
        """Swap the weights between two steps. Gives (each worker's report, {our key: its output tokens at that moment}).

        Inside the block every reply that was over before the swap has reached its request and none that was over after it,
        whether generation goes on or not. What the worker does not know of has either not begun, or was put back by the scheduler:
        that knows how many tokens it has.
        """
        with self._outputs.held():
            reports, made = await _answer_of("sync_swap", self._llm.engine_core.call_utility_async("swap_weights", version))
            while (counts := (await self.call_workers("sync_counts"))[0]) is None:
                await asyncio.sleep(_LOOK_S)
            await self._outputs.let_through(until=min(report["time"] for report in reports))
            yield reports, {self.key_of(key): count for key, count in (made | counts).items()}

    @staticmethod
    def key_of(internal_id: str) -> str:
        """Our own key in vLLM's internal request id, which is the key plus a random suffix."""
        return internal_id.rpartition("-")[0]

    @property
    def is_dead(self) -> bool:
        return self._llm.errored

    def close(self) -> None:
        """End vLLM's processes: asked first, then killed. What its CPU workers share goes too: vLLM leaves that where it kills them."""
        shared = used_by(self._processes & set(descendants()))
        self._llm.shutdown(timeout=_STOP_S)
        remove(shared)

    async def _request(self, ids: list[int], salt: str, max_tokens: int, temperature: float, top_p: float, seed: int | None) -> Any:
        """An EngineCoreRequest. vLLM makes and checks the first of its settings, the others are copies: 3 us instead of 60."""
        settings = (max_tokens, temperature, top_p)
        if seed is not None or settings not in self._templates:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop_token_ids=self._stop_ids,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            tasks, llm = await self._llm.get_supported_tasks(), self._llm
            made = llm.input_processor.process_inputs("", tokens_input(ids, cache_salt=salt), params, supported_tasks=tasks)
            if seed is not None:
                return made
            self._templates[settings] = made
        request = copy.copy(self._templates[settings])
        request.prompt_token_ids, request.cache_salt, request.arrival_time = ids, salt, time.time()
        return request

    async def _submit(self, key: str, ids: list[int], params: SamplingParams, salt: str) -> Any:
        self._check(np.asarray(ids))
        # One level below AsyncLLM.generate(), which wraps the same two calls in a generator.
        with _refusals():
            collector = await self._llm.add_request(key, tokens_input(ids, cache_salt=salt), params)
            return await collector.get()

    def _check(self, ids: np.ndarray) -> None:
        """What vLLM does not check for prompts of ids: a long one would wait for ever, an unknown id kill the worker."""
        if not 0 < len(ids) < self.max_model_len:
            raise EngineError(f"a prompt of {len(ids)} tokens: vLLM takes 1 to {self.max_model_len - 1} (--vllm-max-model-len)")
        lowest, highest = int(ids.min()), int(ids.max())
        if not 0 <= lowest <= highest < self.vocab_size:
            raise EngineError(f"token ids must be below {self.vocab_size} and not negative, got {lowest} to {highest}")


async def _answer_of(method: str, call: Awaitable[Any]) -> Any:
    """Of a call into vLLM's loop. It raises a plain Exception, whatever it was there: EngineError."""
    (answer,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(answer, asyncio.CancelledError):
        raise answer
    if isinstance(answer, BaseException):
        raise EngineError(f"{method} failed in vLLM: {answer}") from answer
    return answer


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """vLLM's own errors as EngineError."""
    try:
        yield
    except (EngineDeadError, EngineLost) as error:
        raise EngineError("vLLM's engine has died; see the log") from error
    except (_VLLM_ERROR, ValueError) as error:  # 0.24 refuses with ValueErrors
        raise EngineError(f"vLLM refused it: {error}") from error


def engine_arguments(config: Config, replica: int) -> dict[str, Any]:
    """AsyncEngineArgs of a resolved Config."""
    model, inference = config.model, config.inference
    is_cpu = config.run.placement == "cpu"
    dtype = model.dtype if model.dtype != "auto" else ("float32" if is_cpu else "bfloat16")
    arguments = {
        "model": model.model_path,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the folder's own would bring stop tokens and sampling defaults of its own
        "dtype": dtype,
        "seed": config.run.seed + replica,
        "max_model_len": inference.vllm_max_model_len,
        "max_num_seqs": inference.vllm_max_num_seqs,
        "max_num_batched_tokens": max(inference.vllm_max_num_batched_tokens, inference.vllm_max_num_seqs),
        "enable_prefix_caching": not inference.disable_vllm_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": inference.infer_tp_size,
        "enable_expert_parallel": inference.enable_expert_parallel,
        "enforce_eager": inference.enforce_eager or is_cpu,
        "worker_extension_cls": "accerl_mp.inference.worker.EngineWorker",
        "scheduler_cls": "accerl_mp.inference.scheduler.make_scheduler",
        "disable_log_stats": True,
        "block_size": _BLOCK_SIZE["cpu" if is_cpu else "gpu"],
    }
    if is_cpu:
        return arguments | {"kv_cache_memory_bytes": int((inference.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30)}
    if inference.kv_cache_gib:  # vLLM then measures nothing, which a trainer on the same card would disturb
        arguments["kv_cache_memory_bytes"] = int(inference.kv_cache_gib * 2**30)
    if not arguments["enforce_eager"]:
        arguments |= graph_arguments(inference, vllm.__version__, arguments["max_num_batched_tokens"])
    return arguments | {"gpu_memory_utilization": inference.gpu_memory_utilization}
