"""Bodies of groups in shared memory: a rollout encodes a group there and sends only its header; ingest reads and checks it in place.

One file in /dev/shm a rollout process, written by it alone. What lies there belongs to a group from `pack` to `free` (its ack, which comes
after the ring commit), so ingest may look as long as the group waits for room. A group that finds no place travels in the message.

    bounded        MAX_UNACKED + 1 groups lie there at a time, in at most MAX_BYTES and a quarter of what /dev/shm has free
    a dead rollout its file stays as ingest has it open: groups that wait are put into a ring, later ones are dealt again. The next
                   process of that number removes the file when it makes its own
    a dead ingest  the next one opens the file when the group is sent again
    at the end     the run's sweep removes what is left
"""

import mmap
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accerl_mp.samples import RLSample
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels
from accerl_mp.transport.channels import MAX_UNACKED, MessageError
from accerl_mp.transport.codec import Frame, encode_group

MAX_BYTES = 256 << 20
"""Of one file. It takes only the pages that were used once."""
_FREE_SHARE = 4
_ALIGN = 4096
_NAME = re.compile(r"\d{1,9}-\d{1,20}")


class BodyGone(Exception):
    """The file was removed: its rollout has died, and another one of its number has begun."""


class _Place(NamedTuple):
    start: int
    end: int


class Outbox:
    """A rollout's side."""

    def __init__(self, paths: RunPaths, worker: int) -> None:
        self._worker, self._name = worker, f"{worker}-{time.time_ns()}"
        self._path = paths.outbox(self._name)
        self._taken: dict[int, _Place] = {}
        self._memory: mmap.mmap | None = None
        self._file = -1
        self._allocated = 0

    def pack(self, played: Mapping[str, Any], samples: Sequence[RLSample]) -> list[Frame]:
        """The frames of a played group: the message alone without samples, else with their header, and their body unless it lies here."""
        if not samples:
            return [channels.pack("played", played)]
        group_id, places = played["group_id"], []

        def allocate(size_bytes: int) -> Any:
            if (place := self._take(size_bytes)) is None:
                return np.empty(size_bytes, np.uint8)
            places.append(place)
            return memoryview(self._memory)[place.start : place.start + size_bytes]  # type: ignore[arg-type]

        group = encode_group(samples, allocate)
        if not places:
            return [channels.pack("played", played), group.header, group.body]
        self._taken[group_id] = places[0]
        body = {"name": self._name, "start": places[0].start, "size": len(group.body)}
        return [channels.pack("played", {**played, "body": body}), group.header]

    def free(self, group_id: int) -> None:
        """The group was acknowledged: its place may be used again."""
        self._taken.pop(group_id, None)

    def close(self) -> None:
        """Removes the file unless ingest may still read there."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not self._taken:
                self._path.unlink(missing_ok=True)

    def _take(self, size_bytes: int) -> _Place | None:
        """The first gap that is large enough; None where there is none, or no memory."""
        if len(self._taken) > MAX_UNACKED:
            return None
        start = 0
        for place in sorted(self._taken.values()):
            if start + size_bytes <= place.start:
                break
            start = place.end
        place = _Place(start, start - (-size_bytes // _ALIGN) * _ALIGN)
        return place if place.end <= self._allocated or self._grow(place.end) else None

    def _grow(self, size_bytes: int) -> bool:
        more = size_bytes - self._allocated
        free = os.statvfs(self._path.parent)
        if size_bytes > MAX_BYTES or more * _FREE_SHARE > free.f_bavail * free.f_frsize:
            return False
        try:
            if self._memory is None:
                self._open()
            os.posix_fallocate(self._file, self._allocated, more)  # a full /dev/shm is an error here, and not a SIGBUS while writing
        except OSError:
            return False
        self._allocated = size_bytes
        return True

    def _open(self) -> None:
        for path in self._path.parent.glob(f"{self._path.name.removesuffix(self._name)}{self._worker}-*"):
            path.unlink(missing_ok=True)  # of the processes that had this number before
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, MAX_BYTES)
        self._memory = mmap.mmap(self._file, MAX_BYTES)


class Outboxes:
    """Ingest's side: the files of all rollouts, the newest of each."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._open: dict[str, tuple[str, memoryview]] = {}
        """Rollout's number: name and content of its file."""

    def frames(self, played: Mapping[str, Any], frames: Sequence[Frame]) -> list[Frame]:
        """Header and body of a played group, wherever they are. The body may be looked at until the group is acknowledged.

        MessageError for a place that is none, BodyGone where the rollout that wrote there has a successor.
        """
        place = played.get("body")
        if place is None:
            return list(frames)
        match place:
            case {"name": str(name), "start": int(start), "size": int(size)} if _NAME.fullmatch(name):
                content = self._content(name)
            case _:
                raise MessageError(f"body: {place!r} is no place in an outbox")
        if not 0 <= start <= start + size <= len(content):
            raise MessageError(f"body: {place!r} lies outside of its file")
        return [*frames, content[start : start + size]]

    def _content(self, name: str) -> memoryview:
        worker = name.split("-")[0]
        known, content = self._open.get(worker, ("", memoryview(b"")))
        if known == name:
            return content
        content = _mapped(self._paths.outbox(name))
        self._open[worker] = name, content
        return content


def _mapped(path: Path) -> memoryview:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise BodyGone(f"{path.name} was removed") from error
    try:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise MessageError(f"body: {path.name} cannot be mapped: {error}") from error
    finally:
        os.close(file)
