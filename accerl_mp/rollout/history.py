"""What of an episode the model sees: all of it (`--history-mode transcript`) or its last turns (`window`).

Both hand out, for each turn, the ids that its sample gets before the reply. With a transcript that is what the prompt has
grown by, and the whole episode is one sample; with a window it is the whole prompt, and each turn is a sample of its own.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from accerl_mp.rollout.prompt import SYSTEM
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat, Transcript, connecting_ids, opening_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    """What the model gets."""
    new_ids: list[int]
    """What the turn's sample gets before the reply."""


class History(Protocol):
    def next_prompt(self, message: str) -> Prompt | None:
        """The prompt of a turn; None if it and a reply do not fit."""
        ...

    def add_reply(self, ids: list[int]) -> None: ...


def open_history(mode: Literal["transcript", "window"], tokenizer: Tokenizer, chat: ChatFormat, *, room: int, num_turns: int) -> History:
    """The history of one episode.

    room: most tokens of a prompt, the reply's own taken off
    num_turns: turns that a window holds
    """
    if mode == "transcript":
        return FullHistory(tokenizer, chat, room)
    return WindowHistory(tokenizer, chat, room=room, num_turns=num_turns)


class FullHistory:
    """The whole episode, append-only."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, room: int) -> None:
        self._transcript = Transcript(tokenizer, chat, SYSTEM)
        self._room = room

    def next_prompt(self, message: str) -> Prompt | None:
        new_ids = self._transcript.add_message(message)
        if len(self._transcript.ids) > self._room:
            return None
        return Prompt(list(self._transcript.ids), new_ids)

    def add_reply(self, ids: list[int]) -> None:
        self._transcript.add_reply(ids)


@dataclass(slots=True)
class _PastTurn:
    message: str
    connecting: list[int]
    """Ids of the message behind the reply before it; the first turn of a window is rendered with the system message instead."""
    reply: list[int] = field(default_factory=list)


class WindowHistory:
    """The last `num_turns` turns, fewer where they do not fit."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, *, room: int, num_turns: int) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._room, self._num_turns = room, num_turns
        self._turns: list[_PastTurn] = []

    def next_prompt(self, message: str) -> Prompt | None:
        message = self._tokenizer.without_special(message).strip()
        connecting = connecting_ids(self._tokenizer, self._chat, self._turns[-1].reply, message) if self._turns else []
        recent = self._turns[max(0, len(self._turns) + 1 - self._num_turns) :]
        self._turns = [*recent, _PastTurn(message, connecting)]
        while self._turns:
            ids = opening_ids(self._tokenizer, self._chat, SYSTEM, self._turns[0].message) + self._turns[0].reply
            for turn in self._turns[1:]:
                ids += turn.connecting + turn.reply
            if len(ids) <= self._room:
                return Prompt(ids, ids)
            del self._turns[0]
        return None

    def add_reply(self, ids: list[int]) -> None:
        self._turns[-1].reply = ids
