"""How a stage of a push went, as trainer rank 0 tells the other ranks."""

import time

import torch
import torch.distributed as dist

from accerl_mp.transport.errors import Closed
from accerl_mp.transport.health import Health

FAILED, DONE, DONE_ANEW, AGAIN, CLOSED, WRONG = 0, 1, 2, 3, 4, 5
"""DONE_ANEW: there is a new group, which needs all weights. AGAIN: the push broke and begins again. CLOSED: the run ends.
WRONG: WrongWeights."""
_MOST_REASON_BYTES = 1024
_STOP_GRACE_S = 10.0
"""When the run ends, ranks leave a push together, at rank 0's word; this long they wait for it."""


def hear(health: Health, verdict: int, reason: str, what: str, limit_s: float, flag: str) -> tuple[int, str]:
    """Rank 0's verdict and reason (cut to 1,024 bytes), on every rank. Collective; those of other ranks are not looked at.

    Both in one broadcast, so that no rank can hear the one and miss the other. Over gloo: a GPU that waited in NCCL would compute
    nothing else meanwhile.

    waits for      rank 0, at most `limit_s`
    at the end     goes on waiting for rank 0's word for 10 s, then Closed
    a dead peer    PeerLost once the supervisor has seen it, or gloo's RuntimeError
    """
    text = reason.encode(errors="replace")[:_MOST_REASON_BYTES].ljust(_MOST_REASON_BYTES)
    word = torch.tensor([verdict, *text], dtype=torch.uint8)
    work = dist.broadcast(word, src=0, async_op=True)
    leave_at = float("inf")
    with health.waiting(what, limit_s, flag) as wait:
        while not work.is_completed():
            try:
                wait.check()
            except Closed:  # rank 0 leaves too, and says so
                leave_at = min(leave_at, time.monotonic() + _STOP_GRACE_S)
                if time.monotonic() > leave_at:
                    raise
            time.sleep(0.001)
    work.wait()
    verdict, *heard = word.tolist()
    return verdict, bytes(heard).decode(errors="ignore").strip()  # without half a letter where it was cut
