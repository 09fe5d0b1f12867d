"""Gets groups from ingest and gives them back played: nothing is lost and nothing doubled, whoever is killed (`transport/channels.py`)."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from accerl_mp.rollout.collect import Deal, Group
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import ASK_AGAIN_S, MAX_UNACKED, RESEND_S
from accerl_mp.transport.codec import Frame
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.health import Health
from accerl_mp.transport.loop import LoopSocket
from accerl_mp.transport.outbox import Outbox

_POLL_S = 0.01

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A played group that ingest has not acknowledged."""

    frames: list[Frame]
    sent_at: float = field(default_factory=time.monotonic)


class WorkClient:
    """The two sockets to ingest.

    waits for      `send`: fewer than MAX_UNACKED groups without an ack (a full ring is back-pressure), at most `timeout_s`
    unblocked by   acks, which come after the commit in a ring
    when full      finished groups are kept, and no new one is asked for
    at the end     waits raise Closed; groups without an ack are dealt again by the next run
    a dead ingest  asks and groups are sent again until its successor answers
    """

    def __init__(
        self, paths: RunPaths, health: Health, worker: int, *, timeout_s: float = 0.0, on_news: Callable[[], None] = lambda: None
    ) -> None:
        """`on_news` is called when a deal or an ack has come."""
        self._health, self._worker, self._timeout_s, self._on_news = health, worker, timeout_s, on_news
        self._context = sockets.new_context()
        self._work, self._samples = (
            LoopSocket(sockets.connect_dealer(self._context, paths, channel, identity=health.name), take)
            for channel, take in ((channels.WORK, self._take_work), (channels.SAMPLES, self._take_ack))
        )
        self._outbox = Outbox(paths, worker)
        self._is_over = False
        self._playing: set[int] = set()
        self._sent: dict[int, _Sent] = {}
        self._deals: deque[Deal] = deque()
        self._is_wanting = False
        self._asked_at = float("-inf")

    async def run(self) -> None:
        """Asks while there is room and sends again what has no ack, until cancelled; Closed when ingest says stop."""
        while not self._is_over:
            self._work.check()
            self._samples.check()
            now = time.monotonic()
            if self._is_wanting and now - self._asked_at >= ASK_AGAIN_S:
                self._ask()
            for sent in list(self._sent.values()):
                if now - sent.sent_at >= RESEND_S:
                    sent.sent_at = now
                    self._samples.send(*sent.frames, copy=False)
            await asyncio.sleep(_POLL_S)
        raise Closed("ingest has no more work")

    @property
    def num_unacked(self) -> int:
        return len(self._sent)

    @property
    def holding(self) -> list[int]:
        """Groups that ingest must not deal to others."""
        return sorted(self._playing | set(self._sent))

    def want(self, is_wanting: bool) -> None:
        """Whether another group could be played now: then ingest is asked, at once and every ASK_AGAIN_S."""
        if is_wanting and not self._is_wanting:
            self._ask()
        self._is_wanting = is_wanting

    def take_deal(self) -> Deal | None:
        """A group that has arrived."""
        return self._deals.popleft() if self._deals else None

    async def send(self, group: Group) -> None:
        """Hand in a played group; returns once it is on its way, with fewer than MAX_UNACKED before it."""
        group_id = group.deal.group_id
        frames = self._outbox.pack(_played(group), group.samples)
        what = f"ingest/0 to take groups, of which {MAX_UNACKED} have no ack"
        with self._health.waiting(what, self._timeout_s, "--replay-sample-timeout-seconds") as wait:
            while len(self._sent) >= MAX_UNACKED:
                wait.check()
                await asyncio.sleep(_POLL_S)
        self._sent[group_id] = _Sent(frames)
        self._playing.discard(group_id)
        self._samples.send(*frames, copy=False)

    async def fail(self, deal: Deal, reason: str) -> None:
        """A group that cannot be played: ingest gives the game a strike and deals the group again."""
        _log.info("group %d of %s failed: %s", deal.group_id, deal.game_path, reason)  # ingest says it once, when it gives the game up
        message = {"op": "failed", "group_id": deal.group_id, "game_id": deal.game_id, "reason": reason}
        self._work.send(channels.pack("failed", message))
        self._playing.discard(deal.group_id)

    def close(self) -> None:
        self._work.close()
        self._samples.close()
        self._context.term()
        self._outbox.close()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._work.send(channels.pack_ask(self._worker, self.holding))

    def _take_work(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        match channels.unpack_any(data).get("op"):
            case "group":
                self._take(channels.unpack("group", data))
                self._on_news()
            case "stop":
                self._is_over = True

    def _take(self, message: dict) -> None:
        deal = Deal.from_message(message)
        if deal.group_id in self.holding:
            return  # dealt again because an ask had crossed it
        self._playing.add(deal.group_id)
        self._deals.append(deal)
        self._is_wanting = False  # until the worker says that there is room for one more

    def _take_ack(self, frames: list[bytes]) -> None:
        group_id = channels.unpack("ack", b"".join(frames))["group_id"]
        self._sent.pop(group_id, None)
        self._outbox.free(group_id)
        self._on_news()


def _played(group: Group) -> dict:
    return {
        "op": "group",
        "group_id": group.deal.group_id,
        "kind": group.deal.kind,
        "eval_id": group.deal.eval_id,
        "outcome": group.outcome,
        "episodes": group.records,
    }
