"""Valid RLSamples with random content, for tests of codec, ring and ingest."""

import numpy as np

from accerl_mp.samples import ARRAY_FIELDS, SCALAR_FIELDS, UNTRAINED, RLSample
from accerl_mp.transport.channels import EPISODE_RECORD


def make_sample(seed: int = 0, *, num_tokens: int = 60, group_id: int = 0, version: int = 0, **scalars: object) -> RLSample:
    """Turns of 5 untrained and 3 trained tokens, everything else random."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 1000, num_tokens, dtype=np.int32)
    position = np.arange(num_tokens)
    trained = position % 8 >= 5
    trained[-1] |= not trained.any()

    def floats(values: np.ndarray) -> np.ndarray:
        return np.where(trained, values, 0).astype(np.float32)

    values: dict[str, object] = {
        "algorithm": "grpo",
        "advantage": float(rng.normal()),
        "reward": float(rng.normal()),
        "episode_return": float(rng.normal()),
        "group_id": group_id,
        "game_id": seed % 7,
        "episode_id": seed,
        "truncated": bool(seed % 2),
        "won": bool(seed % 3 == 0),
        "num_turns": num_tokens // 8,
    }
    return RLSample(
        input_ids=ids,
        attention_mask=np.ones(num_tokens, np.uint8),
        labels=np.where(trained, ids, UNTRAINED).astype(np.int32),
        old_logprobs=floats(-rng.random(num_tokens)),
        token_rewards=floats(rng.normal(size=num_tokens)),
        token_advantages=floats(rng.normal(size=num_tokens)),
        response_indices=np.where(trained, position // 8, -1).astype(np.int32),
        response_ids=ids[trained],
        output_versions=np.full(int(trained.sum()), version, np.int32),
        **(values | scalars),
    ).validate()


def make_group(group_id: int, size: int = 4, *, num_tokens: int = 60, version: int = 0) -> list[RLSample]:
    return [
        make_sample(group_id * 1000 + index, num_tokens=num_tokens + 8 * index, group_id=group_id, version=version) for index in range(size)
    ]


def make_record(**fields: object) -> dict[str, object]:
    """An episode's record as a rollout sends it."""
    defaults = {bool: False, str: "train", int: 1, (int, float): 1.0}
    return {name: defaults[kind] for name, kind in EPISODE_RECORD.items()} | fields


def assert_same(left: RLSample, right: RLSample) -> None:
    """Bit for bit, types included."""
    for name, dtype in ARRAY_FIELDS.items():
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype == dtype, name
        assert a.tobytes() == b.tobytes(), name
    for name in SCALAR_FIELDS:
        a, b = getattr(left, name), getattr(right, name)
        assert (type(a), a) == (type(b), b), name
