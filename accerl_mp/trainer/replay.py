"""What a rank trains next: chosen from its own ring, by age and size, whole or not at all.

A step's samples are copied out of the ring before the step starts; the ring's slots are given back once all ranks have
agreed that it does.
"""

import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from accerl_mp.algorithms.packing import choose_packs
from accerl_mp.config import Config, sample_bytes_bound
from accerl_mp.samples import RLSample, SampleError
from accerl_mp.transport.process import Process
from accerl_mp.transport.ring import ReadySample, RingReader, SharedRing
from accerl_mp.transport.saved_ring import RingCut, cut_ring

_RING_TIMEOUT_S = 300.0

_log = logging.getLogger(__name__)


@dataclass
class StepSamples:
    """One optimizer step's samples on one rank: a list for each micro-batch, none empty."""

    micro_batches: list[list[RLSample]]
    records: list[ReadySample]
    """Where they came from, in no particular order."""
    choose_seconds: float = 0.0
    """CPU time to choose and copy them."""

    @property
    def samples(self) -> list[RLSample]:
        return [sample for batch in self.micro_batches for sample in batch]


@dataclass
class ReplayCounts:
    """Since the last `take_counts()`."""

    fetched: int = 0
    valid: int = 0
    invalid: int = 0
    """Refused, or of a group with a member that was refused or damaged."""
    consumed: int = 0
    torn: int = 0
    uses: int = 0
    expired_lengths: list[int] = field(default_factory=list)
    """Tokens of each expired sample."""
    reused_lengths: list[int] = field(default_factory=list)
    """Tokens of each trained sample that had been trained before."""
    lags_oldest: list[int] = field(default_factory=list)
    lags_newest: list[int] = field(default_factory=list)


