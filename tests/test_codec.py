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
    decode_record,
    decode_samples,
    encode_group,
    encode_samples,
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
        decode_record(b"".join(encode_samples([sample])))


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
    """Of frames, and of the arrays and pages within the body: each is moved to the place of another."""
    header, body = encode_samples([make_sample(seed, num_tokens=700, group_id=1) for seed in range(4)])
    with pytest.raises(CodecError):
        decode_samples([body, header])
    for size, step in ((8, 40), (64, 960), (4096, 4096)):
        for one, other in itertools.combinations(range(0, len(body) - size, step), 2):
            swapped = bytearray(body)
            swapped[one : one + size], swapped[other : other + size] = body[other : other + size], body[one : one + size]
            if swapped != body:
                with pytest.raises(CodecError):
                    decode_samples([header, swapped])
            if size == 8 and other > 500:
                break


def test_frames_of_another_message_raise():
    """Also where both have the same shape: the sums differ."""
    ours, theirs = (encode_samples([make_sample(seed, group_id=5) for seed in seeds]) for seeds in ((1, 2), (3, 4)))
    assert len(ours[1]) == len(theirs[1])
    for index in range(2):
        with pytest.raises(CodecError):
            decode_samples([*ours[:index], theirs[index], *ours[index + 1 :]])


def test_a_group_says_what_its_samples_are():
    samples = make_group(3, 5, version=2)
    samples[1].output_versions[0] = 7
    group = encode_group(samples)
    assert (len(group), group.lengths, group.num_trained) == (5, [len(s) for s in samples], [s.num_trained for s in samples])
    assert group.column("episode_id") == [sample.episode_id for sample in samples]
    assert [versions.tolist() for versions in group.versions()] == [[2] * 5, [2, 7, 2, 2, 2]]
    for before, after in zip(samples, group.samples, strict=True):
        assert_same(before, after)


def test_a_group_is_written_where_the_caller_wants_it():
    room = bytearray(b"\xff" * 100_000)
    group = encode_group(make_group(1, 3), lambda size_bytes: memoryview(room)[8 : 8 + size_bytes])
    header, body = encode_samples(make_group(1, 3))
    assert (bytes(group.header), bytes(room[8 : 8 + len(body)])) == (header, body), "padding included"


@pytest.mark.parametrize("header", [b"", b"\0", b"hello world, no header at all", b"ACRL", b"\x80" * 40, random.Random(1).randbytes(200)])
def test_foreign_bytes_raise(header):
    with pytest.raises(CodecError):
        decode_samples([header])
    with pytest.raises(CodecError):
        decode_record(header)


def test_another_format_version_is_named():
    frames = encode_samples([make_sample()])
    header = bytearray(frames[0])
    header[4] += 1
    with pytest.raises(CodecError, match="version 3"):
        decode_samples([header, *frames[1:]])


def test_a_ring_record_comes_back_and_has_the_announced_size():
    for seed, num_tokens in enumerate([2, 5, 64, 1000, 8192]):
        group = encode_group([make_sample(seed, num_tokens=num_tokens, group_id=seed)])
        record = bytes(group.header) + bytes(group.body)
        assert len(record) == group.size_bytes <= sample_bytes_bound(num_tokens)
        assert_same(group.samples[0], decode_record(record).samples[0])


def test_every_cut_record_raises():
    record = b"".join(encode_samples([make_sample(num_tokens=10)]))
    for size in range(len(record)):
        with pytest.raises(CodecError):
            decode_record(record[:size])


def test_lengths_that_do_not_fit_the_tokens_are_refused():
    samples = make_group(1, 2)
    samples[0].labels = samples[0].labels[:-1]
    samples[1].labels = np.append(samples[1].labels, np.int32(-100))
    with pytest.raises(SampleError, match="labels"):
        encode_samples(samples)


def test_the_work_does_not_grow_with_python_per_token():
    """16,000 tokens must not cost much more than 100 do, apart from bytes: no loop over tokens."""
    import time
    import timeit

    def seconds(num_tokens: int) -> float:
        sample = make_sample(num_tokens=num_tokens)
        # CPU time: a machine that does other work must not decide.
        return min(timeit.repeat(lambda: decode_samples(encode_samples([sample])), number=20, repeat=5, timer=time.process_time))

    assert seconds(16_000) < 40 * seconds(100)  # a loop over tokens: 160 times
