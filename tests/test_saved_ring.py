"""A ring's content through a saved state: nothing lost, nothing doubled, on the same and on other numbers of ranks."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_factory import assert_same
from trainer_cases import Rig, config_for, made_sample

from accerl_mp import files, recovery
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.dealer import Dealer, Schedule
from accerl_mp.ingest.restore import make_rings
from accerl_mp.ingest.strikes import StrikesFile
from accerl_mp.recovery import SavedState, Start, low_water, state_text
from accerl_mp.topology import RunPaths
from accerl_mp.transport.ring import RingReader, RingWriter, SharedRing
from accerl_mp.transport.saved_ring import cut_ring, pack_rank, rank_fields, unpack_rank
from tests.saved_states import state_content

CAPACITY = {"replay_capacity": 32, "replay_bytes": 4 << 20}


class Rank:
    """A ring with its two sides."""

    def __init__(self, path: Path, *, evict_used: bool = False) -> None:
        if not path.exists():
            SharedRing.create(path, 32, 4 << 20)
        self.writer: RingWriter = SharedRing.attach_writer(path, evict_used=evict_used)
        self.reader: RingReader = SharedRing.attach_reader(path)
        self._rng = np.random.default_rng(0)

    def put(self, group_id: int, count: int = 4, *, version: int = 0) -> None:
        group = [made_sample(self._rng, 2, group_id=group_id, episode_id=4 * group_id + index) for index in range(count)]
        for sample in group:
            sample.output_versions[:] = version
        assert self.writer.try_put_group(group)

    def release(self, group_id: int, count: int = 4) -> None:
        """Train this many of a group's samples, once each."""
        for record in [record for record in self.reader.ready() if record.group_id == group_id][:count]:
            self.reader.mark_used(record)
            self.reader.release(record, "trained")

    def content(self) -> list[tuple[int, int, int, int, int, int]]:
        return [(r.group_id, r.episode_id, r.uses, r.oldest_version, r.newest_version, r.group_size) for r in self.reader.ready()]

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def save(folder: Path, ranks: list[Rank], *, version: int = 5) -> Start:
    """As `trainer.saving` does it, without a model."""
    cuts = [cut_ring(rank.reader) for rank in ranks]
    folder.mkdir()
    for index, cut in enumerate(cuts):
        (folder / f"rank-{index}.msgpack").write_bytes(pack_rank({"random": b""}, cut.groups))
    next_number, done = max(cut.next_number for cut in cuts), {number for cut in cuts for number in cut.done}
    low, above = low_water(next_number, done, first=0)
    groups = {"next": next_number, "low_water": low, "done_above": above}
    content = state_content(1, version, num_ranks=len(ranks), groups=groups)
    (folder / "state.json").write_text(state_text(content))
    return Start(str(folder), first_version=version + 3)


def restored(
    folder: Path, start: Start, num_ranks: int, monkeypatch: pytest.MonkeyPatch, *, run: str = "run", **options: Any
) -> list[Rank]:
    monkeypatch.setattr(RunPaths, "ring", lambda self, rank: self.run_dir / f"ring-{rank}")
    (folder / run).mkdir(exist_ok=True)
    paths, config = RunPaths(folder / run), config_for(folder, fsdp_world_size=num_ranks, **(CAPACITY | options))
    make_rings(paths, config, start, FlopsEstimate())
    assert sorted(path.name for path in paths.run_dir.iterdir()) == [f"ring-{rank}" for rank in range(num_ranks)]
    return [Rank(paths.ring(rank)) for rank in range(num_ranks)]


@pytest.fixture
def two(tmp_path: Path) -> list[Rank]:
    """Groups 0 to 7 dealt: 0 trained, 1 half trained, 2 without signal, 3 and 5 in the rings, 4 and 6 with rollouts, 7 in ring 1."""
    ranks = [Rank(tmp_path / f"old-{index}") for index in range(2)]
    ranks[0].put(0)
    ranks[0].release(0)
    ranks[0].put(1, version=2)
    ranks[0].release(1, 2)
    ranks[0].writer.remember_group(2)
    ranks[1].put(3, version=4)
    ranks[0].put(5, version=5)
    ranks[1].put(7, version=5)
    ranks[0].writer.next_number = 8
    return ranks


