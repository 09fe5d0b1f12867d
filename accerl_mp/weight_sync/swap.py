"""How staging becomes the model's weights: three ways to the same bytes, the fastest of which has proved that it is one.

layerwise   vLLM's own reload, which runs each kernel's own processing again. Right for every model; the slowest.
plain       `model.load_weights` into the parameters as they are.
captured    that, recorded once as a CUDA graph over the staging memory, and replayed.

Proof: at the first push all three load the same staging, and every byte of every parameter and buffer must be the same after
each. What a path does not write shows, because the parameters are spoilt in between.
"""

import itertools
import logging
from collections.abc import Callable, Iterator

import torch

from accerl_mp.weight_sync.incoming import Staging, Weights

_NUM_BRANCHES = 8
"""Copies that may run side by side: many are too small to fill a GPU. 310 of them, 1.4 GiB, on an H200: 1.13 ms one behind the other,
0.73 ms in eight branches; a single copy of as many bytes takes 0.72."""

_log = logging.getLogger(__name__)


class SwapRefused(RuntimeError):
    """The way that `--sync-swap` asks for is none for this model here."""


class Swap:
    """One worker's. The first `load` decides, the others do it. Each runs between two steps of the engine, on its stream."""

    def __init__(self, wanted: str, staging: Staging, model: torch.nn.Module, load_layerwise: Callable[[Weights], None]) -> None:
        self.wanted, self._staging, self._model, self._load_layerwise = wanted, staging, model, load_layerwise
        self._graph: torch.cuda.CUDAGraph | None = None
        self.path = ""
        """"layerwise", "plain" or "captured"; empty before the first load."""
        self.reason = ""
        """Why this one."""

    def load(self, weights: Weights) -> None:
        """The first time: all weights. SwapRefused (the model then has them, layerwise) if the way asked for is none."""
        if not self.path:
            self._decide(weights)
            _log.info("weights are swapped %s: %s", self.path, self.reason)
        elif self._graph is not None:
            self._graph.replay()  # all of staging: what did not travel is as it was
        elif self.path == "plain":
            self._model.load_weights(weights)  # type: ignore[operator]
        else:
            self._load_layerwise(weights)

    def _decide(self, weights: Weights) -> None:
        candidates = self._candidates()
        if not self._staging.is_whole:
            self.path = candidates[0] if candidates else "layerwise"
            self.reason = "without staging no byte comparison is possible: only the probe judges it" if candidates else self.reason
            return self.load(weights)
        self._load_layerwise(weights)
        self.path = "layerwise"
        if candidates:
            self._prove(candidates)
        if self.wanted not in ("auto", self.path):
            wanted, self.path = self.wanted, ""
            raise SwapRefused(f"--sync-swap {wanted} does not do for this model: {self.reason}; leave it at auto")
        return None

    def _candidates(self) -> list[str]:
        """Worth a try beside layerwise, the slowest first."""
        on_gpu = next(self._model.parameters()).is_cuda
        if self.wanted == "layerwise":
            self.reason = "asked for by --sync-swap"
        elif not on_gpu:
            self.reason = "vLLM's CPU kernels pack their weights, which only a reload does again"
        elif not self._staging.is_whole:
            if self.wanted == "plain":
                return ["plain"]
            self.reason = "without staging nothing can be captured"
        else:
            return ["plain"] if self.wanted == "plain" else ["plain", "captured"]
        return []

    def _prove(self, candidates: list[str]) -> None:
        """Take the last candidate that leaves the same bytes as the reload that has just been done."""
        expected = [tensor.detach().to("cpu", copy=True) for _, tensor in self._tensors()]
        self.reason = ""
        for candidate in candidates:
            if self.reason:
                break
            difference = self._try(candidate, expected)
            if difference:
                self.reason = f"{candidate} {difference}"
                self._graph = None
                self._restore(expected)
            else:
                self.path = candidate
        self.reason = self.reason or "every byte of the model is the same as after a layerwise reload"

    def _try(self, candidate: str, expected: list[torch.Tensor]) -> str:
        """How it differs from a reload; empty if it does not."""
        self._spoil()
        try:
            if candidate == "captured":
                self._capture()
            else:
                self._model.load_weights(self._staging.weights)  # type: ignore[operator]
        except (RuntimeError, ValueError, AssertionError, KeyError, TypeError) as error:
            return f"fails: {type(error).__name__}: {str(error)[:200]}"
        for (name, tensor), right in zip(self._tensors(), expected, strict=True):
            if not torch.equal(_bytes(tensor), _bytes(right.to(tensor.device))):
                return f"leaves other bytes in {name} than a layerwise reload"
        return ""

    def _capture(self) -> None:
        """Record the copies out of staging. No receive may be under way: its calls would be recorded or refused."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            main = torch.cuda.current_stream()
            branches = [torch.cuda.Stream() for _ in range(_NUM_BRANCHES)]
            for branch in branches:
                branch.wait_stream(main)
            try:
                self._model.load_weights(_spread(self._staging.weights, branches))  # type: ignore[operator]
            finally:
                torch.cuda.set_stream(main)
                for branch in branches:
                    main.wait_stream(branch)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        self._graph = graph

    def _spoil(self) -> None:
        """Turn every bit of the parameters, so that one that is not loaded cannot pass."""
        for parameter in self._model.parameters():
            if parameter.numel():
                turned = _bytes(parameter).bitwise_not()
                parameter.detach().copy_(turned.view(parameter.dtype).view(parameter.shape))

    def _restore(self, expected: list[torch.Tensor]) -> None:
        for (_, tensor), right in zip(self._tensors(), expected, strict=True):
            tensor.detach().copy_(right)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(self._model.named_parameters(), self._model.named_buffers())


def _spread(weights: Weights, branches: list[torch.cuda.Stream]) -> Iterator[tuple[str, torch.Tensor]]:
    """Let each tensor be copied on another stream than the one before it."""
    for weight, branch in zip(weights, itertools.cycle(branches), strict=False):
        torch.cuda.set_stream(branch)
        yield weight


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Flat uint8."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
