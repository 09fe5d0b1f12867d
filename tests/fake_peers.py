"""Scripted peers of a rollout process over real sockets: an inference process and an ingest, each a thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, codec, sockets
from accerl_mp.transport.outbox import Outboxes


class Peer:
    """A thread with ROUTER sockets that answers messages until `stop()`."""

    def __init__(self, paths: RunPaths, names: tuple[str, ...], index: int = 0) -> None:
        self._context = sockets.new_context()
        self._sockets = {name: sockets.bind_router(self._context, paths, name, index) for name in names}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Any:
        self._thread.start()
        return self

    def stop(self) -> None:
        """As a kill: what lies in the sockets is lost."""
        self._ended.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def answer(self, channel: str, identity: bytes, frames: list[bytes]) -> None:
        raise NotImplementedError

    def idle(self) -> None:
        """Called about every 5 ms."""

    def send(self, channel: str, identity: bytes, data: bytes) -> None:
        self._sockets[channel].send_multipart([identity, data])

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        while not self._ended.is_set():
            ready = dict(poller.poll(5))
            for name, socket in self._sockets.items():
                if socket in ready:
                    identity, *frames = socket.recv_multipart()
                    self.answer(name, identity, frames)
            self.idle()
        for socket in self._sockets.values():
            socket.close()
        self._context.term()


Answer = Callable[[dict[str, Any], int], dict[str, Any] | None]
"""(request, how many came before it) to fields of its reply; None: no answer at all."""


class FakeInference(Peer):
    """Answers each request with `answer`; `text_ids` makes the fields of an ordinary reply."""

    def __init__(self, paths: RunPaths, answer: Answer, index: int = 0) -> None:
        super().__init__(paths, (channels.REQUESTS,), index)
        self._answer = answer
        self.requests: list[dict[str, Any]] = []

    def answer(self, channel: str, identity: bytes, frames: list[bytes]) -> None:
        request = channels.unpack("request", frames[0])
        self.requests.append(request)
        fields = self._answer(request, len(self.requests) - 1)
        if fields is not None:
            empty = {"ids": b"", "logprobs": b"", "versions": b"", "finish_reason": "stop", "salt_version": 4, "error": None}
            self.send(channel, identity, channels.pack("reply", {"id": request["id"]} | empty | fields))


def reply_fields(ids: list[int], *, version: int = 0, finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "ids": np.array(ids, np.int32).tobytes(),
        "logprobs": np.full(len(ids), -0.5, np.float32).tobytes(),
        "versions": np.full(len(ids), version, np.int32).tobytes(),
        "finish_reason": finish_reason,
    }


@dataclass
class Ledger:
    """What outlives a killed ingest: the groups to play, those committed (the rings), and what was seen on the way."""

    deals: dict[int, dict[str, Any]]
    committed: dict[int, list[Any]] = field(default_factory=dict)
    episodes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    num_doubles: int = 0
    most_unacked: int = 0

    @property
    def is_done(self) -> bool:
        return self.deals.keys() == self.committed.keys() | self.failed.keys()


class FakeIngest(Peer):
    """Deals the ledger's groups one an ask and acknowledges what is committed, as `transport/channels.py` says.

    acks: False keeps every ack back. die_after: ends without an ack after so many committed groups.
    """

    def __init__(self, paths: RunPaths, ledger: Ledger, *, acks: bool = True, die_after: int | None = None) -> None:
        super().__init__(paths, (channels.WORK, channels.SAMPLES))
        self.ledger, self._acks, self._die_after = ledger, acks, die_after
        self._outboxes = Outboxes(paths)
        self._num_committed = 0
        self._unacked: set[int] = set()
        self._dealt: set[int] = set()

    def answer(self, channel: str, identity: bytes, frames: list[bytes]) -> None:
        if channel == channels.SAMPLES:
            self._commit(identity, frames)
            return
        message = channels.unpack_any(frames[0])
        if message["op"] == "failed":
            self.ledger.failed[message["group_id"]] = message["reason"]
            return
        self._dealt &= set(channels.unpack("ask", frames[0])["holding"])  # what the rollout does not hold never arrived
        taken = self._dealt | set(message["holding"]) | self.ledger.committed.keys() | self.ledger.failed.keys()
        left = [group_id for group_id in self.ledger.deals if group_id not in taken]
        if not left:
            self.send(channel, identity, channels.pack("wait", {"op": "wait"}))
            return
        self._dealt.add(left[0])
        self.send(channel, identity, channels.pack("group", {"op": "group", "policy_version": 0} | self.ledger.deals[left[0]]))

    def _whole(self, message: dict[str, Any], frames: list[bytes]) -> list[bytes]:
        """Copies: what lies in an outbox changes after the ack."""
        return [bytes(frame) for frame in self._outboxes.frames(message, frames)]

    def _commit(self, identity: bytes, frames: list[bytes]) -> None:
        message, ledger = channels.unpack("played", frames[0]), self.ledger
        group_id = message["group_id"]
        if group_id in ledger.committed:
            ledger.num_doubles += 1
        else:
            ledger.committed[group_id] = codec.decode_samples(self._whole(message, frames[1:])) if len(frames) > 1 else []
            ledger.episodes[group_id], ledger.outcomes[group_id] = message["episodes"], message["outcome"]
            self._num_committed += 1
        self._unacked.add(group_id)
        ledger.most_unacked = max(ledger.most_unacked, len(self._unacked))
        if self._num_committed == self._die_after:
            self._ended.set()
        elif self._acks:
            self._unacked.discard(group_id)
            self.send(channels.SAMPLES, identity, channels.pack("ack", {"op": "ack", "group_id": group_id}))


def make_deals(game_path: str, *, num_groups: int, group_size: int, kind: str = "train") -> dict[int, dict[str, Any]]:
    return {
        group_id: {
            "group_id": group_id,
            "episode_ids": list(range(group_id * group_size, (group_id + 1) * group_size)),
            "game_id": 0,
            "game_path": game_path,
            "seeds": list(range(group_size)),
            "kind": kind,
            "eval_id": -1,
        }
        for group_id in range(num_groups)
    }
