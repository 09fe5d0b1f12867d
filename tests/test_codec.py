"""The codec: what comes out is what went in, or it raises."""

import itertools
import random

import numpy as np
import pytest
from sample_factory import assert_same, make_group, make_sample

from accerl_mp.config import sample_bytes_bound
from accerl_mp.samples import SampleError
from accerl_mp.transport.codec import (
    CodecError,
    decode_sample,
    decode_samples,
    encode_sample,
    encode_samples,
    sample_size_bytes,
)


@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 61, 1024, 16384])
def test_samples_come_back_bit_for_bit(num_tokens):
    samples = [make_sample(seed, num_tokens=num_tokens, group_id=-(2**62), version=seed) for seed in range(3)]
    for before, after in zip(samples, decode_samples(encode_samples(samples)), strict=True):
        assert_same(before, after)


def test_no_samples_are_a_message_too():
    assert decode_samples(encode_samples([])) == []


def test_extreme_scalars_survive():
    sample = make_sample(group_id=2**63 - 1, advantage=-1e300, reward=5e-324, algorithm="an algorithm with a long name " * 4)
    assert_same(sample, decode_samples(encode_samples([sample]))[0])


def test_strided_arrays_are_written_in_order():
    sample = make_sample()
    wide = np.repeat(sample.input_ids, 2)
    sample.input_ids = wide[::2]
    assert_same(sample, decode_samples(encode_samples([sample]))[0])


def test_numpy_scalars_are_accepted():
    sample = make_sample()
    sample.advantage, sample.won, sample.game_id = np.float64(0.5), np.bool_(True), np.int64(3)
    after = decode_samples(encode_samples([sample]))[0]
    assert (after.advantage, after.won, after.game_id) == (0.5, True, 3)


def test_a_wrong_dtype_is_refused_not_cast():
    sample = make_sample()
    sample.input_ids = sample.input_ids.astype(np.int64)
    with pytest.raises(SampleError, match="input_ids"):
        encode_samples([sample])


def test_a_sample_that_breaks_the_contract_is_refused_when_decoded():
    sample = make_sample()
    sample.labels[5] += 1
    with pytest.raises(SampleError, match="labels"):
        decode_samples(encode_samples([sample]))
    with pytest.raises(SampleError, match="labels"):
        decode_sample(b"".join(encode_sample(sample)))


def test_every_flipped_byte_raises():
    frames = encode_samples(make_group(1, 2, num_tokens=10))
    for index, frame in enumerate(frames):
        for position in range(len(frame)):
            damaged = bytearray(frame)
            damaged[position] ^= 1 << (position % 8)
            with pytest.raises(CodecError):
                decode_samples([*frames[:index], damaged, *frames[index + 1 :]])


def test_every_cut_raises():
    frames = encode_samples(make_group(1, 2, num_tokens=10))
    for index, frame in enumerate(frames):
        for size in range(len(frame)):
            with pytest.raises(CodecError):
                decode_samples([*frames[:index], frame[:size], *frames[index + 1 :]])
    for count in range(len(frames)):
        with pytest.raises(CodecError):
            decode_samples(frames[:count])


def test_longer_frames_and_more_frames_raise():
    frames = encode_samples(make_group(1, 2))
    for index in range(len(frames)):
        with pytest.raises(CodecError):
            decode_samples([*frames[:index], bytes(frames[index]) + b"\0", *frames[index + 1 :]])
    with pytest.raises(CodecError):
        decode_samples([*frames, frames[-1]])


def test_every_other_order_raises():
    frames = encode_samples(make_group(1, 3, num_tokens=10))
    for order in itertools.permutations(range(4)):
        if order != (0, 1, 2, 3):
            with pytest.raises(CodecError):
                decode_samples([frames[index] for index in order])


def test_frames_of_another_message_raise():
    """Also where both have the same shape: the sums differ."""
    ours, theirs = (encode_samples([make_sample(seed, group_id=5) for seed in seeds]) for seeds in ((1, 2), (3, 4)))
    assert [len(frame) for frame in ours[1:]] == [len(frame) for frame in theirs[1:]]
    for index in range(3):
        with pytest.raises(CodecError):
            decode_samples([*ours[:index], theirs[index], *ours[index + 1 :]])


@pytest.mark.parametrize("header", [b"", b"\0", b"hello world, no header at all", b"ACRL", b"\x80" * 40, random.Random(1).randbytes(200)])
def test_foreign_bytes_raise(header):
    with pytest.raises(CodecError):
        decode_samples([header])
    with pytest.raises(CodecError):
        decode_sample(header)


def test_another_format_version_is_named():
    frames = encode_samples([make_sample()])
    header = bytearray(frames[0])
    header[4] += 1
    with pytest.raises(CodecError, match="version 2"):
        decode_samples([header, *frames[1:]])


def test_a_ring_record_comes_back_and_has_the_announced_size():
    for seed, num_tokens in enumerate([2, 5, 64, 1000, 8192]):
        sample = make_sample(seed, num_tokens=num_tokens, group_id=seed)
        record = b"".join(encode_sample(sample))
        assert len(record) == sample_size_bytes(sample) <= sample_bytes_bound(num_tokens)
        assert_same(sample, decode_sample(record))


def test_every_cut_record_raises():
    record = b"".join(encode_sample(make_sample(num_tokens=10)))
    for size in range(len(record)):
        with pytest.raises(CodecError):
            decode_sample(record[:size])


def test_the_work_does_not_grow_with_python_per_token():
    """16,000 tokens must not cost much more than 100 do, apart from bytes: no loop over tokens."""
    import time
    import timeit

    def seconds(num_tokens: int) -> float:
        sample = make_sample(num_tokens=num_tokens)
        # CPU time: a machine that does other work must not decide.
        return min(timeit.repeat(lambda: decode_samples(encode_samples([sample])), number=20, repeat=5, timer=time.process_time))

    assert seconds(16_000) < 40 * seconds(100)  # a loop over tokens: 160 times
