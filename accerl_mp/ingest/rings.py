"""The rings of all ranks, as their one writer sees them."""

import logging
from collections.abc import Sequence

import numpy as np

from accerl_mp.config import Config
from accerl_mp.ingest.balance import FlopsEstimate, RankLoad, order_by_count, order_ranks
from accerl_mp.topology import RunPaths
from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.codec import SampleGroup
from accerl_mp.transport.health import Health
from accerl_mp.transport.ring import SharedRing
from accerl_mp.transport.ring_memory import PAGE_BYTES, RingBusy
from accerl_mp.transport.ring_view import num_pages_of
from accerl_mp.transport.ring_writer import RingWriter

_ATTACH_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)


class Rings:
    """One RingWriter a rank."""

    def __init__(self, writers: Sequence[RingWriter], flops: FlopsEstimate, *, reuse: int, by_count: bool = False) -> None:
        self.writers, self._flops, self._reuse, self._by_count = writers, flops, reuse, by_count

    @classmethod
    def open(cls, paths: RunPaths, config: Config, health: Health, flops: FlopsEstimate) -> "Rings":
        """Take over the files that `restore.make_rings` has made, or that an earlier ingest of this run has left.

        waits for      the earlier ingest to be gone, at most 30 s
        """
        replay, writers = config.replay, []
        for rank in range(config.run.fsdp_world_size or 1):
            with health.waiting(f"{paths.ring(rank).name} to be left by the last ingest", timeout_s=_ATTACH_TIMEOUT_S) as wait:
                while (writer := _try_attach(paths, rank, evict_used=replay.max_sample_reuse != 1)) is None:
                    wait.check()
            writers.append(writer)
        by_count = config.run.synchronous and config.batch.train_packing == "padded"
        return cls(writers, flops, reuse=replay.max_sample_reuse, by_count=by_count)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def has_group(self, group_id: int) -> bool:
        return any(writer.has_group(group_id) for writer in self.writers)

    @property
    def done(self) -> set[int]:
        """Groups that are in a ring, were, or left no samples: the latest of them."""
        return set().union(*(writer.recent_group_ids for writer in self.writers))

    @property
    def next_number(self) -> int:
        return self.writers[0].next_number

    def note_next_number(self, number: int) -> None:
        """Before a group is dealt: whoever ingests after us must not give its number to another."""
        self.writers[0].next_number = number

    def remember(self, group_id: int, end: str = "") -> None:
        """A group without samples: done all the same. `end`: how (`ring_view.ENDS`)."""
        self.writers[0].remember_group(group_id, end)

    def try_put(self, group: SampleGroup) -> bool:
        """Give the group whole to the rank that needs it most and has room. False: no rank has."""
        return any(self.writers[rank].try_put_group(group) for rank in self.order(group.lengths))

    def order(self, lengths: Sequence[int]) -> list[int]:
        """Ranks in the order in which a group with samples of these lengths is offered."""
        if len(self.writers) == 1:
            return [0]
        loads = self.loads()
        return order_by_count(loads) if self._by_count else order_ranks(loads, self._flops, np.array(lengths))

    def loads(self) -> list[RankLoad]:
        loads = []
        for rank, writer in enumerate(self.writers):
            slots, rows = writer.live()
            uses = writer.uses(slots, rows)
            tokens = rows[uses == 0, at.TOKENS]
            missing = writer.num_wanted - len(tokens) if writer.num_wanted else 0
            given = writer.num_uses + float(np.maximum(0, max(1, self._reuse) - uses).sum())
            loads.append(RankLoad(rank, int(tokens.sum()), self._flops.of(tokens), missing, given))
        return loads

    @property
    def num_waiting(self) -> int:
        """Ranks that wait for samples right now."""
        return sum(writer.num_wanted > 0 for writer in self.writers)

    @property
    def num_used(self) -> int:
        """Samples trained, each use counted."""
        return sum(max(writer.num_uses, writer.num_trained) for writer in self.writers)

    def usable_uses(self, version: int, max_lag: int) -> float:
        """Uses that are left to the samples in the rings that are not too old (`max_lag` 0: none is)."""
        total = 0.0
        for writer in self.writers:
            slots, rows = writer.live()
            left = np.maximum(0, max(1, self._reuse) - writer.uses(slots, rows))
            if max_lag > 0:
                left = left[version - rows[:, at.OLDEST] <= max_lag]
            total += float(left.sum())
        return total

    def groups_that_fit(self, group_size: float, sample_bytes: float) -> int:
        """Whole groups for which there is room, counting what may be evicted."""
        pages_per_group = max(1.0, np.ceil(group_size * sample_bytes / PAGE_BYTES))
        total = 0
        for writer in self.writers:
            slots, rows = writer.live()
            kept = rows[writer.uses(slots, rows) == 0] if writer.evict_used else rows
            free_pages = writer.memory.num_pages - num_pages_of(kept)
            total += int(min((writer.capacity - len(kept)) // group_size, free_pages // pages_per_group))
        return total

    def fill(self) -> tuple[float, float, float]:
        """Samples in the rings, their capacity, and the largest share of a ring that is taken."""
        live = [writer.num_live for writer in self.writers]
        return float(sum(live)), float(sum(writer.capacity for writer in self.writers)), max(writer.fill for writer in self.writers)

    def take_evicted_lengths(self) -> list[int]:
        """Tokens of each sample that was evicted since the last call."""
        lengths = [length for writer in self.writers for length in writer.evicted_lengths]
        for writer in self.writers:
            writer.evicted_lengths.clear()
        return lengths

    def counted(self, reason: str) -> tuple[int, int]:
        """How many, and their tokens, over all rings."""
        counts = [writer.counters()[reason] for writer in self.writers]
        return sum(number for number, _ in counts), sum(tokens for _, tokens in counts)


def _try_attach(paths: RunPaths, rank: int, *, evict_used: bool) -> RingWriter | None:
    try:
        return SharedRing.attach_writer(paths.ring(rank), evict_used=evict_used)
    except RingBusy:
        return None
