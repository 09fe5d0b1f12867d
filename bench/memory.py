"""Memory of this process, measured around a piece of work."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Grown:
    """Bytes, beside what was there before."""

    peak: int = 0
    rest: int = 0


class Memory:
    """Allocated bytes of a GPU; resident bytes of this process on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def measured(self) -> Iterator[Grown]:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._trim()
            Path("/proc/self/clear_refs").write_text("5")  # start VmHWM anew
        before, grown = self._now(), Grown()
        yield grown
        grown.peak = self._peak() - before
        self._trim()
        grown.rest = self._now() - before

    def wait_for_device(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _trim(self) -> None:
        """Give freed memory back to the system: it would hide what the next step takes."""
        if not self._on_gpu:
            ctypes.CDLL(None).malloc_trim(0)

    def _now(self) -> int:
        return self._allocated()["current"] if self._on_gpu else _proc_status("VmRSS")

    def _peak(self) -> int:
        return self._allocated()["peak"] if self._on_gpu else _proc_status("VmHWM")

    def _allocated(self) -> dict[str, int]:
        """In a tenth of the time of `torch.cuda.memory_allocated`: between two steps a GPU goes on with the update, and no clock runs."""
        return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]


def _proc_status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
