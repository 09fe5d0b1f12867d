"""RLSample as bytes: message frames between processes, and records in a ring. No pickle.

A message is a list of frames, one header and one frame a sample:

    header   magic | version | msgpack [[num_tokens, num_trained, size_bytes, crc, [scalars]], ...] | crc
    sample   the arrays of samples.ARRAY_FIELDS one after the other, each padded to 8 bytes

The header's CRC covers the CRC of every frame, so it is the checksum of the whole: a frame that was cut, flipped,
swapped with another, left out or taken from another message raises CodecError. A ring record is the same arrays
behind a prefix that holds the scalars; the ring keeps its CRC in the slot.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np

from accerl_mp.samples import ARRAY_FIELDS, SCALAR_FIELDS, RLSample, SampleError, validate_all

MAGIC = b"ACRL"
FORMAT_VERSION = 1
MAX_TOKENS = 1 << 26
"""Refused above this: a damaged length must not become an allocation of gigabytes."""

_ALIGN = 8
_PREFIX = struct.Struct("<4sHHII")
"""Of a message's header (magic, version, 0, number of samples, 0) and of a record (magic, version, scalars, T, R)."""
_CRC = struct.Struct("<I")
_TRAINED = frozenset(("response_ids", "output_versions"))
_ARRAYS = tuple((name, np.dtype(dtype).newbyteorder("<"), name in _TRAINED) for name, dtype in ARRAY_FIELDS.items())
"""Name, dtype, and whether it has an entry a trained token instead of one a token."""
_CASTS = tuple({f.name: f.type for f in fields(RLSample)}[name] for name in SCALAR_FIELDS)
assert [f.name for f in fields(RLSample)] == [SCALAR_FIELDS[0], *ARRAY_FIELDS, *SCALAR_FIELDS[1:]]  # _build gives them by position
_SCALARS_ROOM = 160
"""Bytes of a record's scalars, whatever their values, so that its size is known without packing them; the algorithm's name is short."""
HEAD_BYTES = _PREFIX.size + _SCALARS_ROOM
_get_scalars, _get_arrays = attrgetter(*SCALAR_FIELDS), attrgetter(*ARRAY_FIELDS)
_PADDING = bytes(_ALIGN)
_SIZES = tuple((size, is_trained, count) for (size, is_trained), count in Counter((d.itemsize, t) for _, d, t in _ARRAYS).items())
"""Bytes of an entry, whether there is one a trained token, and how many arrays are like that."""

Frame = bytes | bytearray | memoryview


class Body(NamedTuple):
    """A sample's arrays as bytes: what a frame carries and a ring record ends with."""

    data: Frame
    crc: int


class CodecError(ValueError):
    """Frames that are not, or no longer, what encode_samples wrote. Says which frame and what is wrong with it."""


def encode_samples(samples: Sequence[RLSample]) -> list[bytes]:
    """Frames of one message: a header, then one frame a sample."""
    bodies = [encode_body(sample) for sample in samples]
    rows = [
        [len(sample.input_ids), len(sample.response_ids), len(body.data), body.crc, _scalars(sample)]
        for sample, body in zip(samples, bodies, strict=True)
    ]
    content = _PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(rows), 0) + msgpack.packb(rows)
    return [content + _CRC.pack(zlib.crc32(content)), *(body.data for body in bodies)]


def decode_samples(frames: Sequence[Frame]) -> list[RLSample]:
    """The samples of encode_samples' frames, validated. Their arrays are views of the frames.

    Raises CodecError for frames that are damaged or foreign, SampleError for a sample that was wrong when encoded.
    """
    return decode_bodies(frames)[0]


def decode_bodies(frames: Sequence[Frame]) -> tuple[list[RLSample], list[Body]]:
    """As `decode_samples`, and the samples' bodies as they came, for a ring that takes them over without encoding them again."""
    if not frames:
        raise CodecError("no frames: expected a header")
    rows = _decode_header(memoryview(frames[0]).cast("B"))
    if len(rows) != len(frames) - 1:
        raise CodecError(f"header lists {len(rows)} samples, got {len(frames) - 1} frames")
    samples = [_decode_frame(index, row, memoryview(frame)) for index, (row, frame) in enumerate(zip(rows, frames[1:], strict=True))]
    validate_all(samples)
    return samples, [Body(frame, row[3]) for row, frame in zip(rows, frames[1:], strict=True)]


def sample_size_bytes(sample: RLSample) -> int:
    """Bytes of the sample's ring record."""
    return HEAD_BYTES + _body_size(len(sample.input_ids), len(sample.response_ids))


def encode_sample(sample: RLSample) -> list[Frame]:
    """Buffers which, one after the other, are the sample's ring record."""
    return [encode_head(sample), encode_body(sample).data]


def encode_head(sample: RLSample) -> bytes:
    """What a record has before its body: HEAD_BYTES."""
    scalars = msgpack.packb(_scalars(sample))
    if len(scalars) > _SCALARS_ROOM:
        raise SampleError("algorithm", f"scalars of at most {_SCALARS_ROOM} bytes", f"{len(scalars)} bytes")
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(scalars), len(sample.input_ids), len(sample.response_ids))
    return prefix + scalars.ljust(_SCALARS_ROOM, b"\0")


