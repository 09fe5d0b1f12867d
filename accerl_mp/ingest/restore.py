"""The rings of a start that goes on from a saved state: filled before anybody sees them.

A ring is made under another name and renamed once all are filled, so an ingest that is killed here leaves either rings that
are whole or none; who gets what follows from the state alone, so its successor makes the rest as they would have been.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.rings import Rings
from accerl_mp.recovery import SavedState, Start
from accerl_mp.topology import RunPaths
from accerl_mp.transport.ring import SharedRing
from accerl_mp.transport.ring_memory import PAGE_BYTES, RingError
from accerl_mp.transport.saved_ring import SavedGroup, latest, shifted, unpack_rank

_log = logging.getLogger(__name__)


def make_rings(paths: RunPaths, config: Config, start: Start, flops: FlopsEstimate) -> None:
    """Make every ring file that is not there. RingError where /dev/shm is too small.

    The state is read only then: it may be gone (`--keep-checkpoints`) by the time at which an ingest is started again.
    """
    ranks = range(config.run.fsdp_world_size or 1)
    missing = [rank for rank in ranks if not paths.ring(rank).exists()]
    if not missing:
        return
    saved = start.saved
    if saved is None:
        for rank in missing:
            _create(paths.ring(rank), config)
        return
    unfinished = [paths.ring(rank).with_name(f"{paths.ring(rank).name}.restored") for rank in ranks]
    for path in unfinished:
        path.unlink(missing_ok=True)  # of an ingest that was killed here
        _create(path, config)
    _fill(unfinished, config, saved, start.first_version - saved.version, flops)
    for rank, path in zip(ranks, unfinished, strict=True):
        if rank in missing:
            path.rename(paths.ring(rank))
        else:
            path.unlink()


def _create(path: Path, config: Config) -> None:
    SharedRing.create(path, config.replay.replay_capacity or 1, config.replay.replay_bytes or PAGE_BYTES)


def _fill(files: Sequence[Path], config: Config, saved: SavedState, num_versions: int, flops: FlopsEstimate) -> None:
    """Ledger and groups. A group for which there is no room is left out: dealt again, unless some of it was trained already."""
    writers = [SharedRing.attach_writer(path) for path in files]
    rings = Rings(writers, flops, reuse=config.replay.max_sample_reuse)
    groups = [(rank, group) for rank in range(saved.num_ranks) for group in unpack_rank(saved.rank_file(rank))[1]]
    has_same_ranks = saved.num_ranks == len(writers)
    if not has_same_ranks:  # what was begun first: it must not be dealt again
        groups.sort(key=lambda entry: (not entry[1].is_started, entry[1].group_id))
    ledger = saved.content["groups"]
    next_number = ledger["next"]
    done = {*range(ledger["low_water"]), *ledger["done_above"]} - {group.group_id for _, group in groups}
    for group_id in latest(done, next_number):
        rings.remember(group_id)
    rings.note_next_number(next_number)
    num_left = 0
    for rank, group in groups:
        if not _put(rings, rank if has_same_ranks else None, shifted(group, num_versions)):
            num_left += 1
            if group.is_started:
                rings.remember(group.group_id)
    _log.info("restored %d groups in the rings from %s; next group %d", len(groups) - num_left, saved.folder, next_number)
    if num_left:
        _log.warning("%d groups of the saved state found no room in the rings: played again, or dropped where half trained", num_left)
    rings.close()


def _put(rings: Rings, own: int | None, group: SavedGroup) -> bool:
    """Into its own rank's ring if the number of ranks is the same, else (or if that is full) where the least work waits."""
    order = rings.order([len(sample) for sample in group.samples])
    if own is not None:
        order = [own, *(rank for rank in order if rank != own)]
    versions = list(zip(group.oldest, group.newest, strict=True))
    try:
        return any(rings.writers[rank].restore_group(group.samples, uses=group.uses, versions=versions, size=group.size) for rank in order)
    except RingError as error:  # --replay-bytes is smaller now
        _log.warning("group %d of the saved state: %s", group.group_id, error)
        return False
