"""The work channel's side of ingest: rollouts ask for groups and are given them, at once or when admission allows."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accerl_mp.ingest.dealer import MAX_STRIKES, Deal, Dealer
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import MessageError
from accerl_mp.transport.health import HealthTable

_log = logging.getLogger(__name__)


class WorkDesk:
    """Asks are kept until there is something to play; a rollout that asks again replaces its ask."""

    def __init__(
        self, context: sockets.Context, paths: RunPaths, *, dealer: Dealer, games: list[Path], eval_games: list[Path], table: HealthTable
    ) -> None:
        self._dealer, self._table = dealer, table
        self._games = {"train": games, "eval": eval_games}
        self._asks: dict[bytes, int] = {}
        self._named_aside: set[int] = set()
        self.socket = sockets.bind_router(context, paths, channels.WORK)

    @property
    def num_asks(self) -> int:
        """Rollouts that wait for a group."""
        return len(self._asks)

    def receive(self, version: int, is_done: Callable[[int], bool]) -> None:
        """Take asks and failures. `is_done`: groups that need not be played any more, whoever holds them."""
        for sender, frames in sockets.receive_all(self.socket):
            try:
                self._take(sender, b"".join(frames), version, is_done)
            except MessageError as error:
                _log.error("%s sent work a message that is none: %s", sender.decode(errors="replace"), error)

    def answer(self, version: int, may_train: Callable[[], bool], note_next_number: Callable[[int], None]) -> None:
        """Deal to those who wait, first come first served, until there is nothing to deal."""
        for sender, worker in list(self._asks.items()):
            deal = self._dealer.next_deal(worker, self._life_of(worker), may_train=may_train())
            if deal is None:
                return
            # Before it leaves: an ingest that takes over must not give the number to another group.
            note_next_number(self._dealer.next_number)
            self._send(sender, deal, version)
            del self._asks[sender]

    def say_stop(self) -> None:
        for sender in self._asks:
            self.socket.send_multipart([sender, channels.pack("stop", {"op": "stop"})])

    def close(self) -> None:
        self.socket.close(linger=100)

    def _take(self, sender: bytes, data: bytes, version: int, is_done: Callable[[int], bool]) -> None:
        match channels.unpack_any(data).get("op"):
            case "ask":
                self._take_ask(sender, channels.unpack("ask", data), version, is_done)
            case "failed":
                message = channels.unpack("failed", data)
                self._dealer.fail(message["group_id"], message["reason"])
                self._name_aside()
            case other:
                raise MessageError(f"op {other!r}")

    def _take_ask(self, sender: bytes, message: dict[str, Any], version: int, is_done: Callable[[int], bool]) -> None:
        worker = message["worker"]
        if sender != f"rollout/{worker}".encode():  # what is dealt to somebody else would never be played
            raise MessageError(f"ask.worker: {worker} is not {sender.decode(errors='replace')}")
        if not all(type(group_id) is int for group_id in message["holding"]):
            raise MessageError(f"ask.holding: expected ids of groups, got {message['holding']!r:.80}")
        holding = [group_id for group_id in message["holding"] if not is_done(group_id)]
        died_playing, was_killed = self._word(worker, "died_playing") - 1, bool(self._word(worker, "was_killed"))
        undelivered = self._dealer.hear(worker, self._life_of(worker), holding, died_playing=died_playing, was_killed=was_killed)
        self._name_aside()
        if undelivered is not None:
            self._asks.pop(sender, None)
            self._send(sender, undelivered, version)
            return
        if sender not in self._asks:
            self.socket.send_multipart([sender, channels.pack("wait", {"op": "wait"})])
        self._asks[sender] = worker

    def _send(self, sender: bytes, deal: Deal, version: int) -> None:
        message = {
            "op": "group",
            "group_id": deal.group_id,
            "episode_ids": list(deal.episode_ids),
            "game_id": deal.game_id,
            "game_path": str(self._games[deal.kind][deal.game_id]),
            "seeds": list(deal.seeds),
            "kind": deal.kind,
            "eval_id": deal.eval_id,
            "policy_version": version,
        }
        self.socket.send_multipart([sender, channels.pack("group", message)])

    def _life_of(self, worker: int) -> int:
        """Pid of the rollout with this index, to tell a new process from the one before; 0 outside a run."""
        return self._word(worker, "pid")

    def _word(self, worker: int, name: str) -> int:
        row = f"rollout/{worker}"
        return int(self._table.word(self._table.row_of(row), name)) if row in self._table.names else 0

    def _name_aside(self) -> None:
        """Each game once: what it is, why, and that training goes on."""
        for game_id in sorted(self._dealer.set_aside - self._named_aside):
            self._named_aside.add(game_id)
            path, reason = self._games["train"][game_id], self._dealer.reasons.get(game_id, "")
            num_left = len(self._games["train"]) - len(self._named_aside)
            _log.error("game %s failed %d times in a row and is set aside, %d games are left: %s", path, MAX_STRIKES, num_left, reason)
