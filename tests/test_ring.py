"""SharedRing: nothing lost, nothing doubled, nothing torn, whoever dies."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ring_peer import GROUP_SIZE, checksum_of, group_of
from sample_factory import assert_same, make_group, make_sample

from accerl_mp.transport import ring_memory as at
from accerl_mp.transport.codec import decode_group, encode_group, encode_samples
from accerl_mp.transport.ring import RingReader, SharedRing
from accerl_mp.transport.ring_memory import PAGE_BYTES, RingBusy, RingError
from accerl_mp.transport.ring_writer import RingWriter


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/accerl-test-{os.getpid()}-{random.randrange(10**9)}-ring-0")
    yield path
    path.unlink(missing_ok=True)


def open_ring(path: Path, capacity: int = 16, size_bytes: int = 1 << 20, *, evict_used: bool = False) -> tuple[RingWriter, RingReader]:
    SharedRing.create(path, capacity, size_bytes)
    return SharedRing.attach_writer(path, evict_used=evict_used), SharedRing.attach_reader(path)


def start(*args: object) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).with_name("ring_peer.py")), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def groups_of(reader: RingReader) -> list[int]:
    """Group ids in the ring, each checked to be whole."""
    ready = reader.ready()
    for group_id in {record.group_id for record in ready}:
        members = [record for record in ready if record.group_id == group_id]
        assert [record.sequence - record.group_first for record in members] == list(range(members[0].group_size))
    return list(dict.fromkeys(record.group_id for record in ready))


def release_all(reader: RingReader) -> None:
    for ready in reader.ready():
        reader.release(ready, "trained")


def test_a_group_comes_out_as_it_went_in(path):
    writer, reader = open_ring(path)
    group = make_group(7, 4, version=3)
    assert writer.try_put_group(group)
    ready = reader.ready()
    for sample, record in zip(group, ready, strict=True):
        assert_same(sample, reader.read(record))
        assert (record.group_id, record.group_size, record.num_tokens, record.num_trained) == (7, 4, len(sample), sample.num_trained)
        assert (record.oldest_version, record.newest_version, record.uses) == (3, 3, 0)
        assert (record.episode_id, record.game_id) == (sample.episode_id, sample.game_id)


@pytest.mark.parametrize("num_tokens", [30, 3000])
def test_a_group_that_came_encoded_goes_in_as_it_came(path, num_tokens):
    writer, reader = open_ring(path, size_bytes=4 << 20)
    group = make_group(7, 3, num_tokens=num_tokens)
    assert writer.try_put_group(decode_group(*encode_samples(group)))
    for sample, record in zip(group, reader.ready(), strict=True):
        assert_same(sample, reader.read(record))


def test_a_body_that_changed_on_its_way_into_the_ring_is_torn(path):
    """Its checksum is the one that was made beside the sample."""
    writer, reader = open_ring(path)
    group = encode_group([make_sample(group_id=1)])
    group.body[40] ^= 1
    writer.try_put_group(group)
    assert reader.read(reader.ready()[0]) is None
    assert reader.counters()["torn"][0] == 1


def test_a_record_of_another_group_in_the_pages_is_torn(path):
    """Whole and valid, but not what the slot says."""
    writer, reader = open_ring(path)
    for number in (1, 2):
        writer.try_put_group([make_sample(number, group_id=number)])
    first, second = reader.ready()
    pages = [int(reader.memory.slots[record.slot, at.FIRST_PAGE]) for record in (first, second)]
    reader.memory.arena[pages[0]] = reader.memory.arena[pages[1]]
    assert [sample is None for sample in reader.read_all([first, second])] == [True, False]
    assert reader.counters()["torn"] == (1, first.num_tokens)


def test_many_are_read_at_once_in_the_order_they_are_asked_for(path):
    writer, reader = open_ring(path, 32)
    groups = [make_group(number, 4) for number in range(5)]
    for group in groups:
        assert writer.try_put_group(group)
    wanted = random.Random(0).sample(reader.ready(), 13)
    for record, sample in zip(wanted, reader.read_all(wanted), strict=True):
        assert_same(sample, groups[record.group_id][record.sequence - record.group_first])


def test_a_group_keeps_its_pages_while_one_of_its_samples_is_live(path):
    writer, reader = open_ring(path, capacity=12, size_bytes=1 << 20)
    writer.try_put_group(make_group(0, 4, num_tokens=300))
    size_bytes = encode_group(make_group(0, 4, num_tokens=300)).size_bytes
    taken = at.pages_for(size_bytes) * PAGE_BYTES
    all_free = writer.memory.num_pages * PAGE_BYTES
    *others, last = reader.ready()
    for record in others:
        reader.release(record, "trained")
    assert (writer.free_bytes, writer.free_slots) == (all_free - taken, 11)
    writer.try_put_group(make_group(1, 3))
    writer.close()
    writer = SharedRing.attach_writer(path)
    assert_same(reader.read(last), make_group(0, 4, num_tokens=300)[-1])
    release_all(reader)
    assert writer.try_put_group(make_group(2, 12))
    assert len(reader.ready()) == 12


def test_records_over_scattered_pages_come_out_whole(path):
    """Small records are freed here and there, so a large one finds no pages in a row."""
    writer, reader = open_ring(path, 32, 1 << 17)
    for number in range(16):
        writer.try_put_group([make_sample(number, num_tokens=200, group_id=number)])
    for record in reader.ready()[::2]:
        reader.release(record, "trained")
    large = make_sample(99, num_tokens=1500, group_id=99)
    assert writer.try_put_group([large])
    record = reader.ready()[-1]
    assert len(at.runs_of(reader.memory.pages_of(reader.memory.slots[record.slot]))) > 1
    assert_same(large, reader.read(record))


def test_the_last_sequence_changes_with_every_put(path):
    writer, reader = open_ring(path)
    seen = [reader.last_sequence]
    for number in range(3):
        writer.try_put_group(make_group(number, 2))
        seen.append(reader.last_sequence)
    assert len(set(seen)) == 4


def test_a_put_wakes_the_reader_that_sleeps(path):
    """Also from another process, and also where the put came before the sleep; else the limit ends it."""
    writer, reader = open_ring(path)
    writer.try_put_group(make_group(0, 2))
    started = time.monotonic()
    reader.sleep(reader.last_sequence - 2, 60.0)
    for number in range(1, 4):
        sleeper = threading.Thread(target=reader.sleep, args=(reader.last_sequence, 60.0))
        sleeper.start()
        time.sleep(0.05)
        writer.try_put_group(make_group(number, 2))
        sleeper.join(60)
    writer.close()
    process = start("write", path, 5, 1)
    reader.sleep(reader.last_sequence, 60.0)
    assert reader.ready()[-1].group_id == 5
    assert time.monotonic() - started < 60, "no limit was waited for"
    process.wait(30)
    reader.sleep(reader.last_sequence, 0.01)


def test_a_read_sample_is_a_private_copy(path):
    writer, reader = open_ring(path)
    writer.try_put_group(make_group(1, 1))
    sample = reader.read(reader.ready()[0])
    before = sample.input_ids.copy()
    reader.memory.arena[:] = 255
    assert (sample.input_ids == before).all()


def test_a_group_appears_only_when_it_is_committed(path):
    writer, reader = open_ring(path)
    seen = []
    original = writer._commit
    writer._commit = lambda *args: (seen.append(reader.ready()), original(*args))
    writer.try_put_group(make_group(1, 4))
    assert seen == [[]]
    assert len(reader.ready()) == 4


def test_a_full_ring_takes_nothing_and_loses_nothing(path):
    writer, reader = open_ring(path, capacity=8)
    assert [writer.try_put_group(make_group(number, 3)) for number in range(3)] == [True, True, False]
    assert writer.counters()["blocked"][0] == 1
    assert groups_of(reader) == [0, 1]
    reader.release(reader.ready()[0], "trained")
    assert writer.try_put_group(make_group(2, 3))
    assert (writer.num_live, writer.free_slots) == (8, 0)


def test_room_is_counted_in_bytes_too(path):
    writer, reader = open_ring(path, capacity=4, size_bytes=8 * PAGE_BYTES)
    large = make_sample(num_tokens=1100, group_id=1)  # 31 kB: 8 pages
    assert at.pages_for(encode_group([large]).size_bytes) == 8
    assert writer.try_put_group([large])
    assert writer.free_bytes == 4 * PAGE_BYTES
    assert not writer.try_put_group([make_sample(num_tokens=1100, group_id=2)])
    assert writer.try_put_group([make_sample(num_tokens=10, group_id=3)])
    release_all(reader)
    assert writer.free_bytes == 12 * PAGE_BYTES
    assert writer.try_put_group([make_sample(num_tokens=1100, group_id=2)])


def test_pages_never_fragment(path):
    """What fits by number of pages fits, whatever was released in between."""
    writer, reader = open_ring(path, capacity=32, size_bytes=64 * PAGE_BYTES)
    rng = random.Random(1)
    for number in range(300):
        sample = make_sample(number, num_tokens=rng.choice([20, 300, 900, 1500]), group_id=number)
        needs = at.pages_for(encode_group([sample]).size_bytes) * PAGE_BYTES
        fits = writer.free_slots > 0 and writer.free_bytes >= needs
        assert writer.try_put_group([sample]) == fits
        ready = reader.ready()
        for record in rng.sample(ready, min(len(ready), rng.randrange(3))):
            expected = make_sample(record.group_id, num_tokens=record.num_tokens, group_id=record.group_id)
            assert_same(expected, reader.read(record))
            reader.release(record, "trained")


def test_a_group_that_can_never_fit_is_an_error_that_names_the_flag(path):
    writer, _ = open_ring(path, capacity=4)
    with pytest.raises(RingError, match="--replay-capacity"):
        writer.try_put_group(make_group(1, 5))


def test_a_double_is_dropped_also_by_the_next_writer(path):
    writer, reader = open_ring(path)
    assert writer.try_put_group(make_group(0, 2))
    assert writer.try_put_group(make_group(1, 2))
    writer.remember_group(2)
    assert writer.try_put_group(make_group(0, 2))
    assert len(reader.ready()) == 4
    release_all(reader)
    writer.close()
    again = SharedRing.attach_writer(path)
    assert again.recent_group_ids == {0, 1, 2}
    for number in (0, 1, 2):
        assert again.try_put_group(make_group(number, 2))
    assert reader.ready() == []
    assert again.counters()["double"][0] == 4


def test_an_id_noted_just_before_its_writer_was_killed_is_not_known(path):
    """Its group was never committed: whoever sends it again must not hear that it is there."""
    writer, reader = open_ring(path)
    writer.try_put_group(make_group(0, 2))
    reader.memory.recent[1] = 77, 4
    writer.close()
    for number in (1, 2):
        with SharedRing.attach_writer(path) as writer:
            writer.try_put_group(make_group(number, 2))
            assert writer.recent_group_ids == set(range(number + 1))


def test_the_newest_ids_are_kept(path):
    writer, _ = open_ring(path)
    for number in range(at.NUM_RECENT + 100):
        writer.remember_group(number)
    assert writer.recent_group_ids == set(range(100, at.NUM_RECENT + 100))
    assert not writer.has_group(99)
    writer.close()
    writer = SharedRing.attach_writer(path)
    writer.remember_group(10**6)
    assert writer.recent_group_ids == set(range(101, at.NUM_RECENT + 100)) | {10**6}


def test_a_mixed_group_is_refused(path):
    writer, _ = open_ring(path)
    for samples in ([], make_group(1, 1) + make_group(2, 1)):
        with pytest.raises(ValueError, match="one group_id"):
            writer.try_put_group(samples)


def test_without_eviction_used_samples_stay(path):
    writer, reader = open_ring(path, capacity=4)
    writer.try_put_group(make_group(0, 4))
    for ready in reader.ready():
        reader.mark_used(ready)
    assert not writer.try_put_group(make_group(1, 4))
    assert groups_of(reader) == [0]


def test_the_oldest_used_group_goes_first_and_whole(path):
    writer, reader = open_ring(path, capacity=9, evict_used=True)
    for number in range(3):
        writer.try_put_group(make_group(number, 3))
    assert not writer.try_put_group(make_group(3, 3)), "nothing was used yet"
    reader.mark_used(next(ready for ready in reader.ready() if ready.group_id == 0))
    for ready in reader.ready():
        if ready.group_id == 1:
            reader.mark_used(ready)
    assert writer.try_put_group(make_group(3, 3))
    assert groups_of(reader) == [0, 2, 3], "group 1 was used wholly, group 0 only in part"
    assert writer.try_put_group(make_group(4, 3))
    assert groups_of(reader) == [2, 3, 4]
    assert not writer.try_put_group(make_group(5, 3))
    assert writer.counters()["evicted"] == (6, sum(len(sample) for number in (0, 1) for sample in make_group(number, 3)))
    assert sorted(writer.evicted_lengths) == sorted(len(sample) for number in (0, 1) for sample in make_group(number, 3))


def test_uses_belong_to_a_record_not_to_its_slot(path):
    writer, reader = open_ring(path, capacity=1, evict_used=True)
    writer.try_put_group(make_group(0, 1))
    old = reader.ready()[0]
    assert [reader.mark_used(old), reader.mark_used(old)] == [1, 2]
    assert reader.ready()[0].uses == 2
    writer.try_put_group(make_group(1, 1))
    assert reader.ready()[0].uses == 0
    reader.mark_used(old)
    reader.release(old, "trained")
    assert [(ready.group_id, ready.uses) for ready in reader.ready()] == [(1, 0)]
    assert reader.num_uses == 3


def test_a_record_evicted_after_listing_reads_as_lost(path):
    writer, reader = open_ring(path, capacity=1, evict_used=True)
    writer.try_put_group(make_group(0, 1))
    old = reader.ready()[0]
    reader.mark_used(old)
    writer.try_put_group(make_group(1, 1))
    assert reader.read(old) is None
    assert reader.counters()["lost"] == (1, old.num_tokens)
    assert reader.counters()["torn"] == (0, 0)


def test_a_record_that_changes_while_it_is_copied_is_lost_not_trained(path):
    writer, reader = open_ring(path, capacity=1, evict_used=True)
    writer.try_put_group(make_group(0, 1))
    old = reader.ready()[0]
    reader.mark_used(old)
    original = reader.memory.pages_of
    reader.memory.pages_of = lambda row: (writer.try_put_group(make_group(1, 1)), original(row))[1]
    assert reader.read(old) is None
    assert reader.counters()["lost"][0] == 1


def test_a_torn_group_is_counted_and_skipped_for_good(path):
    writer, reader = open_ring(path)
    for number in range(3):
        writer.try_put_group(make_group(number, 3))
    torn = [record for record in reader.ready() if record.group_id == 1]
    reader.memory.arena[reader.memory.slots[torn[1].slot, at.FIRST_PAGE], 700] ^= 1
    assert reader.read_all(torn[1:]) == [None, None]
    assert reader.counters()["torn"] == (2, sum(record.num_tokens for record in torn[1:]))
    assert reader.read(torn[0]) is None, "no sample of it can be told from a damaged one"
    assert groups_of(reader) == [0, 2]
    reader.release(torn[0], "torn")
    assert reader.counters()["torn"][0] == 3, "a second release changes nothing"
    assert all(reader.read_all(reader.ready()))
    writer.try_put_group(make_group(3, 10))
    assert writer.num_live == 16


def test_counts_go_by_reason_and_length(path):
    writer, reader = open_ring(path)
    writer.try_put_group(make_group(0, 4))
    records = reader.ready()
    for record, reason in zip(records, ["trained", "expired", "expired", "trained"], strict=True):
        reader.release(record, reason)
    counted = writer.counters()
    assert counted["trained"] == (2, records[0].num_tokens + records[3].num_tokens)
    assert counted["expired"] == (2, records[1].num_tokens + records[2].num_tokens)
    assert counted["committed"] == (4, sum(record.num_tokens for record in records))
    assert (writer.num_trained, writer.num_expired) == (2, 2)
    writer.try_put_group(make_group(1, 1))
    record = reader.ready()[0]
    with pytest.raises(ValueError, match="no such reason"):
        reader.release(record, "no such reason")


def test_watchers_see_what_the_owners_write(path):
    writer, reader = open_ring(path, capacity=8)
    watcher = SharedRing.watch(path)
    reader.num_wanted, writer.next_number = 32, 17
    writer.try_put_group(make_group(0, 4))
    reader.mark_used(reader.ready()[0])
    assert (watcher.num_wanted, watcher.next_number, watcher.num_live, watcher.num_unused, watcher.fill) == (32, 17, 4, 3, 0.5)
    assert watcher.recent_group_ids == {0}


def test_only_one_writer_and_one_reader(path):
    writer, reader = open_ring(path)
    with pytest.raises(RingBusy, match="writer"):
        SharedRing.attach_writer(path)
    with pytest.raises(RingBusy, match="reader"):
        SharedRing.attach_reader(path)
    writer.close()
    reader.close()
    SharedRing.attach_writer(path).close()
    SharedRing.attach_reader(path).close()


def test_a_second_ring_of_the_same_name_is_refused(path):
    SharedRing.create(path, 4, 1 << 16)
    with pytest.raises(RingError, match="there already"):
        SharedRing.create(path, 4, 1 << 16)


def test_a_file_that_is_no_ring_is_refused(path):
    path.write_bytes(bytes(8192))
    with pytest.raises(RingError, match="no ring"):
        SharedRing.watch(path)
    path.write_bytes(b"")
    with pytest.raises(RingError, match="mapped"):
        SharedRing.watch(path)


def test_a_ring_that_does_not_fit_says_how_much_is_needed(path):
    with pytest.raises(RingError, match=r"MiB.*--replay-capacity"):
        SharedRing.create(path, 4, 1 << 50)
    assert not list(Path("/dev/shm").glob(path.name + "*"))


def test_a_writer_process_and_a_reader_process_lose_and_double_nothing(path):
    """Wraps around some 60 times over 24 slots and 60 pages; count, order and checksum of every sample."""
    num_groups = 500
    SharedRing.create(path, 24, 60 * PAGE_BYTES)
    reader, writer = start("read", path, num_groups * GROUP_SIZE), start("write", path, 0, num_groups)
    assert writer.wait(60) == 0
    out, _ = reader.communicate(timeout=60)
    assert out.split() == [str(num_groups * GROUP_SIZE)] * 3 + ["True"]
    ring = SharedRing.watch(path)
    assert ring.num_trained == ring.counters()["committed"][0] == num_groups * GROUP_SIZE
    assert ring.num_live == 0


@pytest.mark.parametrize("where", ["_write_pages", "_write", "_commit", "_free", "_count"])
def test_a_writer_killed_anywhere_leaves_a_ring_that_goes_on(path, where):
    SharedRing.create(path, 9, 1 << 20)
    writer, reader = SharedRing.attach_writer(path, evict_used=True), SharedRing.attach_reader(path)
    for number in range(3):
        assert writer.try_put_group(group_of(number))
    for ready in reader.ready():
        if ready.group_id < 2:
            reader.mark_used(ready)
    writer.close()
    assert start("die", path, where).wait(30) == -signal.SIGKILL
    before = groups_of(reader) if where != "_free" else None
    writer = SharedRing.attach_writer(path, evict_used=True)
    # `_count` is first called after the eviction, so before the put; `_free` in the middle of evicting group 0.
    assert groups_of(reader) == (before or [1, 2]) == [1, 2]
    assert 1000 not in writer.recent_group_ids
    assert writer.try_put_group(group_of(1000))
    assert groups_of(reader) == [1, 2, 1000]
    for ready in reader.ready():
        expected = group_of(ready.group_id)[ready.sequence - ready.group_first]
        assert checksum_of(reader.read(ready)) == checksum_of(expected)
    release_all(reader)
    assert writer.free_slots == 9
    assert writer.free_bytes == writer.memory.num_pages * PAGE_BYTES
    assert writer.try_put_group(make_group(5, 9)), "every slot and page is usable again"


def test_an_eviction_that_was_cut_short_is_finished_by_the_next_writer(path):
    writer, reader = open_ring(path, capacity=6, evict_used=True)
    for number in range(2):
        writer.try_put_group(make_group(number, 3))
    slot = reader.ready()[1].slot
    writer.close()
    reader.memory.slots[slot, at.STATE] = at.EVICTED  # the state in which a writer dies between two of a group's slots
    writer = SharedRing.attach_writer(path)
    assert groups_of(reader) == [1]
    assert writer.free_slots == 3


def test_a_writer_killed_at_random_moments_loses_no_committed_group(path):
    """Each new writer goes on behind the last committed group, as ingest does when rollouts send again."""
    SharedRing.create(path, 24, 60 * PAGE_BYTES)
    reader, rng, seen, deadline = SharedRing.attach_reader(path), random.Random(3), [], time.monotonic() + 60
    for _ in range(6):
        writer = start("write", path, max(reader.recent_group_ids, default=-1) + 1, 10_000)
        goal = len(seen) + rng.randrange(30, 120)
        while len(seen) < goal:
            assert time.monotonic() < deadline
            seen += drain(reader)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    seen += drain(reader)
    numbers = [number for number, _ in seen]
    assert len(seen) == len(set(seen)), "nothing doubled"
    assert seen == [(number, index) for number in range(max(numbers) + 1) for index in range(GROUP_SIZE)], "nothing lost or torn apart"


def drain(reader: RingReader) -> list[tuple[int, int]]:
    taken = []
    for ready in reader.ready():
        sample = reader.read(ready)
        assert sample is not None
        assert_same(sample, group_of(ready.group_id)[ready.sequence - ready.group_first])
        reader.release(ready, "trained")
        taken.append((ready.group_id, ready.sequence - ready.group_first))
    return taken


def test_a_reader_beside_an_evicting_writer_never_sees_a_wrong_sample(path):
    """The seqlock under load: records are evicted and rewritten while they are read."""
    SharedRing.create(path, 12, 40 * PAGE_BYTES)
    code = (
        "import sys, time; from pathlib import Path; from ring_peer import group_of; from accerl_mp.transport.ring import SharedRing\n"
        "writer, number, end = SharedRing.attach_writer(Path(sys.argv[1]), evict_used=True), 0, time.monotonic() + 30\n"
        "while number < 600 and time.monotonic() < end:\n    number += writer.try_put_group(group_of(number))\n"
        "print(number)"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": folders}
    )
    reader, num_read, num_lost = SharedRing.attach_reader(path), 0, 0
    while writer.poll() is None:
        for ready in reader.ready():
            sample = reader.read(ready)
            reader.mark_used(ready)
            num_lost += sample is None
            if sample is not None:
                num_read += 1
                assert (sample.group_id, len(sample), sample.episode_id) == (ready.group_id, ready.num_tokens, ready.episode_id)
    assert int(writer.communicate()[0]) == 600
    assert reader.counters()["torn"] == (0, 0), "a record that changed counts as lost"
    assert reader.counters()["lost"][0] == num_lost
    assert num_read > 100
