"""Bodies in shared memory: what ingest reads there is what the rollout wrote, whoever dies, or it is found out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from sample_factory import assert_same, make_group

from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.inbox import Inbox
from accerl_mp.ingest.rings import Rings
from accerl_mp.launcher.sweep import sweep
from accerl_mp.samples import RLSample
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, outbox, sockets
from accerl_mp.transport.channels import MAX_UNACKED, MessageError
from accerl_mp.transport.codec import CodecError, decode_group
from accerl_mp.transport.outbox import BodyGone, Outbox, Outboxes
from accerl_mp.transport.ring import RingReader, SharedRing


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path)
    yield paths
    sweep(paths)


def played(group_id: int) -> dict[str, Any]:
    return {"op": "group", "group_id": group_id, "kind": "train", "eval_id": -1, "outcome": "samples", "episodes": []}


def received(boxes: Outboxes, frames: list[Any]) -> list[RLSample]:
    """As ingest takes a message's frames."""
    message, *rest = map(bytes, frames)
    return decode_group(*boxes.frames(channels.unpack("played", message), rest)).samples


def test_a_group_is_read_where_it_was_written(paths: RunPaths) -> None:
    box, boxes = Outbox(paths, 3), Outboxes(paths)
    for number in range(20):
        group = make_group(number, 4, num_tokens=50 + 333 * (number % 5))
        frames = box.pack(played(number), group)
        assert len(frames) == 2, "its body is no frame"
        for before, after in zip(group, received(boxes, frames), strict=True):
            assert_same(before, after)
        box.free(number)
    box.close()
    assert not list(paths.board.parent.glob(f"accerl-{paths.run_id}-*"))


def test_a_group_without_samples_is_its_message_alone(paths: RunPaths) -> None:
    assert len(Outbox(paths, 0).pack(played(1), [])) == 1


def test_a_place_stays_as_it_is_until_its_group_is_acknowledged(paths: RunPaths) -> None:
    """Random sizes and orders of acks; what finds no place travels in the message."""
    box, boxes, rng, held = Outbox(paths, 0), Outboxes(paths), np.random.default_rng(0), {}
    num_inline = 0
    for number in range(300):
        group = make_group(number, int(rng.integers(1, 5)), num_tokens=int(rng.integers(10, 1500)))
        held[number] = group, (frames := box.pack(played(number), group))
        num_inline += len(frames) == 3
        assert sum(len(sent) == 2 for _, sent in held.values()) <= MAX_UNACKED + 1
        for expected, sent in held.values():
            for before, after in zip(expected, received(boxes, sent), strict=True):
                assert_same(before, after)
        while len(held) > rng.integers(0, MAX_UNACKED + 3):
            done = int(rng.choice(list(held)))
            del held[done]
            box.free(done)
    assert 0 < num_inline < 200
    largest = 5 * (MAX_UNACKED + 1) * 1600 * 33
    assert next(iter(paths.board.parent.glob(f"accerl-{paths.run_id}-outbox-*"))).stat().st_blocks * 512 <= largest


