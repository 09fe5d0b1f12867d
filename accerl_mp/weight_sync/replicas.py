"""Trainer rank 0's calls to all inference processes at once: weight_sync/protocol.py over the control channel."""

from collections.abc import Callable
from typing import Any

from accerl_mp.topology import RunPaths
from accerl_mp.transport import sockets
from accerl_mp.transport.channels import CONTROL, MessageError
from accerl_mp.transport.health import Health, is_alive
from accerl_mp.weight_sync.protocol import FAILED, GroupBroken, SyncError, pack_call, unpack_answer

_LOOK_MS = 20
"""Longest wait for an answer between two looks at the run's health."""
_ASK_AGAIN_S = 2.0


class Replicas:
    """One DEALER per inference process. Not thread-safe: rank 0's main thread, or for a while the one thread that it waits for."""

    def __init__(self, paths: RunPaths, health: Health, count: int) -> None:
        self._paths, self._health = paths, health
        self.names = [f"inference/{index}" for index in range(count)]
        self.pids: list[int] = []
        """Of the processes that the weight group was formed with; empty before."""
        self._context = sockets.new_context()
        self._sockets = self._connect()
        self._number = 0

    def __len__(self) -> int:
        return len(self.names)

    def call(
        self, op: str, fields: dict[str, Any] | list[dict[str, Any]] | None = None, *, timeout_s: float, flag: str, again: bool = False
    ) -> list[dict[str, Any]]:
        """Call all; returns their answers in order. `fields`: one dict for all, or one each.

        waits for      an answer of each, at most `timeout_s`, then raises DeadlineExpired naming who is missing
        a dead peer    GroupBroken as soon as one is lost; with `again` the call is repeated every 2 s instead, so that a process
                       that was started anew meanwhile answers it (calls that do no harm twice); PeerLost once the supervisor
                       gives up on it
        an error there raises SyncError with its text, GroupBroken if its end of the group has failed
        """
        each = fields if isinstance(fields, list) else [fields or {}] * len(self)
        self._number += 1
        missing = dict(enumerate(pack_call(op, self._number, one) for one in each))
        answers: dict[int, dict[str, Any]] = {}
        self._send(missing)
        with self._health.waiting(f"{', '.join(self.names)} to answer {op!r}", timeout_s, flag, peer="inference") as wait:
            next_ask_s = _ASK_AGAIN_S
            while missing:
                self._collect(missing, answers)
                wait.check()
                if not again:
                    self.check()
                elif wait.waited_s > next_ask_s:
                    self._send(missing)
                    next_ask_s += _ASK_AGAIN_S
        for index, name in enumerate(self.names):
            if answers[index]["error"]:
                kind = GroupBroken if answers[index].get("state") == FAILED else SyncError
                raise kind(f"{name} could not {op}: {answers[index]['error']}")
        return [answers[index] for index in range(len(self))]

    def call_until(self, is_done: Callable[[dict[str, Any]], bool], op: str, *, what: str, timeout_s: float, flag: str) -> None:
        """Repeat a call until every answer `is_done`. Waits as `call` does."""
        with self._health.waiting(what, timeout_s, flag, peer="inference") as wait:
            while not all(is_done(answer) for answer in self.call(op, timeout_s=timeout_s, flag=flag)):
                wait.check()

    def tell(self, op: str) -> None:
        """Call all and wait for nothing; their answers are thrown away."""
        self._number += 1
        self._send(dict.fromkeys(range(len(self)), pack_call(op, self._number, {})))

    def lost(self) -> list[str]:
        """Those whose process is not the one of `pids` any more, or is dead. Waits for nothing."""
        return [name for name, pid in zip(self.names, self.pids, strict=False) if self._pid(name) != pid or not is_alive(pid)]

    def check(self) -> None:
        """Raises GroupBroken if one is lost."""
        if lost := self.lost():
            raise GroupBroken(f"{', '.join(lost)} died while the weight group was in use")

    def are_running(self) -> bool:
        """Whether all are ready to answer now."""
        table = self._health.table
        rows = [table.read(table.row_of(name)) for name in self.names]
        return all(row.state == "running" and is_alive(row.pid) for row in rows)

    def reconnect(self) -> None:
        """Throw away calls and answers that are under way: a process that is started later would still get those calls."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = self._connect()

    def close(self) -> None:
        self._context.destroy(linger=1000)

    def _connect(self) -> list[Any]:
        indices = range(len(self.names))
        return [sockets.connect_dealer(self._context, self._paths, CONTROL, identity="trainer/0", index=index) for index in indices]

    def _pid(self, name: str) -> int:
        """0: none at the moment."""
        table = self._health.table
        return int(table.word(table.row_of(name), "pid"))

    def _send(self, calls: dict[int, bytes]) -> None:
        for index, call in calls.items():
            self._sockets[index].send(call)

    def _collect(self, missing: dict[int, bytes], answers: dict[int, dict[str, Any]]) -> None:
        """Take what has come, after a short wait for the first that is missing."""
        self._sockets[next(iter(missing))].poll(_LOOK_MS)
        for index in list(missing):
            while index in missing and self._sockets[index].poll(0):
                try:
                    answer = unpack_answer(self._sockets[index].recv())
                except MessageError:
                    continue
                if answer["call"] == self._number:  # else: of a call that was given up
                    answers[index] = answer
                    del missing[index]
