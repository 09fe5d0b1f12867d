"""The RLSample contract: every equality, each broken once, is named by its field."""

from collections.abc import Callable

import numpy as np
import pytest

from accerl_mp.samples import ARRAY_FIELDS, FLOAT_FIELDS, RLSample, SampleError, joined_hold
from accerl_mp.transport.codec import decode_samples, encode_samples


def good() -> RLSample:
    """The example of RLSample's docstring: a prompt of 3, a reply of 2, 1 token of the next prompt."""
    arrays = {
        "input_ids": [5, 6, 7, 40, 41, 8],
        "attention_mask": [1] * 6,
        "labels": [-100, -100, -100, 40, 41, -100],
        "old_logprobs": [0, 0, 0, -0.3, -1.2, 0],
        "token_rewards": [0, 0, 0, 0, 1, 0],
        "token_advantages": [0, 0, 0, 0.5, 0.5, 0],
        "response_indices": [-1, -1, -1, 0, 0, -1],
        "response_ids": [40, 41],
        "output_versions": [3, 4],
    }
    return RLSample(algorithm="grpo", **{name: np.array(values, ARRAY_FIELDS[name]) for name, values in arrays.items()})


def changed(name: str, index: int, value: float) -> Callable[[RLSample], None]:
    def change(sample: RLSample) -> None:
        getattr(sample, name)[index] = value

    return change


def replaced(name: str, value: object) -> Callable[[RLSample], None]:
    return lambda sample: setattr(sample, name, value)


def test_the_example_is_valid() -> None:
    sample = good().validate()
    assert (len(sample), sample.num_trained) == (6, 2)


@pytest.mark.parametrize("name", [name for name in ARRAY_FIELDS if name != "input_ids"])
@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, 0)])
def test_every_length_must_fit(name: str, cut: slice) -> None:
    sample = good()
    setattr(sample, name, getattr(sample, name)[cut])
    with pytest.raises(SampleError) as error:
        sample.validate()
    assert error.value.field == name
    assert str(error.value.got) in str(error.value)


@pytest.mark.parametrize("name", ARRAY_FIELDS)
def test_every_dtype_and_shape_must_fit(name: str) -> None:
    for wrong in (getattr(good(), name).astype(np.float64), getattr(good(), name)[None], getattr(good(), name).tolist()):
        sample = good()
        setattr(sample, name, wrong)
        with pytest.raises(SampleError) as error:
            sample.validate()
        assert error.value.field == name


BROKEN_RULES = pytest.mark.parametrize(
    ("field", "change"),
    [
        ("labels", changed("labels", 3, 39)),
        ("labels", changed("labels", 0, 5)),
        ("attention_mask", changed("attention_mask", 2, 0)),
        ("response_ids", changed("response_ids", 0, 39)),
        ("response_ids", changed("labels", 3, -100)),
        ("response_indices", changed("response_indices", 4, -1)),
        ("response_indices", changed("response_indices", 5, 0)),
        ("output_versions", changed("output_versions", 0, -1)),
        ("old_logprobs", changed("old_logprobs", 3, -np.inf)),
        ("old_logprobs", changed("old_logprobs", 3, np.nan)),
        ("old_logprobs", changed("old_logprobs", 3, 0.5)),
        ("old_logprobs", changed("old_logprobs", 5, -0.5)),
        ("token_rewards", changed("token_rewards", 4, np.inf)),
        ("token_rewards", changed("token_rewards", 0, 1)),
        ("token_advantages", changed("token_advantages", 3, np.nan)),
        ("token_advantages", changed("token_advantages", 5, 1)),
        ("advantage", replaced("advantage", float("nan"))),
        ("reward", replaced("reward", float("inf"))),
        ("episode_return", replaced("episode_return", float("nan"))),
    ],
)


@BROKEN_RULES
def test_each_rule_names_its_field(field: str, change: Callable[[RLSample], None]) -> None:
    sample = good()
    change(sample)
    with pytest.raises(SampleError) as error:
        sample.validate()
    assert error.value.field == field


def check_joined(samples: list[RLSample]) -> None:
    """As at every hop: joined, by the codec."""
    decode_samples(encode_samples(samples))


@BROKEN_RULES
@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_rule_is_found_among_joined_samples(field: str, change: Callable[[RLSample], None], place: int) -> None:
    samples = [good() for _ in range(3)]
    check_joined(samples)
    change(samples[place])
    with pytest.raises(SampleError) as error:
        check_joined(samples)
    assert error.value.field == field


def trains_at(places: list[int], response_ids: list[int]) -> RLSample:
    """The good sample's tokens, trained at `places`, consistent but for `response_ids`."""
    sample = good()
    rest = [index for index in range(6) if index not in places]
    sample.labels[:], sample.response_indices[:] = sample.input_ids, 0
    sample.old_logprobs[:] = sample.token_rewards[:] = sample.token_advantages[:] = -0.5
    for name, nothing in (("labels", -100), ("old_logprobs", 0), ("token_rewards", 0), ("token_advantages", 0), ("response_indices", -1)):
        getattr(sample, name)[rest] = nothing
    sample.response_ids = np.array(response_ids, np.int32)
    sample.output_versions = np.zeros(len(response_ids), np.int32)
    return sample


def test_joined_samples_that_hide_each_others_faults_are_found() -> None:
    """The second has the trained token that the first one lacks: joined, every array fits."""
    check_joined([trains_at([3], [40]), trains_at([3, 4, 5], [40, 41, 8])])
    with pytest.raises(SampleError, match="response_ids"):
        check_joined([trains_at([3], [40, 40]), trains_at([3, 4, 5], [41, 8])])


def test_a_first_token_that_trains_is_found_among_joined_samples() -> None:
    with pytest.raises(SampleError, match="index 0 untrained"):
        check_joined([good(), trains_at([0, 3], [5, 40])])


def test_what_each_sample_allows_its_group_allows_too() -> None:
    """And the other way round: the joined check is the same rule."""
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(300):
        samples = [trains_at([3, 4], [40, 41]) for _ in range(int(rng.integers(1, 4)))]
        for _ in range(int(rng.integers(0, 3))):
            array = getattr(samples[rng.integers(len(samples))], str(rng.choice(list(ARRAY_FIELDS))))
            array[rng.integers(len(array))] = rng.choice([0, 1, -100, 40])
        arrays = [np.concatenate([getattr(sample, name) for sample in samples]) for name in ARRAY_FIELDS]
        floats = np.stack([arrays[list(ARRAY_FIELDS).index(name)] for name in FLOAT_FIELDS])
        verdicts.append(joined_hold(arrays, floats, list(map(len, samples)), [sample.num_trained for sample in samples]))
        assert verdicts[-1] == all(map(is_valid, samples))
    assert 50 < sum(verdicts) < 250


def is_valid(sample: RLSample) -> bool:
    try:
        sample.validate()
    except SampleError:
        return False
    return True


def test_a_sample_that_trains_nothing_is_refused() -> None:
    sample = good()
    sample.labels[:] = -100
    with pytest.raises(SampleError, match="at least 1 trained token"):
        sample.validate()
