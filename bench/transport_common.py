"""What both sides of bench/transport.py share: the stream of samples, their time stamps, arrivals and CPU time. NumPy and psutil only."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import psutil

from accerl_mp.samples import RLSample
from bench.episodes import Shape, make_sample

POLL_S = 0.0005
"""A trainer that finds nothing in Ray's actor asks again after this."""


@dataclass(frozen=True)
class Stream:
    """What one run sends."""

    num_tokens: int
    num_workers: int
    num_samples: int
    group_size: int = 8
    rate: float = 0.0
    """Samples a second, all workers together; 0: as fast as it goes."""

    @property
    def num_groups(self) -> int:
        """Of each worker."""
        return self.num_samples // (self.group_size * self.num_workers)

    @property
    def ring_slots(self) -> int:
        return 64 * self.group_size

    @property
    def ring_bytes(self) -> int:
        return self.ring_slots * (self.num_tokens * 33 + 4096)

    def paced(self, groups: Sequence[list[Any]], index: int) -> Iterator[list[Any]]:
        """The groups, each when it is due."""
        period = self.group_size * self.num_workers / self.rate if self.rate else 0.0
        start = time.monotonic() + period * index / self.num_workers
        for number in range(self.num_groups):
            if period:
                time.sleep(max(0.0, start + number * period - time.monotonic()))
            group = groups[number % len(groups)]
            for sample in group:
                sample.group_id = number * self.num_workers + index
            yield group


def make_groups(stream: Stream, index: int) -> list[list[Any]]:
    """A few different groups, sent over and over: what is measured is their way, not how they are made."""
    rng = np.random.default_rng(index)
    shape = Shape(stream.num_tokens, max(1, stream.num_tokens // 64), max(1, stream.num_tokens // 256))
    return [[make_sample(rng, shape) for _ in range(stream.group_size)] for _ in range(4)]


def stamped(group: list[Any]) -> list[Any]:
    """Their `reward` says when they left; CLOCK_MONOTONIC is one clock for all processes."""
    now = time.monotonic()
    for sample in group:
        sample.reward = now
    return group


class ListSample:
    """An RLSample as the reference has it: the same fields, arrays as plain Python lists."""

    def __init__(self, sample: RLSample) -> None:
        for field in fields(sample):
            value = getattr(sample, field.name)
            setattr(self, field.name, value.tolist() if isinstance(value, np.ndarray) else value)

    def __len__(self) -> int:
        return len(self.input_ids)  # type: ignore[attr-defined]


class Arrivals:
    """What reached trainer memory."""

    def __init__(self, num_expected: int) -> None:
        self._expected = num_expected
        self._latencies: list[float] = []
        self._num_tokens = 0
        self._first_sent = float("inf")
        self._last_at = 0.0

    @property
    def complete(self) -> bool:
        return len(self._latencies) >= self._expected

    def add(self, sent_at: float, num_tokens: int) -> None:
        self._last_at = time.monotonic()
        self._latencies.append(self._last_at - sent_at)
        self._first_sent = min(self._first_sent, sent_at)
        self._num_tokens += num_tokens

    def summary(self) -> dict[str, Any]:
        return {
            "num_samples": len(self._latencies),
            "num_tokens": self._num_tokens,
            "seconds": self._last_at - self._first_sent,
            "p50_s": float(np.percentile(self._latencies, 50)),
            "p95_s": float(np.percentile(self._latencies, 95)),
        }


class Clock:
    """CPU time of this process's children, all generations, between `start` and `cpu_seconds`."""

    def start(self) -> None:
        self._before = _cpu_of_children()

    def cpu_seconds(self) -> float:
        return sum(self.by_pid().values())

    def by_pid(self) -> dict[int, float]:
        return {pid: seconds - self._before.get(pid, 0.0) for pid, seconds in _cpu_of_children().items()}


def _cpu_of_children() -> dict[int, float]:
    seconds = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds
