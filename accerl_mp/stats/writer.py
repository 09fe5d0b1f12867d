"""The run folder's metric files: TensorBoard events and metrics.jsonl.

Written by the stats process alone, without torch: TensorBoard's own protocol buffers and record format, in one write
a round. Nothing here waits, and a full disk costs lines, never the run.
"""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event

from accerl_mp.stats.events import as_records, flag_events, histogram_event, layout_event, scalar_events, text_event

_log = logging.getLogger(__name__)


class AppendFile:
    """A file that grows by whole records only: a write that fails half-way (disk full) is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._is_failing = False

    def append(self, data: bytes) -> bool:
        """False, and one warning an outage, where the disk does not take it."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(size)
            if not self._is_failing:
                _log.warning("cannot write %s: %s; metrics are lost until it can", self._path, error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def close(self) -> None:
        self._file.close()


class MetricFiles:
    """Events and metrics.jsonl of one run. A new process appends: a new event file beside the old ones, more lines."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        # As TensorBoard names them, so that it finds them; the names sort by start time.
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._events = AppendFile(run_dir / name)
        self._events.append(as_records([Event(wall_time=time.time(), file_version="brain.Event:2")]))
        self._lines = AppendFile(_whole_lines(run_dir / "metrics.jsonl"))

    def write(self, *, step: int, version: int, time_s: float, values: Mapping[str, float]) -> None:
        """One point of every tag, in both files. NaN and infinities reach TensorBoard only: JSON has no word for them."""
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        if odd := sorted(values.keys() - finite.keys()):
            _log.warning("step %d: not finite: %s", step, ", ".join(odd))
            finite["Stats/NonFinite"] = len(odd)
        self._events.append(as_records(scalar_events(step, time_s, {**values, **finite})))
        line = {"step": step, "version": version, "time": round(time_s, 3)}
        line |= {tag: _short(value) for tag, value in sorted(finite.items())}
        self._lines.append(json.dumps(line).encode() + b"\n")

    def write_flags(self, flat: Mapping[str, Any], *, started_s: float) -> None:
        """The run's settings, and the layout of TensorBoard's overview."""
        self._events.append(as_records([*flag_events(flat, started_s=started_s), layout_event()]))

    def write_text(self, tag: str, text: str, *, step: int) -> None:
        """A Markdown text for TensorBoard's Text tab."""
        self._events.append(as_records([text_event(tag, text, step=step)]))

    def write_histograms(self, *, step: int, time_s: float, counted: Mapping[str, Mapping[int, int]]) -> None:
        """`{histogram: {number: how often}}`. They are in TensorBoard only."""
        self._events.append(as_records([histogram_event(step, time_s, counted)]))

    def close(self) -> None:
        self._events.close()
        self._lines.close()


def _whole_lines(path: Path) -> Path:
    """Cut an unfinished last line that a killed process left."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    return path


def _short(value: float) -> float:
    """Nine digits are all that a float32 holds; counts stay whole."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.9g}")
