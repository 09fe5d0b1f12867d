"""RLSamples as bytes: a whole group at a time, as message frames between processes and as a record in a ring. No pickle.

A group is two frames:

    header   magic | version | number of samples | sizes | checksum of the body | msgpack columns | padding | CRC
    body     the arrays of samples.ARRAY_FIELDS, one after the other; each holds that field of all samples, one sample after the
             other, and is padded to 4 bytes

Columns are the samples' lengths, their numbers of trained tokens, and each of their scalars. The header's CRC covers the checksum of
the body: a frame that was cut, flipped, swapped, left out or taken from another message raises CodecError. A ring record is the header
and behind it the body. What is checked is checked in the joined arrays, and a sample's arrays are slices of them.
"""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from accerl_mp.samples import ARRAY_FIELDS, FLOAT_FIELDS, SCALAR_FIELDS, RLSample, SampleError, joined_hold
from accerl_mp.transport.checksum import checksum

MAGIC = b"ACRL"
FORMAT_VERSION = 2
MAX_TOKENS = 1 << 26
"""Refused above this, a sample's or a group's: a damaged length must not become an allocation of gigabytes."""

_ALIGN = 8
_PREFIX = struct.Struct("<4sHHIIQII")
"""Magic, version, 0, number of samples, bytes of the header, bytes of the body, checksum of the body, bytes of the columns."""
_CRC = struct.Struct("<I")
_TRAINED = frozenset(("response_ids", "output_versions"))
_ARRAYS = tuple((name, np.dtype(dtype).newbyteorder("<"), name in _TRAINED) for name, dtype in ARRAY_FIELDS.items())
"""Name, dtype, and whether it has an entry a trained token instead of one a token."""
_VERSIONS, _LOGPROBS = map(list(ARRAY_FIELDS).index, ("output_versions", "old_logprobs"))
assert tuple(ARRAY_FIELDS)[_LOGPROBS : _LOGPROBS + 3] == FLOAT_FIELDS
_CASTS = tuple({f.name: f.type for f in fields(RLSample)}[name] for name in SCALAR_FIELDS)
_FLOATS = tuple(index for index, cast in enumerate(_CASTS) if cast is float)
assert [f.name for f in fields(RLSample)] == [SCALAR_FIELDS[0], *ARRAY_FIELDS, *SCALAR_FIELDS[1:]]  # samples are built by position
_get_scalars, _get_arrays = attrgetter(*SCALAR_FIELDS), attrgetter(*ARRAY_FIELDS)

Frame = bytes | bytearray | memoryview
Allocate = Callable[[int], Any]


class CodecError(ValueError):
    """Frames that are not, or no longer, what was encoded. Says which frame and what is wrong with it."""


@dataclass(slots=True, eq=False)
class SampleGroup:
    """Samples as their bytes, and what can be said about them without making an RLSample of each."""

    header: Frame
    body: Frame
    lengths: list[int]
    """Tokens of each sample."""
    num_trained: list[int]
    """Trained tokens of each sample."""
    scalars: list[list[Any]]
    """A column for each of SCALAR_FIELDS."""
    arrays: list[np.ndarray]
    """For each of ARRAY_FIELDS that of all samples, joined. Views of `body`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        """Of the group's ring record."""
        return len(self.header) + len(self.body)

    @property
    def crc(self) -> int:
        """The header's last word: the checksum of everything."""
        return _CRC.unpack(self.header[-_CRC.size :])[0]

    def column(self, name: str) -> list[Any]:
        """One of SCALAR_FIELDS of each sample."""
        return self.scalars[SCALAR_FIELDS.index(name)]

    def versions(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] oldest and [n] newest policy version of each sample's tokens. Each trains one token at least."""
        versions, starts = self.arrays[_VERSIONS], np.cumsum([0, *self.num_trained[:-1]])
        return np.minimum.reduceat(versions, starts), np.maximum.reduceat(versions, starts)

    @property
    def samples(self) -> list[RLSample]:
        """Their arrays are views of `body`."""
        tokens, trained = (list(_slices(counts)) for counts in (self.lengths, self.num_trained))
        columns = [
            [array[part] for part in (trained if is_trained else tokens)]
            for array, (_, _, is_trained) in zip(self.arrays, _ARRAYS, strict=True)
        ]
        return list(map(RLSample, self.scalars[0], *columns, *self.scalars[1:]))


