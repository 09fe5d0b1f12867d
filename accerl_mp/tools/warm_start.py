"""Batches for `tools.sft`: token ids with a role each, from walks or from chat pairs. Imports no TextWorld code of its own."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accerl_mp.rollout.actions import normalise
from accerl_mp.rollout.prompt import SYSTEM, invalid_message, turn_message
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat, Transcript
from accerl_mp.tools.renaming import draw_renaming, made_up_words, name_words, renamer
from accerl_mp.tools.walks import ReplyKind, Walk

UNTRAINED, PROMPT, REPLY, MISTAKE = range(4)
"""Role of a token: padding and invalid replies; prompt; reply to imitate; admissible reply that is not the best."""
_ROLES: dict[ReplyKind, int] = {"best": REPLY, "mistake": MISTAKE, "invalid": UNTRAINED}
BATCHES_PER_DRAW = 4
"""Examples are drawn for so many batches at a time and sorted by length, so that padding is little."""


@dataclass(frozen=True)
class Example:
    """T token ids and their roles."""

    ids: list[int]
    roles: list[int]


class WalkExamples:
    """Walks as the transcripts that rollout would build, with things renamed and, half the time, commands shuffled."""

    def __init__(self, walks: list[Walk], tokenizer: Tokenizer, chat: ChatFormat, *, max_length: int) -> None:
        self._walks, self._tokenizer, self._chat, self._max_length = walks, tokenizer, chat, max_length
        self._others = made_up_words() + name_words(name for walk in walks for name in walk.names)
        self.sizes = [sum(len(turn.text) + sum(map(len, turn.commands)) + len(walk.objective) for turn in walk.turns) for walk in walks]
        """Characters of each walk."""

    def build(self, index: int, rng: random.Random) -> Example:
        walk = self._walks[index]
        rename = renamer(draw_renaming(walk.names, self._others, rng))
        transcript = Transcript(self._tokenizer, self._chat, SYSTEM)
        roles: list[int] = []
        rejected = None
        for turn, observation in zip(walk.turns, walk.observations(rng), strict=True):
            message = turn_message(observation) if rejected is None else invalid_message(rejected, observation)
            prompt = transcript.add_message(rename(message))
            transcript.add_reply_text(rename(turn.reply))
            roles += [PROMPT] * len(prompt)
            roles += [_ROLES[turn.kind]] * (len(transcript.ids) - len(roles))
            if len(roles) >= self._max_length:
                break
            rejected = normalise(turn.reply) or turn.reply if turn.kind == "invalid" else None
        return Example(transcript.ids[: self._max_length], roles[: self._max_length])


class PairExamples:
    """(question, answer) pairs as one-turn transcripts."""

    def __init__(self, pairs: list[tuple[str, str]], tokenizer: Tokenizer, chat: ChatFormat, *, max_length: int) -> None:
        self._pairs, self._tokenizer, self._chat, self._max_length = pairs, tokenizer, chat, max_length
        self.sizes = [len(question) + len(answer) for question, answer in pairs]

    def build(self, index: int, rng: random.Random) -> Example:
        question, answer = self._pairs[index]
        transcript = Transcript(self._tokenizer, self._chat, "You are a helpful assistant.")
        prompt = transcript.add_message(question)
        transcript.add_reply_text(answer)
        roles = [UNTRAINED] * len(prompt) + [REPLY] * (len(transcript.ids) - len(prompt))
        roles = roles[: self._max_length]
        roles[-1] = REPLY  # a question that fills --max-length still trains its last token
        return Example(transcript.ids[: self._max_length], roles)


class Batches(IterableDataset):
    """Endless batches of {"input_ids", "roles"}, both int64 [B, S].

    Batch k depends on the seed and k alone, not on the number of workers.
    """

    def __init__(self, examples: WalkExamples | PairExamples, *, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        index, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            yield self.batch(index * self._world_size + self._rank)
            index += stride

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Batch number `index` of all ranks'."""
        draw, place = divmod(index, BATCHES_PER_DRAW)
        rng = random.Random(f"{self._seed}-{draw}")
        sizes = self._examples.sizes
        drawn = sorted(rng.choices(range(len(sizes)), k=self._batch_size * BATCHES_PER_DRAW), key=sizes.__getitem__)
        place = rng.sample(range(BATCHES_PER_DRAW), BATCHES_PER_DRAW)[place]
        rng = random.Random(f"{self._seed}-{draw}-{place}")
        return pad([self._examples.build(i, rng) for i in drawn[place * self._batch_size : (place + 1) * self._batch_size]])


def batch_loader(batches: Batches, num_workers: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches in order, built by `num_workers` processes (0: by this one)."""
    return iter(DataLoader(batches, batch_size=None, num_workers=num_workers, prefetch_factor=8 if num_workers else None, pin_memory=False))


def pad(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Rows padded on the right; padding is UNTRAINED."""
    width = max(len(example.ids) for example in examples)
    ids = np.zeros((len(examples), width), np.int64)
    roles = np.full((len(examples), width), UNTRAINED, np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        roles[row, : len(example.roles)] = example.roles
    return {"input_ids": torch.from_numpy(ids), "roles": torch.from_numpy(roles)}