def encode_body(sample: RLSample) -> Body:
    data = b"".join(_array_buffers(sample))
    return Body(data, zlib.crc32(data))


def record_crc(head: Frame, body_crc: int) -> int:
    """The body's checksum carried on over the head: the one that was made beside the sample is the one that the trainer checks."""
    return zlib.crc32(head, body_crc)


def decode_sample(record: Frame) -> RLSample:
    """The sample of a ring record, validated. Its arrays are views of `record`, so give it a private copy."""
    view = memoryview(record).cast("B")
    if len(view) < _PREFIX.size:
        raise CodecError(f"record of {len(view)} bytes is cut")
    magic, version, scalars_size, num_tokens, num_trained = _PREFIX.unpack_from(view)
    _check_format("record", magic, version)
    if len(view) < HEAD_BYTES or scalars_size > _SCALARS_ROOM:
        raise CodecError(f"record of {len(view)} bytes is cut")
    scalars = _unpack(view[_PREFIX.size : _PREFIX.size + scalars_size], "record")
    return _build("record", num_tokens, num_trained, scalars, view[HEAD_BYTES:]).validate()


def _array_buffers(sample: RLSample) -> list[Frame]:
    buffers: list[Any] = []
    for array, (name, dtype, _) in zip(_get_arrays(sample), _ARRAYS, strict=True):
        if array.dtype != dtype:
            raise SampleError(name, dtype.name, array.dtype.name)
        buffers.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        if padding := -array.nbytes % _ALIGN:
            buffers.append(_PADDING[:padding])
    return buffers


def _scalars(sample: RLSample) -> list[Any]:
    values = _get_scalars(sample)
    return list(values) if tuple(map(type, values)) == _CASTS else [cast(value) for value, cast in zip(values, _CASTS, strict=True)]


def _decode_header(frame: memoryview) -> list[Any]:
    if len(frame) < _PREFIX.size + _CRC.size:
        raise CodecError(f"header of {len(frame)} bytes is cut")
    magic, version, _, num_samples, _ = _PREFIX.unpack_from(frame)
    _check_format("header", magic, version)
    content = frame[: -_CRC.size]
    if zlib.crc32(content) != _CRC.unpack(frame[-_CRC.size :])[0]:
        raise CodecError("header: checksum differs, it was cut or changed")
    rows = _unpack(content[_PREFIX.size :], "header")
    if not isinstance(rows, list) or len(rows) != num_samples:
        raise CodecError(f"header: expected {num_samples} rows")
    return rows


def _decode_frame(index: int, row: Any, frame: memoryview) -> RLSample:
    name = f"frame {index + 1}"
    if not isinstance(row, list) or len(row) != 5:
        raise CodecError(f"{name}: its row in the header has another form")
    num_tokens, num_trained, size_bytes, crc, scalars = row
    if len(frame) != size_bytes:
        raise CodecError(f"{name}: expected {size_bytes} bytes, got {len(frame)}")
    if zlib.crc32(frame) != crc:
        raise CodecError(f"{name}: checksum differs, it was changed, swapped or comes from another message")
    return _build(name, num_tokens, num_trained, scalars, frame)


def _build(name: str, num_tokens: Any, num_trained: Any, scalars: Any, body: memoryview) -> RLSample:
    if not all(isinstance(n, int) and 0 <= n <= MAX_TOKENS for n in (num_tokens, num_trained)):
        raise CodecError(f"{name}: impossible lengths {num_tokens!r}, {num_trained!r}")
    if len(body) != (expected := _body_size(num_tokens, num_trained)):
        raise CodecError(f"{name}: {num_tokens} tokens, {num_trained} trained, need {expected} bytes, got {len(body)}")
    if not isinstance(scalars, list) or tuple(map(type, scalars)) != _CASTS:
        raise CodecError(f"{name}: scalars are not those of an RLSample")
    arrays, offset = [], 0
    for _, dtype, is_trained in _ARRAYS:
        array = np.ndarray((num_trained if is_trained else num_tokens,), dtype, body, offset)
        arrays.append(array)
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    return RLSample(scalars[0], *arrays, *scalars[1:])


def _body_size(num_tokens: int, num_trained: int) -> int:
    total = 0
    for size, is_trained, count in _SIZES:
        total += _padded((num_trained if is_trained else num_tokens) * size) * count
    return total


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN


def _check_format(name: str, magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise CodecError(f"{name}: starts with {magic!r}, not with {MAGIC!r}: not a message of accerl_mp")
    if version != FORMAT_VERSION:
        raise CodecError(f"{name}: format version {version}, this build reads {FORMAT_VERSION}")


def _unpack(data: memoryview, name: str) -> Any:
    try:
        return msgpack.unpackb(data, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"{name}: not msgpack: {error}") from error