def _slices(counts: Sequence[int]) -> list[slice]:
    """Where each part of a joined array lies."""
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


def encode_group(samples: Sequence[RLSample], allocate: Allocate | None = None) -> SampleGroup:
    """`allocate(size_bytes)` gives the memory for the body (default: new memory)."""
    scalars = _scalar_columns(samples)
    lengths, num_trained = [len(sample.input_ids) for sample in samples], [len(sample.response_ids) for sample in samples]
    parts, size_bytes = _layout(sum(lengths), sum(num_trained))
    body = memoryview(allocate(size_bytes) if allocate else np.empty(size_bytes, np.uint8)).cast("B")
    arrays = [np.ndarray(count, dtype, body, offset) for offset, dtype, count in parts]
    columns = zip(*map(_get_arrays, samples), strict=True) if samples else [()] * len(_ARRAYS)
    for array, (offset, _, _), values, (name, dtype, is_trained) in zip(arrays, parts, columns, _ARRAYS, strict=True):
        _join(name, dtype, values, num_trained if is_trained else lengths, into=array)
        if padding := _padded(array.nbytes) - array.nbytes:
            body[offset + array.nbytes : offset + array.nbytes + padding] = bytes(padding)
    header = _encode_header(len(samples), [lengths, num_trained, *scalars], body)
    return SampleGroup(header, body, lengths, num_trained, scalars, arrays)


def decode_group(header: Frame, body: Frame) -> SampleGroup:
    """The group of these two frames, checked; its arrays are views of `body`.

    Raises CodecError for frames that are damaged or foreign, SampleError for a sample that was wrong when it was encoded.
    """
    lengths, num_trained, *scalars = _decode_header(memoryview(header).cast("B"), body)
    parts, size_bytes = _layout(sum(lengths), sum(num_trained))
    if len(body) != size_bytes:
        raise CodecError(f"body: {sum(lengths)} tokens, {sum(num_trained)} trained, need {size_bytes} bytes, got {len(body)}")
    arrays = [np.ndarray(count, dtype, body, offset) for offset, dtype, count in parts]
    group = SampleGroup(header, body, lengths, num_trained, scalars, arrays)
    are_finite = all(all(map(math.isfinite, scalars[index])) for index in _FLOATS)
    floats = np.ndarray((3, arrays[_LOGPROBS].size), np.float32, body, parts[_LOGPROBS][0])  # three fields, one behind the other
    if lengths and not (are_finite and joined_hold(arrays, floats, lengths, num_trained)):
        _raise_for(group)
    return group


def decode_record(record: Frame) -> SampleGroup:
    """The group of a ring record; as `decode_group`. Give it a private copy: arrays are views of it."""
    view = memoryview(record).cast("B")
    if len(view) < _PREFIX.size:
        raise CodecError(f"record of {len(view)} bytes is cut")
    header_bytes = _PREFIX.unpack_from(view)[4]
    return decode_group(view[:header_bytes], view[header_bytes:])


def encode_samples(samples: Sequence[RLSample]) -> list[bytes]:
    """The frames of a message: header and body."""
    group = encode_group(samples)
    return [bytes(group.header), bytes(group.body)]


def decode_samples(frames: Sequence[Frame]) -> list[RLSample]:
    """The samples of encode_samples' frames, validated. Their arrays are views of the frames. Errors as of `decode_group`."""
    if len(frames) != 2:
        raise CodecError(f"expected 2 frames, header and body, got {len(frames)}")
    return decode_group(frames[0], frames[1]).samples


