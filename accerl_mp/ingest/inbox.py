"""Played groups: taken from the samples channel, checked, put into a ring, then acknowledged."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accerl_mp.ingest.dealer import Dealer
from accerl_mp.ingest.rings import Rings
from accerl_mp.samples import SampleError
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import MessageError
from accerl_mp.transport.codec import CodecError, SampleGroup, decode_group
from accerl_mp.transport.outbox import BodyGone, Outboxes
from accerl_mp.transport.ring_memory import RingError

_LARGEST_ID = 1 << 62

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A group for which no ring has room yet."""

    sender: bytes
    group: SampleGroup


@dataclass(slots=True)
class SampleSizes:
    """What a group with samples was like so far."""

    num_groups: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    def add(self, group: SampleGroup) -> None:
        self.num_groups += 1
        self.num_samples += len(group)
        self.num_tokens += sum(group.lengths)
        self.num_bytes += group.size_bytes


class Inbox:
    """The samples channel's side of ingest.

    when full      a group waits here without an ack; its rollout holds at most MAX_UNACKED of them, then it stops
    doubles        are acknowledged and dropped: the rings remember the ids of groups, also for the next ingest
    """

    def __init__(
        self, context: sockets.Context, paths: RunPaths, *, rings: Rings, dealer: Dealer, take_evaluated: Callable[[dict[str, Any]], None]
    ) -> None:
        self._rings, self._dealer, self._take_evaluated = rings, dealer, take_evaluated
        self._waiting: dict[int, _Waiting] = {}
        self._outboxes = Outboxes(paths)
        self.socket = sockets.bind_router(context, paths, channels.SAMPLES)
        self.counts: Counter[str] = Counter()
        """Groups by what became of them: samples, zero_std, rejected, double, broken, too_large."""
        self.sizes = SampleSizes()

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        return len(self._waiting)

    def receive(self) -> None:
        for sender, frames in sockets.receive_all(self.socket):
            try:
                self._take(sender, channels.unpack("played", frames[0]), frames[1:])
            except (MessageError, IndexError) as error:
                _log.error("%s sent a group that is none: %s", sender.decode(errors="replace"), error)

    def put(self) -> None:
        """Into the rings, oldest first, as long as there is room."""
        while self._waiting:
            group_id, waiting = next(iter(self._waiting.items()))
            try:
                if not self._rings.try_put(waiting.group):
                    return
            except RingError as error:
                _log.error("group %d is left out: %s", group_id, error)
                self.counts["too_large"] += 1
                self._rings.remember(group_id, "too_large")
            del self._waiting[group_id]
            self._ack(waiting.sender, group_id)

    def close(self) -> None:
        self.socket.close()

    def _take(self, sender: bytes, message: dict[str, Any], frames: list[bytes | memoryview]) -> None:
        group_id = message["group_id"]
        if message["kind"] == "eval":
            for record in message["episodes"]:
                channels.check_record(record)
            self._take_evaluated(message)
            self._ack(sender, group_id)
        elif group_id in self._waiting:
            self._waiting[group_id].sender = sender  # sent again, because there is no room yet
        elif self._rings.has_group(group_id):
            self.counts["double"] += 1
            self._ack(sender, group_id)
        else:
            self._take_new(sender, message, frames)

    def _take_new(self, sender: bytes, message: dict[str, Any], frames: list[bytes | memoryview]) -> None:
        group_id, outcome = message["group_id"], message["outcome"]
        if outcome not in channels.OUTCOMES or not 0 <= group_id < self._dealer.next_number:
            raise MessageError(f"group {group_id} with outcome {outcome!r} was never dealt")
        try:
            group = _decode(message, self._outboxes.frames(message, frames)) if outcome == "samples" else None
        except BodyGone as error:
            _log.info("group %d of %s went with its process and is dealt again: %s", group_id, sender.decode(errors="replace"), error)
            return
        except (CodecError, SampleError, MessageError) as error:
            _log.error("group %d of %s is broken, it will be played again: %s", group_id, sender.decode(errors="replace"), error)
            self.counts["broken"] += 1
            self._dealer.fail(group_id, str(error))
            self._ack(sender, group_id)
            return
        self.counts[outcome] += 1
        self._dealer.finish(group_id)
        if group is not None:
            self.sizes.add(group)
            self._waiting[group_id] = _Waiting(sender, group)
        else:
            self._rings.remember(group_id, outcome)
            self._ack(sender, group_id)

    def _ack(self, sender: bytes, group_id: int) -> None:
        self.socket.send_multipart([sender, channels.pack("ack", {"op": "ack", "group_id": group_id})])


def _decode(message: dict[str, Any], frames: list[bytes | memoryview]) -> SampleGroup:
    if len(frames) != 2:
        raise MessageError(f"outcome is 'samples', but {len(frames)} frames follow, not header and body")
    group = decode_group(*frames)
    if not len(group):
        raise MessageError("outcome is 'samples', but there are none")
    if strangers := set(group.column("group_id")) - {message["group_id"]}:
        raise MessageError(f"has samples of groups {sorted(strangers)}")
    if any(not 0 <= number < _LARGEST_ID for number in group.column("episode_id") + group.column("game_id")):
        raise MessageError("has samples of impossible episodes or games")  # a ring's words would not hold them
    return group