class Replay:
    """The reader's side of one ring. Never waits: `try_take` gives None and says in the ring how many samples it wants to see."""

    def __init__(self, ring: RingReader, config: Config, *, rank: int = 0) -> None:
        self._ring, self._config = ring, config
        self._random = np.random.default_rng([config.run.seed, rank])
        self._counts = ReplayCounts()
        self._has_started = False
        self._is_full = False
        self._seen = 0
        """The ring's last sequence when it was looked at last."""

    @property
    def num_used(self) -> int:
        """Samples of this ring trained so far, each use counted."""
        return max(self._ring.num_uses, self._ring.num_trained)

    def try_take(self, version: int) -> StepSamples | None:
        """The next optimizer step's samples for weights of `version`, copied out of the ring, or None if more must come first.

        Nothing is used up: `commit` does that. Expired groups are released.
        """
        started = time.thread_time()
        self._seen = self._ring.last_sequence
        chosen = self._choose(self._usable(version))
        while chosen is not None:
            records = [record for batch in chosen for record in batch]
            samples = self._read_all(records)
            broken = {record.group_first for record, sample in zip(records, samples, strict=True) if sample is None}
            if not broken:
                break
            self._drop(broken)
            chosen = self._choose(self._usable(version))
        if chosen is None:
            return None
        self._ring.num_wanted = 0
        return StepSamples(_split(samples, map(len, chosen)), records, time.thread_time() - started)

    def sleep(self, timeout_s: float) -> None:
        """Until the ring holds more than at the last `try_take`, at most `timeout_s` and `--replay-wait-sleep-seconds`."""
        self._ring.sleep(self._seen, min(timeout_s, self._config.replay.replay_wait_sleep_seconds))

    def commit(self, taken: StepSamples, version: int) -> None:
        """The step starts on all ranks: count the uses, give back the slots of samples that were used often enough."""
        limit = self._config.replay.max_sample_reuse
        self._has_started = True
        for record in taken.records:
            uses = self._ring.mark_used(record)
            if limit and uses >= limit:
                self._ring.release(record, "trained")
            self._counts.uses += uses
            if uses > 1:
                self._counts.reused_lengths.append(record.num_tokens)
            self._counts.lags_oldest.append(max(0, version - record.oldest_version))
            self._counts.lags_newest.append(max(0, version - record.newest_version))
        self._counts.consumed += len(taken.records)

    def let_go(self) -> None:
        """Release whatever is in the ring, untrained: training is over, and a full ring would keep rollouts from the last evaluation."""
        for record in self._ring.ready():
            self._ring.release(record, "left")

    def cut(self) -> RingCut:
        """The ring's content at this moment, for a saved state."""
        return cut_ring(self._ring)

    def state(self, taken: StepSamples | None) -> dict[str, Any]:
        """Of the random order, and of `taken`, which was chosen and not committed: what `restore` needs beside the ring."""
        records = self._ring.ready()
        place = {record.sequence: index for index, record in enumerate(records)}
        chosen = [record.sequence for record in taken.records] if taken else []
        is_there = all(sequence in place for sequence in chosen)
        return {
            "random": json.dumps(self._random.bit_generator.state),
            "group_ids": [record.group_id for record in records],
            "chosen": [place[sequence] for sequence in chosen] if is_there else [],
            "batch_sizes": [len(batch) for batch in taken.micro_batches] if taken and is_there else [],
        }

    def restore(self, state: dict[str, Any], *, has_started: bool) -> StepSamples | None:
        """Go on as the Replay that gave `state` would; returns what it had chosen, if the ring begins as that one's did."""
        self._random.bit_generator.state = json.loads(state["random"])
        self._has_started = has_started
        records = self._ring.ready()[: len(state["group_ids"])]
        if not state["chosen"] or [record.group_id for record in records] != state["group_ids"]:
            return None
        chosen = [records[index] for index in state["chosen"]]
        samples = self._read_all(chosen)
        if any(sample is None for sample in samples):
            return None
        return StepSamples(_split(samples, state["batch_sizes"]), chosen)

    def take_counts(self) -> ReplayCounts:
        counts, self._counts = self._counts, ReplayCounts()
        return counts

    def _usable(self, version: int) -> list[ReadySample]:
        """Records that may be trained, in the order in which they should be."""
        replay = self._config.replay
        records = self._without_expired(self._ring.ready(), version)
        self._note_room(records)
        if replay.max_sample_reuse:
            records = [record for record in records if record.uses < replay.max_sample_reuse]
        if replay.replay_order == "uniform":
            return [records[index] for index in self._random.permutation(len(records))]
        return sorted(records, key=lambda record: (record.uses, record.sequence))

    def _without_expired(self, records: list[ReadySample], version: int) -> list[ReadySample]:
        """Drop whole groups whose oldest token is too old, so that no group is trained in part."""
        limit = self._config.replay.max_policy_lag
        if not limit:
            return records
        expired = {record.group_first for record in records if version - record.oldest_version > limit}
        for record in records:
            if record.group_first in expired:
                self._ring.release(record, "expired")
                self._counts.expired_lengths.append(record.num_tokens)
        return [record for record in records if record.group_first not in expired] if expired else records

    def _choose(self, records: list[ReadySample]) -> list[list[ReadySample]] | None:
        batch = self._config.batch
        needed = batch.batch_size * batch.grad_accum_steps
        minimum = 0 if self._has_started else self._config.replay.min_replay_size_per_rank or 0
        chosen = None
        if len(records) >= minimum or self._is_full:
            chosen = self._choose_packs(records) if batch.train_packing == "varlen" else self._choose_rows(records, needed)
        if chosen is None:
            missing = max(self._num_needed(records), minimum, len(records) + 1) - len(records)
            self._ring.num_wanted = sum(record.uses == 0 for record in records) + missing
        return chosen

    def _num_needed(self, records: list[ReadySample]) -> int:
        """Samples of an optimizer step on this rank; for packs an estimate from the lengths in the ring."""
        batch = self._config.batch
        most = batch.batch_size * batch.grad_accum_steps
        if batch.train_packing != "varlen" or not records:
            return most
        mean_tokens = sum(record.num_tokens for record in records) / len(records)
        return min(most, math.ceil(batch.grad_accum_steps * (batch.train_token_budget or 1) / mean_tokens))

    def _choose_packs(self, records: list[ReadySample]) -> list[list[ReadySample]] | None:
        batch = self._config.batch
        assert batch.train_token_budget is not None
        packs = choose_packs(
            [record.num_tokens for record in records],
            num_packs=batch.grad_accum_steps,
            token_budget=batch.train_token_budget,
            max_samples=batch.batch_size,
            pool_size=batch.train_pack_candidate_pool_size or 4 * batch.batch_size,
            must_start=self._is_full,
        )
        return None if packs is None else [[records[index] for index in pack] for pack in packs]

    def _choose_rows(self, records: list[ReadySample], needed: int) -> list[list[ReadySample]] | None:
        """Samples of like length share a micro-batch: less padding. The gradient does not depend on the split."""
        num_batches = self._config.batch.grad_accum_steps
        if len(records) < (num_batches if self._is_full else needed):
            return None
        taken = sorted(records[:needed], key=lambda record: record.num_tokens)
        return [[taken[index] for index in part] for part in np.array_split(np.arange(len(taken)), num_batches)]

    def _note_room(self, live: list[ReadySample]) -> None:
        """Whether another group fits into the ring; if none does, waiting for one would never end."""
        ring, group_size = self._ring, self._config.largest_group
        num_kept, free_bytes = len(live), ring.free_bytes
        if self._config.replay.max_sample_reuse != 1:  # the writer makes room: used samples go
            num_kept, free_bytes = sum(record.uses == 0 for record in live), ring.most_free_bytes
        group_bytes = group_size * sample_bytes_bound(self._config.batch.max_length)
        self._is_full = ring.capacity - num_kept < group_size or free_bytes < group_bytes

    def _drop(self, groups: set[int]) -> None:
        """What is left of groups that lost a member: relative to the whole group, the advantages of the rest are biased."""
        for record in self._ring.ready():
            if record.group_first in groups:
                self._ring.release(record, "refused")
                self._counts.invalid += 1

    def _read_all(self, records: list[ReadySample]) -> list[RLSample | None]:
        """Checked copies; None for one that is gone, damaged or not for this trainer (then it is released)."""
        return [self._accepted(record, sample) for record, sample in zip(records, self._ring.read_all(records), strict=True)]

    def _accepted(self, record: ReadySample, sample: RLSample | None) -> RLSample | None:
        self._counts.fetched += 1
        if sample is None:
            self._counts.torn += 1
            return None
        try:
            self._check(sample)
        except SampleError as error:
            _log.warning("episode %d is not trained: %s", sample.episode_id, error)
            self._counts.invalid += 1
            self._ring.release(record, "refused")
            return None
        self._counts.valid += 1
        return sample

    def _check(self, sample: RLSample) -> None:
        """What the codec's own check cannot know."""
        algorithm, max_length = self._config.algorithm.rl_algorithm, self._config.batch.max_length
        if sample.algorithm != algorithm:
            raise SampleError("algorithm", algorithm, sample.algorithm)
        if len(sample) > max_length:
            raise SampleError("input_ids", f"at most {max_length} tokens (--max-length)", len(sample))


def _split(samples: Iterable[RLSample | None], sizes: Iterable[int]) -> list[list[RLSample]]:
    """In order, that many to each micro-batch; none is missing any more."""
    in_order = iter(samples)
    return [list(islice(in_order, size)) for size in sizes]  # type: ignore[arg-type]


def attach_ring(process: Process, rank: int) -> RingReader:
    """waits for      ingest to make the ring, at most 5 minutes"""
    path = process.paths.ring(rank)
    with process.health.waiting(f"ingest/0 to make ring/{rank}", timeout_s=_RING_TIMEOUT_S) as wait:
        while not path.exists():
            wait.check()
            time.sleep(0.05)
    return SharedRing.attach_reader(path)
