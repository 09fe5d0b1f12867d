"""A worker extension that watches vLLM's engine loop from inside: steps, and what the GPU did. Used by bench/engine_loop.py.

On one GPU the worker lives in EngineCore's own process, and an RPC runs in its loop between two steps.
"""

import time
from collections import Counter
from typing import Any

import torch

from accerl_mp.inference.worker import EngineWorker


class LoopWatcher(EngineWorker):
    """What the product's own extension does, and these RPCs."""

    def loop_start(self) -> None:
        """Note every step from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._steps: list[tuple[float, int, int, int]] = []
        self._modes: Counter[str] = Counter()
        self._runs, steps = runner.execute_model, self._steps

        def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                requests = len(scheduled.num_scheduled_tokens), len(scheduled.scheduled_new_reqs)
                steps.append((time.monotonic(), scheduled.total_num_scheduled_tokens, *requests))
            return self._runs(scheduled, *args, **options)

        runner.execute_model = execute_model
        graphs = _graphs_of(runner)
        if graphs is not None:
            dispatch, modes = type(graphs).dispatch, self._modes

            def counted(*args: Any, **options: Any) -> Any:
                found = dispatch(graphs, *args, **options)
                modes[(found[0] if isinstance(found, tuple) else found.cg_mode).name] += 1
                return found

            graphs.dispatch = counted

    def loop_stop(self) -> dict[str, Any]:
        """{"steps": [(s, tokens, requests, new requests)], "modes": {CUDA graph mode: steps}} since `loop_start`."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.execute_model = self._runs
        if (graphs := _graphs_of(runner)) is not None:
            del graphs.dispatch
        return {"steps": self._steps, "modes": dict(self._modes)}

    def trace_start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [torch.profiler.ProfilerActivity.CPU]
        self._trace = torch.profiler.profile(activities=kinds, acc_events=True)
        self._trace.start()
        self._traced = time.monotonic()

    def trace_stop(self) -> dict[str, Any]:
        """{"seconds", "busy_s": in which a kernel ran, "kernels": {name: (s, number)}, "calls": likewise for CUDA's own on the host}."""
        seconds = time.monotonic() - self._traced
        self._trace.stop()
        events = self._trace.profiler.kineto_results.events()
        is_gpu = torch.cuda.is_available()
        wanted = torch.profiler.DeviceType.CUDA if hasattr(torch.profiler, "DeviceType") else torch.autograd.DeviceType.CUDA
        on_device = [event for event in events if (event.device_type() == wanted) == is_gpu]
        spans = sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_device)
        return {
            "seconds": seconds,
            "busy_s": _covered(spans) / 1e9,
            "kernels": _sums(on_device),
            "calls": _sums(set(events) - set(on_device)),
        }


def _graphs_of(runner: Any) -> Any:
    """What chooses a step's CUDA graph, by the name that each of vLLM's runners has for it; None on a CPU with vLLM 0.32."""
    return getattr(runner, "cudagraph_manager", None) or getattr(runner, "cudagraph_dispatcher", None)


def _covered(spans: list[tuple[int, int]]) -> int:
    """Of the time line, by spans in order of their starts."""
    covered, end = 0, 0
    for start, stop in spans:
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _sums(events: Any) -> dict[str, tuple[float, int]]:
    seconds: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in events:
        seconds[event.name()[:100]] += event.duration_ns()
        numbers[event.name()[:100]] += 1
    return {name: (total / 1e9, numbers[name]) for name, total in seconds.most_common(30)}