def test_a_cut_leaves_out_what_is_committed_after_it_began(two: list[Rank]) -> None:
    cut = cut_ring(two[0].reader)
    assert [group.group_id for group in cut.groups] == [1, 5]
    assert sorted(cut.done) == [0, 1, 2, 5]
    assert [group.is_started for group in cut.groups] == [True, False]
    two[0].put(9)  # after the cut, and not yet noted as dealt
    assert cut_ring(two[0].reader).next_number == 10, "a group that is done was dealt, whatever the note says"
    for rank in two:
        rank.close()


class Interrupted:
    """A reader beside which ingest commits a group once the cut has begun."""

    def __init__(self, rank: Rank, group_id: int) -> None:
        self._rank, self._group_id = rank, group_id
        self.memory, self.ready, self.read_all = self, rank.reader.ready, rank.reader.read_all

    @property
    def writer(self) -> np.ndarray:
        return self._rank.reader.memory.writer

    @property
    def recent(self) -> np.ndarray:
        self._rank.writer.next_number = self._group_id + 1
        self._rank.put(self._group_id)
        return self._rank.reader.memory.recent

    @property
    def next_number(self) -> int:
        return self._rank.reader.next_number


def test_a_rank_file_beyond_the_limit_of_texts_is_read_like_any_other(
    two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings hold gigabytes. What could be saved can be loaded."""
    (tmp_path / "rank-0.msgpack").write_bytes(pack_rank({"random": b"x"}, cut_ring(two[0].reader).groups))
    monkeypatch.setattr(files, "MOST_BYTES", 64)
    with pytest.raises(OSError, match="File too large"):
        files.read_text(tmp_path / "rank-0.msgpack")
    assert rank_fields(tmp_path / "rank-0.msgpack") == {"random": b"x"}
    fields, groups = unpack_rank(tmp_path / "rank-0.msgpack")
    assert (fields, sum(len(group.samples) for group in groups)) == (
        {"random": b"x"},
        sum(len(g.samples) for g in cut_ring(two[0].reader).groups),
    )
    assert recovery.checksum(tmp_path / "rank-0.msgpack")
    for rank in two:
        rank.close()


def test_a_group_that_is_committed_during_a_cut_is_dealt_again(two: list[Rank]) -> None:
    """Neither in the rings of the next start nor among what is done there."""
    cut = cut_ring(Interrupted(two[0], 9))  # type: ignore[arg-type]
    assert two[0].writer.has_group(9)
    assert ([group.group_id for group in cut.groups], sorted(cut.done), cut.next_number) == ([1, 5], [0, 1, 2, 5], 10)
    for rank in two:
        rank.close()


def test_a_group_of_which_nothing_is_gone_is_begun_once_it_was_used(two: list[Rank]) -> None:
    """With reuse a sample stays after its training."""
    two[0].reader.mark_used(next(record for record in two[0].reader.ready() if record.group_id == 5))
    assert {group.group_id: group.is_started for group in cut_ring(two[0].reader).groups} == {1: True, 5: True}
    for rank in two:
        rank.close()


def test_what_is_too_much_for_its_own_ring_goes_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(tmp_path / f"old-{index}") for index in range(2)]
    ranks[0].put(0, 2)
    ranks[1].put(1)
    ranks[1].put(2)
    ranks[0].writer.next_number = 3
    new = restored(tmp_path, save(tmp_path / "state", ranks), 2, monkeypatch, replay_capacity=6)
    assert [sorted({entry[0] for entry in rank.content()}) for rank in new] == [[0, 2], [1]]
    for rank in [*ranks, *new]:
        rank.close()


def test_what_was_begun_comes_first_and_is_never_dealt_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the groups 0 to 3 the last two were half trained. Where only one of them finds room, the other is done without its rest."""
    ranks = [Rank(tmp_path / f"old-{index}") for index in range(2)]
    for group_id in range(4):
        ranks[group_id % 2].put(group_id)
    for group_id in (2, 3):
        ranks[group_id % 2].release(group_id, 2)
    ranks[0].writer.next_number = 4
    new = restored(tmp_path, save(tmp_path / "state", ranks), 1, monkeypatch, replay_capacity=4)
    assert {entry[0] for entry in new[0].content()} == {2, 3}
    assert new[0].writer.recent_group_ids == {2, 3}, "the others are dealt again"
    new[0].close()
    fewer = restored(tmp_path, save(tmp_path / "again", ranks), 1, monkeypatch, run="fewer", replay_capacity=3)
    assert {entry[0] for entry in fewer[0].content()} == {2}
    assert fewer[0].writer.recent_group_ids == {2, 3}
    for rank in [*ranks, *fewer]:
        rank.close()


def test_the_same_ranks_get_their_own_samples_back_with_uses_and_lags(
    two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for record in two[1].reader.ready()[:4]:
        two[1].reader.mark_used(record)
    start = save(tmp_path / "state", two)
    new = restored(tmp_path, start, 2, monkeypatch)
    for before, after in zip(two, new, strict=True):
        # Versions move on by 3: the next push is 8 with the weights of 5, so lags are what they were.
        assert after.content() == [(g, e, uses, oldest + 3, newest + 3, size) for g, e, uses, oldest, newest, size in before.content()]
        for one, other in zip(before.reader.ready(), after.reader.ready(), strict=True):
            assert_same(after.reader.read(other), before.reader.read(one))  # type: ignore[arg-type]
    assert new[0].writer.next_number == 8
    done = set().union(*(rank.writer.recent_group_ids for rank in new))
    assert done == {0, 1, 2, 3, 5, 7}
    dealer = Dealer.resume(Schedule(0, 5, 4), 1, next_number=8, done=done, window=2048)
    assert dealer.orphans == {4, 6}, "what rollouts had is dealt again, nothing else"
    for rank in two + new:
        rank.close()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks_share_whole_groups(
    num_ranks: int, two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [entry for rank in two for entry in rank.content()]
    new = restored(tmp_path, save(tmp_path / "state", two), num_ranks, monkeypatch)
    assert sorted(entry[1] for rank in new for entry in rank.content()) == sorted(entry[1] for entry in before)
    homes = [{entry[0] for entry in rank.content()} for rank in new]
    assert sum(len(groups) for groups in homes) == 4, "each group in one ring"
    assert all(homes)
    for rank in two + new:
        rank.close()


def test_what_finds_no_room_is_dealt_again_unless_it_was_begun(two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = restored(tmp_path, save(tmp_path / "state", two), 1, monkeypatch, replay_capacity=7)
    assert {entry[0] for entry in new[0].content()} == {1, 3}, "the half trained group first, then what fits"
    done = new[0].writer.recent_group_ids
    assert done == {0, 1, 2, 3}
    assert Dealer.resume(Schedule(0, 5, 4), 1, next_number=8, done=done, window=2048).orphans == {4, 5, 6, 7}
    for rank in [*two, *new]:
        rank.close()


def test_an_ingest_killed_while_it_restores_leaves_its_successor_the_same(
    two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ring has its name already, the other is half filled."""
    start = save(tmp_path / "state", two)
    first = restored(tmp_path, start, 2, monkeypatch)
    expected = [rank.content() for rank in first]
    for rank in first:
        rank.close()
    os.rename(tmp_path / "run/ring-1", tmp_path / "run/ring-1.restored")
    half = Rank(tmp_path / "run/ring-1.restored")
    half.put(99)
    half.close()
    second = restored(tmp_path, start, 2, monkeypatch)
    assert [rank.content() for rank in second] == expected
    for rank in two + second:
        rank.close()


def test_a_chosen_pack_is_chosen_again(tmp_path: Path) -> None:
    rig, other = (Rig(make(tmp_path / name), replay_order="uniform") for name in ("a", "b"))
    for _ in range(7):
        assert rig.put()
        assert other.put()
    rig.train()
    taken = rig.replay.try_take(0)
    state = rig.replay.state(taken)
    assert other.replay.restore(state, has_started=True) is None, "its ring begins with other records"
    kept = {(record.group_id, record.episode_id) for record in rig.reader.ready()}
    for record in other.reader.ready():
        if (record.group_id, record.episode_id) not in kept:
            other.reader.release(record, "trained")
    again = other.replay.restore(state, has_started=True)
    assert again is not None
    names = [[(sample.group_id, sample.episode_id) for sample in batch] for batch in taken.micro_batches]
    assert [[(sample.group_id, sample.episode_id) for sample in batch] for batch in again.micro_batches] == names
    rig.replay.commit(taken, 0)
    other.replay.commit(again, 0)
    assert rig.train() == other.train(), "the random order goes on"
    rig.close()
    other.close()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_strikes_outlive_ingest_and_a_skipped_game_is_not_dealt_again(tmp_path: Path) -> None:
    schedule = Schedule(seed=0, num_games=3, group_size=1)
    dealer = Dealer(schedule, 1)
    file = StrikesFile(tmp_path / "strikes.json", dealer, Start())
    bad = schedule.game_of(0)
    for _ in range(3):
        deal = dealer.next_deal(0, 1, may_train=True)
        while deal is not None and deal.game_id != bad:
            dealer.finish(deal.group_id)
            deal = dealer.next_deal(0, 1, may_train=True)
        dealer.fail(deal.group_id, "broken")
    assert dealer.set_aside == {bad}
    file.save_if_changed()
    done = {number for number in range(9) if schedule.game_of(number) != bad}
    successor = Dealer.resume(schedule, 1, next_number=9, done=done, window=2048)
    StrikesFile(tmp_path / "strikes.json", successor, Start())
    assert successor.set_aside == {bad}
    assert successor.orphans == set()


def test_a_start_tries_all_games_again_where_every_one_was_set_aside(tmp_path: Path) -> None:
    """Their folder was away for a while, most likely; groups that were being played are not forgotten."""
    (tmp_path / "strikes.json").write_text(json.dumps({"strikes": [["train", 0, 3]], "set_aside": [0, 1, 2]}))
    dealer = Dealer.resume(Schedule(seed=0, num_games=3, group_size=1), 1, next_number=3, done={0}, window=2048)
    orphans = set(dealer.orphans)
    StrikesFile(tmp_path / "strikes.json", dealer, Start())
    assert dealer.set_aside == set()
    assert dealer.orphans == orphans != set()
    assert json.loads((tmp_path / "strikes.json").read_text()) == {"strikes": [], "set_aside": []}


def test_an_ingest_that_starts_again_needs_no_state_that_is_gone(two: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--keep-checkpoints removes what the run went on from long before an ingest dies: rings and strikes are its own by then."""
    start = save(tmp_path / "state", two)
    content = SavedState.open(tmp_path / "state").content
    strikes = {"strikes": [["game", 0, 2]], "set_aside": [1]}
    (tmp_path / "state" / "state.json").write_text(state_text(content | {"strikes": strikes}))
    schedule = Schedule(seed=0, num_games=3, group_size=1)

    def ingest(*, wants: list[int]) -> None:
        new = restored(tmp_path, start, 2, monkeypatch)
        dealer = Dealer(schedule, 1)
        StrikesFile(tmp_path / "strikes.json", dealer, start)
        assert sorted(dealer.set_aside) == wants
        assert {entry[0] for rank in new for entry in rank.content()} == {1, 3, 5, 7}
        for rank in new:
            rank.close()

    ingest(wants=[1])
    shutil.rmtree(tmp_path / "state")
    ingest(wants=[1])
    (tmp_path / "strikes.json").unlink()  # a full disk
    ingest(wants=[])
    for rank in two:
        rank.close()
