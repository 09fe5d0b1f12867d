"""Samples to measure with: random tokens in the shape of recorded TextWorld episodes.

`textworld_lengths.json` holds what runs with `--record-samples` trained, one [tokens, trained tokens, turns] a sample;
`python bench/episodes.py RUN/samples NAME` adds such a run to it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from accerl_mp.samples import UNTRAINED, RLSample

RECORDED = Path(__file__).with_name("textworld_lengths.json")


class Shape(NamedTuple):
    """Of one sample."""

    num_tokens: int
    num_trained: int
    num_turns: int


def recorded_names() -> list[str]:
    return list(json.loads(RECORDED.read_text()))


def recorded_shapes(name: str) -> list[Shape]:
    """`demo`: episodes of at most 6 turns and 1,536 tokens. `long`: at most 20 turns and 4,000 tokens."""
    return [Shape(*numbers) for numbers in json.loads(RECORDED.read_text())[name]["shapes"]]


def draw_shapes(rng: np.random.Generator, name: str) -> Iterator[Shape]:
    """Recorded shapes for ever, in random order."""
    shapes = recorded_shapes(name)
    while True:
        yield from (shapes[index] for index in rng.permutation(len(shapes)))


def make_sample(rng: np.random.Generator, shape: Shape, *, vocab_size: int = 1500, group_id: int = 0, episode_id: int = 0) -> RLSample:
    """Turns of equal length, the trained tokens at the end of each."""
    num_tokens, num_trained, num_turns = shape
    ids = rng.integers(3, vocab_size, num_tokens, dtype=np.int32)
    turns = np.full(num_tokens, -1, np.int32)
    ends = np.linspace(0, num_tokens, num_turns + 1, dtype=int)[1:]
    for turn, (end, count) in enumerate(zip(ends, np.diff(np.linspace(0, num_trained, num_turns + 1, dtype=int)), strict=True)):
        turns[max(1, end - count) : end] = turn
    trained = turns >= 0
    trained_count = int(trained.sum())
    advantage = float(rng.normal())
    return RLSample(
        algorithm="grpo",
        input_ids=ids,
        attention_mask=np.ones(num_tokens, np.uint8),
        labels=np.where(trained, ids, UNTRAINED).astype(np.int32),
        old_logprobs=np.where(trained, -5 * rng.random(num_tokens), 0).astype(np.float32),
        token_rewards=np.zeros(num_tokens, np.float32),
        token_advantages=np.where(trained, advantage, 0).astype(np.float32),
        response_indices=turns,
        response_ids=ids[trained],
        output_versions=np.zeros(trained_count, np.int32),
        advantage=advantage,
        group_id=group_id,
        episode_id=episode_id,
        num_turns=num_turns,
    ).validate()


def _add(folder: Path, name: str) -> None:
    from accerl_mp.config import Config
    from accerl_mp.trainer.recording import load_step, recorded_shape

    num_steps, num_ranks = recorded_shape(folder)
    steps = [load_step(folder, step, rank) for step in range(num_steps) for rank in range(num_ranks)]
    samples = [sample for step in steps for batch in step.micro_batches for sample in batch]
    config = Config.load(folder / "args.json")
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known[name] = {
        "tw_max_episode_steps": config.games.tw_max_episode_steps,
        "tw_history_token_window": config.games.tw_history_token_window,
        "optimizer_steps": num_steps,
        "shapes": [[len(sample), sample.num_trained, sample.num_turns] for sample in samples],
    }
    RECORDED.write_text(json.dumps(known, separators=(",", ":")).replace('"shapes"', '\n"shapes"').replace("]]},", "]]},\n") + "\n")


if __name__ == "__main__":
    _add(Path(sys.argv[1]), sys.argv[2])