def _join(name: str, dtype: np.dtype, values: Sequence[np.ndarray], counts: Sequence[int], *, into: np.ndarray) -> None:
    if wrong := {value.dtype for value in values} - {dtype}:
        raise SampleError(name, dtype.name, wrong.pop().name)
    if (got := list(map(len, values))) != counts:
        raise SampleError(name, f"{counts} entries in the samples of the group", got)
    if values:
        np.concatenate(values, out=into)


def _scalar_columns(samples: Sequence[RLSample]) -> list[list[Any]]:
    columns = list(map(list, zip(*map(_get_scalars, samples), strict=True))) or [[] for _ in _CASTS]
    return [
        column if set(map(type, column)) <= {cast} else [cast(value) for value in column]
        for column, cast in zip(columns, _CASTS, strict=True)
    ]


def _encode_header(num_samples: int, columns: list[list[Any]], body: memoryview) -> bytes:
    packed = msgpack.packb(columns)
    padding = bytes(-(_PREFIX.size + len(packed) + _CRC.size) % _ALIGN)
    size_bytes = _PREFIX.size + len(packed) + len(padding) + _CRC.size
    content = _PREFIX.pack(MAGIC, FORMAT_VERSION, 0, num_samples, size_bytes, len(body), checksum(body), len(packed)) + packed + padding
    return content + _CRC.pack(zlib.crc32(content))


def _decode_header(frame: memoryview, body: Frame) -> list[Any]:
    """Its columns; CodecError unless it is a header, and that of this body."""
    if len(frame) < _PREFIX.size + _CRC.size:
        raise CodecError(f"header of {len(frame)} bytes is cut")
    magic, version, _, num_samples, header_bytes, body_bytes, body_checksum, packed_bytes = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise CodecError(f"header: starts with {magic!r}, not with {MAGIC!r}: not a message of accerl_mp")
    if version != FORMAT_VERSION:
        raise CodecError(f"header: format version {version}, this build reads {FORMAT_VERSION}")
    content = frame[: -_CRC.size]
    if header_bytes != len(frame) or zlib.crc32(content) != _CRC.unpack(frame[-_CRC.size :])[0]:
        raise CodecError("header: checksum differs, it was cut or changed")
    if body_bytes != len(body):
        raise CodecError(f"body: expected {body_bytes} bytes, got {len(body)}")
    if checksum(body) != body_checksum:
        raise CodecError("body: checksum differs, it was changed, swapped or comes from another message")
    columns = _unpack(content[_PREFIX.size :][:packed_bytes])
    _check_columns(columns, num_samples)
    return columns


def _check_columns(columns: Any, num_samples: int) -> None:
    if not isinstance(columns, list) or len(columns) != 2 + len(_CASTS):
        raise CodecError(f"header: expected {2 + len(_CASTS)} columns")
    for name, column, cast in zip(("lengths", "trained tokens", *SCALAR_FIELDS), columns, (int, int, *_CASTS), strict=True):
        if not isinstance(column, list) or len(column) != num_samples or not set(map(type, column)) <= {cast}:
            raise CodecError(f"header: {name} are not {num_samples} values of type {cast.__name__}")
    if num_samples and not (min(columns[0] + columns[1]) >= 0 and sum(columns[0]) <= MAX_TOKENS and sum(columns[1]) <= MAX_TOKENS):
        raise CodecError(f"header: impossible lengths {columns[0]}, {columns[1]}")


def _raise_for(group: SampleGroup) -> None:
    for sample in group.samples:
        sample.validate()
    raise SampleError("arrays", "joined as good as each for itself", "a difference")


def _layout(num_tokens: int, num_trained: int) -> tuple[list[tuple[int, np.dtype, int]], int]:
    """Offset, dtype and entries of each joined array; bytes of all."""
    parts, offset = [], 0
    for _, dtype, is_trained in _ARRAYS:
        count = num_trained if is_trained else num_tokens
        parts.append((offset, dtype, count))
        offset += _padded(count * dtype.itemsize)
    return parts, offset


def _padded(size_bytes: int) -> int:
    return size_bytes + -size_bytes % 4


def _unpack(data: memoryview) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"header: not msgpack: {error}") from error
