"""vLLM in process: token ids in, token ids out. What differs between vLLM 0.24 and 0.32 is listed in weight_sync/receiver.py.

The engine's loop and its workers are processes of their own; what is here is vLLM's asynchronous front. It must be started from
the main thread: its processes die with the thread that started them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import vllm
import vllm.exceptions
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from accerl_mp.config import Config
from accerl_mp.inference.order import OutputOrder
from accerl_mp.inference.supported import warning_of
from accerl_mp.model_folder import CPU_KV_CACHE_GIB

_CPU_BLOCK_SIZE = 32
"""Tokens of a KV block: vLLM's CPU default of 128 would share almost nothing of a prompt of 170 tokens."""

_STOP_S = 1.0
"""Grace of vLLM's processes at the end. They have nothing to save, and left alone they take 6 s to take themselves apart."""

_VLLM_ERROR = getattr(vllm.exceptions, "VLLMError", ValueError)

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """vLLM refused or lost a request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What vLLM made of one request."""

    ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    """Of the distribution that was sampled from."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""


class Engine:
    """One vLLM engine with dummy weights until the first push."""

    def __init__(self, llm: AsyncLLM, stop_ids: list[int], *, num_workers: int, max_model_len: int) -> None:
        self._llm = llm
        self._stop_ids = stop_ids
        self.num_workers = num_workers
        self.max_model_len = max_model_len
        self._outputs = OutputOrder(llm)
        self._vocab_size = llm.model_config.get_vocab_size()

    @classmethod
    def start(cls, config: Config, stop_ids: list[int], *, replica: int = 0, load_format: str = "dummy") -> "Engine":
        """Start vLLM's processes and wait until they are ready. Holds this thread: 25 s here, longer where vLLM compiles.

        load_format: "dummy" for weights that a push will bring, "auto" for those of the model's folder
        """
        if warning := warning_of(vllm.__version__):
            _log.warning(warning)
        start = time.monotonic()
        arguments = engine_arguments(config, replica) | {"load_format": load_format}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        _log.info("vLLM %s is ready after %.1f s", vllm.__version__, time.monotonic() - start)
        return cls(llm, stop_ids, num_workers=config.inference.infer_tp_size, max_model_len=arguments["max_model_len"])

    async def generate(
        self, key: str, ids: list[int], *, max_tokens: int, temperature: float, salt: str, top_p: float = 1.0, seed: int | None = None
    ) -> Generation:
        """Sample a reply to `ids`. `key` names the request in the workers' reports. EngineError if vLLM refuses it.

        seed: of this reply's own sampling; None: the engine's
        waits for      vLLM, without a limit: the caller's own deadline, or the engine's death (EngineError), ends it
        """
        with _refusals():
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop_token_ids=self._stop_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        output = await self._submit(key, ids, params, salt)
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            raise EngineError("vLLM ended the request with an error; see the log")
        logprobs = completion.logprobs
        return Generation(
            ids=list(completion.token_ids),
            logprobs=logprobs.logprobs if logprobs else [],
            finish_reason=completion.finish_reason,
            num_cached_tokens=output.num_cached_tokens or 0,
        )

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
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._llm.engine_core.resume_scheduler_async()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """An RPC of weight_sync/receiver.py on every worker, between two steps of the engine. EngineError if one fails there."""
        # vLLM raises a plain Exception, whatever it was there.
        (answer,) = await asyncio.gather(self._llm.collective_rpc(method, args=args), return_exceptions=True)
        if isinstance(answer, asyncio.CancelledError):
            raise answer
        if isinstance(answer, BaseException):
            raise EngineError(f"{method} failed in a worker: {answer}") from answer
        return answer

    @contextlib.asynccontextmanager
    async def swapped(self, version: int) -> AsyncIterator[tuple[list[dict[str, Any]], dict[str, int]]]:
        """Swap the weights between two steps. Gives (each worker's report, {our key: its output tokens at that moment}).

        Inside the block every output that was made before the swap has reached its request and none that was made after it,
        whether generation goes on or not. So what the worker does not know of has either not begun, or was put back by the
        scheduler: then what has arrived is what there is.
        """
        with self._outputs.held():
            reports = await self.call_workers("sync_swap", version)
            counts = (await self.call_workers("sync_counts"))[0]
            await self._outputs.let_through(until=min(report["time"] for report in reports))
            arrived = {key: state.detokenizer.num_output_tokens() for key, state in self._llm.output_processor.request_states.items()}
            yield reports, {self.key_of(key): count for key, count in (arrived | counts).items()}

    @staticmethod
    def key_of(internal_id: str) -> str:
        """Our own key in vLLM's internal request id, which is the key plus a random suffix."""
        return internal_id.rpartition("-")[0]

    @property
    def is_dead(self) -> bool:
        return self._llm.errored

    def close(self) -> None:
        """End vLLM's processes: asked first, then killed."""
        self._llm.shutdown(timeout=_STOP_S)

    async def _submit(self, key: str, ids: list[int], params: SamplingParams, salt: str) -> Any:
        self._check(ids)
        # One level below AsyncLLM.generate(), which wraps the same two calls in a generator.
        with _refusals():
            collector = await self._llm.add_request(key, tokens_input(ids, cache_salt=salt), params)
            return await collector.get()

    def _check(self, ids: list[int]) -> None:
        """What vLLM does not check for prompts of ids: a long one would wait for ever, an unknown id kill the worker."""
        if not 0 < len(ids) < self.max_model_len:
            raise EngineError(f"a prompt of {len(ids)} tokens: vLLM takes 1 to {self.max_model_len - 1} (--vllm-max-model-len)")
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise EngineError(f"token ids must be below {self._vocab_size} and not negative, got {min(ids)} to {max(ids)}")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """vLLM's own errors as EngineError."""
    try:
        yield
    except EngineDeadError as error:
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
        "worker_extension_cls": "accerl_mp.weight_sync.receiver.WeightReceiver",
        "disable_log_stats": True,
    }
    if is_cpu:
        kv_cache_bytes = int((inference.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30)
        return arguments | {"kv_cache_memory_bytes": kv_cache_bytes, "block_size": _CPU_BLOCK_SIZE}
    if inference.kv_cache_gib:  # vLLM then measures nothing, which a trainer on the same card would disturb
        arguments["kv_cache_memory_bytes"] = int(inference.kv_cache_gib * 2**30)
    return arguments | {"gpu_memory_utilization": inference.gpu_memory_utilization}
