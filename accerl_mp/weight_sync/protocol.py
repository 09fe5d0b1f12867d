"""What trainer rank 0 and an inference process say to each other over the control channel, and the states of a push.

A call is `{"op": one of the below, "call": number, "fields": {...}}`, its answer `{"call": the same number, "error": None or text, ...}`.
One call at a time per inference process; every call has a deadline (`--sync-timeout-s`; the first `status`:
`--inference-start-timeout-s`).

| op | sent with | done by the inference process | answer holds |
|---|---|---|---|
| status | - | - | version, num_workers, pid, session: another one after a restart |
| connect | address, first_rank | workers start to join the weight group | - |
| layout | manifest, bucket_bytes | makes staging memory for all of the model, once | - |
| begin | version, runs, with_sums | workers start to receive; generation goes on (without staging: it stands from here) | - |
| poll | - | - | state, version, error: of the worker that is least far |
| checksums | - | sums up what arrived, before it is in use | checksums: one dict for each worker |
| swap | version | holds new requests, loads between two steps, cuts the versions | path, seconds of its parts |
| probe | ids | - | logprobs of these ids as a prompt |
| open | - | lets requests in: after the first verified push | - |
| abort | - | workers leave the group | - |

One push: begin -> (bytes travel) poll until received -> [checksums] -> swap -> [probe] -> [open]. Before the first of a group:
connect, poll until ready, layout. `runs` names what travels: stretches of the layout's slots.

A push that breaks begins again with connect, under the same version and with all weights. Some processes may have swapped to that
version already: they load the same weights once more. One that failed in between holds its requests until then.
"""

from typing import Any

import msgpack

from accerl_mp.transport.channels import MessageError, unpack_any

IDLE, CONNECTING, READY, RECEIVING, RECEIVED, FAILED = "idle", "connecting", "ready", "receiving", "received", "failed"
"""Of a worker's receiver. IDLE and FAILED have no group; READY has one and no push; RECEIVED holds a push in staging."""

PROGRESS = (FAILED, IDLE, CONNECTING, READY, RECEIVING, RECEIVED)
"""From least to most far, to sum up several workers by the one that is behind."""


class SyncError(RuntimeError):
    """A push failed or its verification did. Names the tensor, the probe or the peer."""


class GroupBroken(SyncError):
    """An inference process or the way to it was lost. Nothing is wrong with the weights: a new group may do."""


class WrongWeights(SyncError):
    """What arrived or what vLLM computes with is not what trains. Sending it again would only hide that."""


def pack_call(op: str, number: int, fields: dict[str, Any]) -> bytes:
    return msgpack.packb({"op": op, "call": number, "fields": fields})


def unpack_call(data: bytes) -> tuple[str, int, dict[str, Any]]:
    """(op, number, fields). MessageError unless `data` is a call."""
    message = unpack_any(data)
    op, number, fields = message.get("op"), message.get("call"), message.get("fields")
    if not (isinstance(op, str) and isinstance(number, int) and isinstance(fields, dict)):
        raise MessageError("not a control call")
    return op, number, fields


def pack_answer(number: int, answer: dict[str, Any]) -> bytes:
    return msgpack.packb({"call": number} | answer)


def unpack_answer(data: bytes) -> dict[str, Any]:
    """{"call", "error", ...}. MessageError unless `data` is an answer."""
    answer = unpack_any(data)
    if not isinstance(answer.get("call"), int) or "error" not in answer:
        raise MessageError("not an answer to a control call")
    return answer
