"""Where every training episode is: the books of a run, kept by counters in the rings that survive the death of any process.

    groups dealt = put into a ring + without samples (zero_std, rejected, too_large, set_aside) + in flight
    samples put  = trained + expired + evicted + refused + torn + left + in the rings

The left sides and each term on the right are counted where they happen, by different processes; `in flight` is the dealer's own
list. So a group that was lost or counted twice shows as an imbalance.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accerl_mp.files import write_atomically
from accerl_mp.ingest.dealer import Dealer
from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.ring_view import ENDS, RingView

_MOST_LOOKS = 100
_SAMPLE_ENDS = ("trained", "expired", "evicted", "refused", "torn", "left")


@dataclass(frozen=True)
class Books:
    """A snapshot."""

    started: int
    """Groups dealt, each once however often it was dealt again; of this start of the run."""
    ends: dict[str, int]
    """Groups by how they ended (`ENDS`)."""
    in_flight: int
    """Groups that a rollout has, that will be dealt again, or that wait for room in a ring."""
    samples_put: int
    samples: dict[str, int]
    """Samples by what became of them."""
    in_rings: int

    @property
    def imbalance(self) -> tuple[int, int]:
        """Groups and samples that are missing (positive) or too many; (0, 0) where nothing was lost or doubled."""
        groups = self.started - sum(self.ends.values()) - self.in_flight
        return groups, self.samples_put - sum(self.samples.values()) - self.in_rings

    def to_json(self) -> dict[str, Any]:
        groups, samples = self.imbalance
        return {
            "groups": {"started": self.started, **self.ends, "in_flight": self.in_flight, "imbalance": groups},
            "samples": {"put": self.samples_put, **self.samples, "in_rings": self.in_rings, "imbalance": samples},
        }

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")


def balance(rings: Sequence[RingView], dealer: Dealer, *, num_waiting: int) -> Books:
    """The books as they are now. `num_waiting`: groups that wait for room in a ring."""
    counted = _sums(rings)
    in_flight, first = dealer.num_train_running + num_waiting, rings[0].memory.writer
    ends = {end: counted[end] for end in ENDS}
    if not first[at.EARLIER]:  # the first look of this start: what an earlier start has ended is no concern of these books
        first[at.EARLIER] = 1 + dealer.next_number - sum(ends.values()) - in_flight
    samples = {end: counted[end] for end in _SAMPLE_ENDS}
    started = dealer.next_number - (int(first[at.EARLIER]) - 1)
    return Books(started, ends, in_flight, counted["committed"], samples, counted["live"])


def _sums(rings: Sequence[RingView]) -> dict[str, int]:
    """All counters of all rings, of one moment: a rank may release samples while they are read."""
    before = _read(rings)
    for _ in range(_MOST_LOOKS):
        before, after = _read(rings), before
        if after == before:
            break
    return before


def _read(rings: Sequence[RingView]) -> dict[str, int]:
    counts = [ring.counters() for ring in rings]
    sums = {reason: sum(count[reason][0] for count in counts) for reason in counts[0]}
    return sums | {"live": sum(ring.num_live for ring in rings)}
