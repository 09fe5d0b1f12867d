"""A ring's content in a saved state: taken by its reader at a step boundary, put back by the writer of the next start's ring.

What the reader copies is a cut: the groups that are committed at one moment, those of them that it has not released, and
how often it used each. Anything that ingest commits later belongs to neither list, so it is dealt again.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from accerl_mp.files import read_file
from accerl_mp.samples import RLSample, SampleError
from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.codec import CodecError, decode_samples, encode_samples
from accerl_mp.transport.ring import ReadySample, RingReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedGroup:
    """What is left of a group in a ring; lists hold an entry a sample."""

    samples: list[RLSample]
    uses: list[int]
    oldest: list[int]
    newest: list[int]
    size: int
    """Samples that it had."""

    @property
    def group_id(self) -> int:
        return self.samples[0].group_id

    @property
    def is_started(self) -> bool:
        """Some of it was trained: dealing it again would train episodes twice."""
        return len(self.samples) < self.size or any(self.uses)


@dataclass(frozen=True)
class RingCut:
    """A ring at one moment."""

    groups: list[SavedGroup]
    """Live ones, oldest first."""
    done: list[int]
    """The latest groups that were committed or left no samples, live or not."""
    next_number: int
    """First group that was never dealt, as far as this ring says."""

    @classmethod
    def empty(cls) -> "RingCut":
        return cls([], [], 0)


def cut_ring(reader: RingReader) -> RingCut:
    """Copy what the next start needs. The reader's own process only, between two steps."""
    committed = int(reader.memory.writer[at.COMMITTED])  # first: what comes later is left out of everything below
    recent = reader.memory.recent.copy()
    done = recent[(recent[:, 1] > 0) & (recent[:, 1] <= committed), 0].tolist()
    records = [record for record in reader.ready() if record.sequence <= committed]
    groups = [group for _, part in groupby(records, key=lambda r: r.group_first) if (group := _copy(reader, list(part)))]
    # Last: a group is noted before it is dealt, so none that is done can have this number.
    return RingCut(groups, done, max([reader.next_number, *(number + 1 for number in done)]))


def pack_rank(fields: dict[str, Any], groups: Iterable[SavedGroup]) -> bytes:
    """A rank's file: its groups, and `fields` (numbers, texts, bytes)."""
    packed = [{"frames": encode_samples(g.samples), "uses": g.uses, "oldest": g.oldest, "newest": g.newest, "size": g.size} for g in groups]
    return msgpack.packb(fields | {"groups": packed})


def unpack_rank(path: Path) -> tuple[dict[str, Any], list[SavedGroup]]:
    """What `pack_rank` took. CodecError with the file's name where it is damaged."""
    try:
        fields = msgpack.unpackb(read_file(path))
        packed = fields.pop("groups")
        groups = [SavedGroup(decode_samples(g["frames"]), g["uses"], g["oldest"], g["newest"], g["size"]) for g in packed]
    except (CodecError, SampleError, ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"{path}: {error}") from error
    return fields, groups


def rank_fields(path: Path) -> dict[str, Any]:
    """The `fields` of `pack_rank` alone; nothing is decoded. CodecError with the file's name where it is damaged."""
    try:
        fields = msgpack.unpackb(read_file(path))
        del fields["groups"]
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"{path}: {error}") from error
    return fields


def _copy(reader: RingReader, records: list[ReadySample]) -> SavedGroup | None:
    """None where nothing of it can be read (any more): evicted or torn, and counted as that."""
    kept = [(record, sample) for record, sample in zip(records, reader.read_all(records), strict=True) if sample is not None]
    if not kept:
        return None
    return SavedGroup(
        samples=[sample for _, sample in kept],
        uses=[record.uses for record, _ in kept],
        oldest=[record.oldest_version for record, _ in kept],
        newest=[record.newest_version for record, _ in kept],
        size=kept[0][0].group_size,
    )


def shifted(group: SavedGroup, num_versions: int) -> SavedGroup:
    """With the versions that lag is counted by moved on: a new start begins at a higher version with the same weights.

    The tokens' own versions stay as they are.
    """
    moved = [[int(version) + num_versions for version in versions] for versions in (group.oldest, group.newest)]
    return SavedGroup(group.samples, group.uses, *moved, group.size)


def latest(done: Iterable[int], next_number: int) -> list[int]:
    """Of the done groups those that a ring can remember, in order; older ones are done anyway."""
    numbers = np.unique(np.fromiter(done, np.int64))
    return numbers[numbers >= next_number - at.NUM_RECENT // 2].tolist()