@pytest.mark.parametrize("limit", [1, 5000])
def test_a_group_too_large_for_the_box_travels_in_the_message(paths: RunPaths, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BYTES", limit)
    group = make_group(1, 2, num_tokens=500)
    frames = Outbox(paths, 0).pack(played(1), group)
    assert len(frames) == 3
    for before, after in zip(group, received(Outboxes(paths), frames), strict=True):
        assert_same(before, after)


def test_without_shared_memory_it_travels_in_the_message(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox.os, "posix_fallocate", full)
    assert len(Outbox(paths, 0).pack(played(1), make_group(1, 2))) == 3


def test_every_changed_byte_of_a_body_is_found(paths: RunPaths) -> None:
    box, boxes = Outbox(paths, 0), Outboxes(paths)
    frames = box.pack(played(1), make_group(1, 2, num_tokens=20))
    place = channels.unpack("played", frames[0])["body"]
    for index in range(place["start"], place["start"] + place["size"]):
        box._memory[index] ^= 1 << index % 8
        with pytest.raises(CodecError):
            received(boxes, frames)
        box._memory[index] ^= 1 << index % 8
    received(boxes, frames)


def test_a_dead_rollouts_groups_can_be_read_until_its_successor_begins(paths: RunPaths) -> None:
    first, boxes = Outbox(paths, 2), Outboxes(paths)
    group = make_group(1, 3)
    frames = first.pack(played(1), group)
    late = first.pack(played(2), make_group(2, 3))
    message, header = map(bytes, frames)
    waiting = decode_group(*boxes.frames(channels.unpack("played", message), [header]))
    other = Outbox(paths, 20)
    other.pack(played(9), make_group(9, 3))
    second = Outbox(paths, 2)
    assert received(Outboxes(paths), late), "its file is still there"
    new = second.pack(played(3), make_group(3, 3, num_tokens=900))
    with pytest.raises(BodyGone):
        received(Outboxes(paths), late)
    assert [sample.group_id for sample in received(boxes, new)] == [3, 3, 3]
    for before, after in zip(group, waiting.samples, strict=True):
        assert_same(before, after)
    assert len(list(paths.board.parent.glob(f"accerl-{paths.run_id}-outbox-*"))) == 2, "worker 20's was left alone"


STRANGE_PLACES = [
    *({"name": name} for name in ("../../etc/passwd", "0-1/../x", "", 3)),
    *({"start": start} for start in (-8, 1 << 62, "0")),
    *({"size": size} for size in (-1, 1 << 40, None)),
]


@pytest.mark.parametrize("change", STRANGE_PLACES)
def test_a_place_that_is_none_is_refused(paths: RunPaths, change: dict[str, Any]) -> None:
    frames = Outbox(paths, 0).pack(played(1), make_group(1, 2))
    message = channels.unpack("played", frames[0])
    for body in (message["body"] | change, 7, [], "text"):
        with pytest.raises(MessageError):
            Outboxes(paths).frames(message | {"body": body}, frames[1:])


class _Dealer:
    next_number = 100

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.failed: list[int] = []

    def finish(self, group_id: int) -> None:
        self.finished.append(group_id)

    def fail(self, group_id: int, reason: str) -> None:
        self.failed.append(group_id)


class _Rig:
    """A real inbox and ring for 4 samples, and the socket of rollout/0."""

    def __init__(self, paths: RunPaths) -> None:
        sockets.make_folder(paths)
        SharedRing.create(paths.ring(0), 4, 1 << 20)
        self.context, self.dealer = sockets.new_context(), _Dealer()
        self.rings = Rings([SharedRing.attach_writer(paths.ring(0))], FlopsEstimate(), reuse=1)
        self.reader: RingReader = SharedRing.attach_reader(paths.ring(0))
        self.inbox = Inbox(self.context, paths, rings=self.rings, dealer=self.dealer, take_evaluated=print)  # type: ignore[arg-type]
        self.socket = sockets.connect_dealer(self.context, paths, channels.SAMPLES, identity="rollout/0")

    def send(self, frames: list[Any]) -> None:
        self.socket.send_multipart(frames)
        assert sockets.wait_readable([self.inbox.socket], 10)
        self.inbox.receive()
        self.inbox.put()

    def acks(self) -> list[int]:
        found = []
        while self.socket.poll(200):
            found.append(channels.unpack("ack", self.socket.recv(zmq.DONTWAIT))["group_id"])
        return found

    def close(self) -> None:
        self.socket.close()
        self.inbox.close()
        self.context.term()
        self.rings.close()
        self.reader.close()


def test_a_group_that_waits_for_room_outlives_its_rollout(paths: RunPaths) -> None:
    rig, first = _Rig(paths), Outbox(paths, 0)
    groups = [make_group(number, 4, num_tokens=100) for number in range(3)]
    rig.send(first.pack(played(0), groups[0]))
    rig.send(first.pack(played(1), groups[1]))
    assert rig.acks() == [0]
    second = Outbox(paths, 0)
    rig.send(second.pack(played(2), groups[2]))
    for group in groups:
        records = rig.reader.ready()
        for before, after in zip(group, rig.reader.read_all(records), strict=True):
            assert_same(before, after)
        for record in records:
            rig.reader.release(record, "trained")
        rig.inbox.put()
    assert rig.acks() == [1, 2]
    assert rig.dealer.failed == []
    rig.close()


def test_a_group_whose_body_is_gone_is_neither_done_nor_a_strike(paths: RunPaths) -> None:
    """It counts as with its rollout, whose successor does not hold it: so it is dealt again."""
    rig, first = _Rig(paths), Outbox(paths, 0)
    late = first.pack(played(1), make_group(1, 4))
    Outbox(paths, 0).pack(played(2), make_group(2, 4))
    rig.send(late)
    assert (rig.acks(), rig.dealer.finished, rig.dealer.failed) == ([], [], [])
    rig.send(late[:1])
    assert rig.dealer.failed == [], "without its header likewise"
    rig.close()


def test_a_body_that_changed_is_played_again(paths: RunPaths) -> None:
    rig, box = _Rig(paths), Outbox(paths, 0)
    frames = box.pack(played(1), make_group(1, 4))
    box._memory[50] ^= 1
    rig.send(frames)
    assert (rig.acks(), rig.dealer.finished, rig.dealer.failed) == ([1], [], [1])
    rig.close()
