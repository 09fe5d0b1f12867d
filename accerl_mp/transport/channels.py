"""The channels between processes: who talks to whom, in which messages, and what happens when a side is slow or dies.

| channel  | sockets                        | carries                                   | when full            | a dead peer         |
|----------|--------------------------------|-------------------------------------------|----------------------|---------------------|
| requests | rollout DEALER -> inference/N  | prompts; back: tokens, logprobs, versions | admission (ingest)   | turn asked again    |
| work     | rollout DEALER -> ingest       | asks, failures; back: groups to play      | `wait`: ask is kept  | asked, dealt again  |
| samples  | rollout DEALER -> ingest       | a played group; back: acks                | the ack comes later  | sent again, no dups |
| rings    | ingest -> trainer rank         | RLSamples (`ring.py`)                     | ingest acks later    | records stay        |
| control  | trainer/0 DEALER -> inference/N| pushes (`weight_sync/protocol.py`)        | one call at a time   | PeerLost            |
| metrics  | everybody PUSH -> stats PULL   | values, episodes, rounds                  | dropped and counted  | dropped and counted |

The side after the arrow binds: a ROUTER that knows its clients by name, or stats' PULL.
A group's header travels as a frame behind `played`; its body lies in shared memory (`outbox.py`) and `played` says where, or is a second
frame. Every message but these frames is one msgpack map, checked against its shape here: MESSAGES names its fields and
their types; more fields are allowed. Arrays travel as bytes (int32 or float32, little-endian).

Work and samples, so that a group is neither lost nor doubled, whoever is killed:
- A rollout's `ask` lists the groups that it holds (plays, or has sent without an ack yet). What ingest dealt to it and is not
  on the list never arrived or died with the process: it is dealt again, under the same group id. A group that a rollout holds
  already may come a second time: it ignores it.
- `wait` means that the ask is kept and answered as soon as there is something. A rollout repeats its ask every
  ASK_AGAIN_S, because ingest may have been started anew.
- A rollout keeps a finished group until its `ack` and sends it again every RESEND_S; it holds at most MAX_UNACKED of them,
  then it waits. The ack comes after the ring commit, so a full ring stops rollouts and loses nothing.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import zmq

from accerl_mp.topology import RunPaths
from accerl_mp.transport import sockets

REQUESTS, WORK, SAMPLES, CONTROL, METRICS = "requests", "work", "samples", "control", "metrics"

ASK_AGAIN_S = 2.0
RESEND_S = 5.0
MAX_UNACKED = 2
MAX_HEADER_BYTES = 64 << 20
"""Of one msgpack map; the frames of samples come on top."""

_NUMBER = (int, float)
MESSAGES: dict[str, dict[str, Any]] = {
    "request": {
        "id": int,
        "episode_id": int,
        "prompt": bytes,
        "max_tokens": int,
        "temperature": _NUMBER,
        "salt_version": int,
        "seed": (int, type(None)),
    },
    "reply": {
        "id": int,
        "ids": bytes,
        "logprobs": bytes,
        "versions": bytes,
        "finish_reason": str,
        "salt_version": int,
        "error": (str, type(None)),
    },
    # work, from a rollout
    "ask": {"op": str, "worker": int, "holding": list},
    "failed": {"op": str, "group_id": int, "game_id": int, "reason": str},
    # work, to a rollout
    "group": {
        "op": str,
        "group_id": int,
        "episode_ids": list,
        "game_id": int,
        "game_path": str,
        "seeds": list,
        "kind": str,
        "eval_id": int,
        "policy_version": int,
    },
    "wait": {"op": str},
    "stop": {"op": str},
    # samples
    "played": {"op": str, "group_id": int, "kind": str, "eval_id": int, "outcome": str, "episodes": list},
    "ack": {"op": str, "group_id": int},
    # metrics
    "values": {"kind": str, "source": str, "values": dict},
    "numbers": {"kind": str, "source": str, "numbers": dict},
    "text": {"kind": str, "source": str, "tag": str, "text": str},
    "episode": {"kind": str, "source": str, "episode": dict},
    "round": {"kind": str, "source": str, "step": int, "version": int, "time": _NUMBER},
}
"""Message: its fields and their types."""

EPISODE_RECORD: dict[str, Any] = {
    **dict.fromkeys(("episode_id", "group_id", "game_id", "worker", "num_turns", "num_env_steps", "num_invalid"), int),
    **dict.fromkeys(("num_tokens", "num_trained", "oldest_version", "newest_version"), int),
    **dict.fromkeys(("won", "lost", "truncated"), bool),
    **dict.fromkeys(("score", "max_score", "episode_return", "reward", "seconds"), _NUMBER),
    **dict.fromkeys(("game", "kind"), str),
}
"""An episode in `played` and in a metric: its fields and their types."""

EVAL_BASE = 1 << 40
"""Group and episode ids of evaluations begin here; those of training count up from 0."""
OUTCOMES = ("samples", "zero_std", "rejected")
"""Of a played group: samples follow; no signal, so none follow; nothing in it could be trained."""


class MessageError(ValueError):
    """A message that does not have the form in MESSAGES. Says what is wrong with it."""


def pack(name: str, message: Mapping[str, Any]) -> bytes:
    """One message of MESSAGES as bytes, checked."""
    check(name, message)
    data = msgpack.packb(message)
    if len(data) > MAX_HEADER_BYTES:
        raise MessageError(f"{name}: {len(data)} bytes, at most {MAX_HEADER_BYTES} may travel")
    return data


def unpack(name: str, data: bytes | memoryview) -> dict[str, Any]:
    """The message in `data`; MessageError unless it has the form of MESSAGES[name]."""
    message = unpack_any(data)
    check(name, message)
    return message


def unpack_any(data: bytes | memoryview) -> dict[str, Any]:
    """A msgpack map of any form."""
    if len(data) > MAX_HEADER_BYTES:
        raise MessageError(f"{len(data)} bytes, at most {MAX_HEADER_BYTES} may travel")
    try:
        message = msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise MessageError(f"expected a map, got {type(message).__name__}")
    return message


def pack_ask(worker: int, holding: Sequence[int]) -> bytes:
    """`holding`: ids of all groups that this rollout still has, playing or unacknowledged."""
    return pack("ask", {"op": "ask", "worker": worker, "holding": list(holding)})


def check_record(record: Any) -> None:
    """MessageError unless it is an EPISODE_RECORD."""
    if not isinstance(record, dict):
        raise MessageError(f"episode: expected a map, got {type(record).__name__}")
    _check_fields("episode", record, EPISODE_RECORD)


def check(name: str, message: Mapping[str, Any]) -> None:
    """MessageError unless it has the form of MESSAGES[name]."""
    _check_fields(name, message, MESSAGES[name])


def _check_fields(name: str, message: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for field, kind in kinds.items():
        if not isinstance(value := message.get(field, _MISSING), kind):
            expected = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise MessageError(f"{name}.{field}: expected {expected}, got {type(value).__name__}")


_MISSING = object()

Value = float | tuple[float, float, float]


class MetricsSender:
    """Sends metric records to stats and never waits: what stats cannot take is dropped; the next values say how many."""

    def __init__(self, paths: RunPaths, source: str) -> None:
        self.source = source
        self.num_dropped = 0
        """Since the last record that got through."""
        self._context = sockets.new_context()
        self._socket = sockets.connect_push(self._context, paths, METRICS)

    def values(self, values: Mapping[str, Value], **extra: int | float) -> None:
        """`{tag: number or (sum, count, max)}`. `step=` (and `version=`) for a point of its own, as an evaluation is."""
        triples = {tag: _triple(value) for tag, value in values.items()}
        if self.num_dropped:
            triples["Stats/DroppedRecords"] = _triple(self.num_dropped)
        if self._send("values", {"values": triples, "time": time.time(), **extra}):
            self.num_dropped = 0

    def numbers(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """`{histogram: its new numbers}`; one that is empty says nothing."""
        if filled := {tag: [int(value) for value in values] for tag, values in numbers.items() if values}:
            self._send("numbers", {"numbers": filled})

    def text(self, tag: str, text: str) -> None:
        """Markdown for people to read."""
        self._send("text", {"tag": tag, "text": text})

    def episode(self, episode: Mapping[str, Any]) -> None:
        self._send("episode", {"episode": episode})

    def round(self, record: Mapping[str, Any]) -> None:
        """Rank 0 closes a round: `step`, `version` and more; `values` as in `values()`."""
        values = {tag: _triple(value) for tag, value in record.get("values", {}).items()}
        self._send("round", {"time": time.time()} | dict(record) | {"values": values})

    def close(self, linger_s: float = 1.0) -> None:
        """Gives what is queued at most `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _send(self, kind: str, content: Mapping[str, Any]) -> bool:
        data = pack(kind, {"kind": kind, "source": self.source, **content})
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            self.num_dropped += 1
            return False
        return True


class MetricsReceiver:
    """Stats' side."""

    def __init__(self, paths: RunPaths) -> None:
        self.num_broken = 0
        """Messages that had no known form."""
        self._context = sockets.new_context()
        self._socket = sockets.bind_pull(self._context, paths, METRICS)

    def receive(self, timeout_s: float, limit: int = 1000) -> list[dict[str, Any]]:
        """Waits at most `timeout_s` for a record, then takes what is there, up to `limit`."""
        records: list[dict[str, Any]] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return records
        while len(records) < limit:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                records.append(_metric(data))
            except MessageError:
                self.num_broken += 1
        return records

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _metric(data: bytes) -> dict[str, Any]:
    kind = unpack_any(data).get("kind")
    if kind not in ("values", "numbers", "text", "episode", "round"):
        raise MessageError(f"metric of kind {kind!r}")
    record = unpack(kind, data)
    if kind == "episode":
        check_record(record["episode"])
    if not isinstance(values := record.get("values", {}), dict):
        raise MessageError("metric: values are no map")
    for tag, value in values.items():
        if not (isinstance(tag, str) and isinstance(value, list) and len(value) == 3 and all(isinstance(part, _NUMBER) for part in value)):
            raise MessageError(f"metric {tag!r}: expected sum, count and max")
    return record


def _triple(value: Value) -> tuple[float, float, float]:
    """(sum, count, max) of a number, or the triple itself."""
    if isinstance(value, (tuple, list)):
        total, count, largest = value
        return float(total), float(count), float(largest)
    return float(value), 1.0, float(value)
