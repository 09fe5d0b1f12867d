"""An episode's conversation as token ids that only ever grow at the end.

A prompt is the previous prompt, the reply exactly as it was sampled, and the template's own text between two turns. That text is cut out
of conversations which the template renders at start (`ChatFormat`); nothing here knows how any template marks a turn.
"""

import re
from dataclasses import dataclass

import jinja2

from accerl_mp.rollout.tokenizer import Message, Tokenizer

# Stand-ins whose place in rendered text shows where a message went.
_USER_MARKS = ("Uqzone", "Uqztwo", "Uqzthree")
_REPLY_MARKS = ("Rqzone", "Rqztwo")
_AWKWARD = 'Objective: "a" & <b>\n- it\'s {{ here }}\n- \\n 100%\nYour command:'
"""A message that a template must pass on unchanged."""

_EMPTY_THINKING = re.compile(r"\s*<(think|thinking|thought|reasoning)>\s*</\1>\s*")
_OPENING = re.compile(r"<(think|thinking|thought|reasoning)>|\[THINK\]|<\|begin_of_thought\|>|<\|channel\|>analysis", re.IGNORECASE)
_CLOSING = re.compile(r"</(think|thinking|thought|reasoning)>|\[/THINK\]|<\|end_of_thought\|>", re.IGNORECASE)


class TemplateError(ValueError):
    """The model's chat template cannot carry an episode: says what it does."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What the template puts around messages, cut from conversations that it rendered.

    A turn that follows a reply reads `end_of_reply + before_user + <message> + after_user`; the reply comes next.
    Example (ChatML): `<|im_end|>`, `\\n<|im_start|>user\\n`, `<|im_end|>\\n<|im_start|>assistant\\n`.
    """

    end_of_reply: str
    """Up to and including the end-of-turn token, or empty where the template has none."""
    before_user: str
    after_user: str
    ends_prompt: str
    """Line breaks between the template's generation prompt and a past reply. They go into the prompt: sampled, they would end the reply."""
    before_reply: str
    """Spaces there instead, which the model samples with its first word (Mistral)."""
    has_system: bool
    """Whether the template takes a system message; if not, its text comes before the first user message."""
    drops_empty_thinking: bool
    """The prompt for a reply holds an empty thinking block that the template leaves out of past turns; the transcript keeps it."""

    @classmethod
    def probe(cls, tokenizer: Tokenizer) -> "ChatFormat":
        """Learn the format by rendering; raises TemplateError for a template that is not append-only or opens a thinking block."""
        has_system = _takes_system(tokenizer)
        prompt, past = _first_prompt(tokenizer, has_system), _rendered(tokenizer, has_system, num_replies=1)
        before_reply, drops_empty_thinking = _check_first_turn(prompt, past)
        head, _, tail = past.partition(_REPLY_MARKS[0])
        between, found, after_user = tail.partition(_USER_MARKS[1])
        if not found:
            raise TemplateError("the chat template leaves out a user message that follows a reply")
        _check_second_turn(tokenizer, has_system, head=head, between=between, after_user=after_user)
        end_of_reply, before_user = _split_end(tokenizer, between, after_user)
        ends_prompt, before_reply = (before_reply, "") if "\n" in before_reply else ("", before_reply)
        return cls(
            end_of_reply=end_of_reply,
            before_user=before_user,
            after_user=after_user + ends_prompt,
            ends_prompt=ends_prompt,
            before_reply=before_reply,
            has_system=has_system,
            drops_empty_thinking=drops_empty_thinking,
        )


class Transcript:
    """The ids of one episode: `add_message`, then `add_reply`, and again.

    Only new text is tokenised. Ids that were handed out never change: each prompt begins with the previous prompt and reply.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, system: str) -> None:
        self._tokenizer, self._chat, self._system = tokenizer, chat, system
        self.ids: list[int] = []
        """Everything so far."""
        self.replies: list[tuple[int, int]] = []
        """Where each reply lies in `ids`: start and stop."""

    def add_message(self, text: str) -> list[int]:
        """Append a turn's message and the template's text up to where the reply begins; returns what was appended."""
        text = self._tokenizer.without_special(text).strip()
        new = self._connecting(text) if self.replies else opening_ids(self._tokenizer, self._chat, self._system, text)
        self.ids += new
        return new

    def add_reply(self, ids: list[int]) -> None:
        """Append a reply exactly as it was sampled."""
        start = len(self.ids)
        self.ids += ids
        self.replies.append((start, len(self.ids)))

    def add_reply_text(self, text: str) -> None:
        """Append a reply that nobody sampled (warm-up data): its text and the end-of-turn token."""
        self.add_reply(reply_ids(self._tokenizer, self._chat, text))

    def _connecting(self, text: str) -> list[int]:
        start, stop = self.replies[-1]
        return connecting_ids(self._tokenizer, self._chat, self.ids[start:stop], text)


def opening_ids(tokenizer: Tokenizer, chat: ChatFormat, system: str, text: str) -> list[int]:
    """Ids of a first turn: the template's rendering of system and user message, up to where the reply begins."""
    messages = _opening(system, text, has_system=chat.has_system)
    return tokenizer.encode_start(tokenizer.render(messages, add_generation_prompt=True) + chat.ends_prompt)


def connecting_ids(tokenizer: Tokenizer, chat: ChatFormat, reply: list[int], text: str) -> list[int]:
    """Ids between a reply and the next one. What the reply said itself, end-of-turn token or newline, is not said again.

    A reply ends with an end-of-turn token, with a newline (`--infer-stop`), or with neither (cut by length).
    """
    following = chat.before_user + text + chat.after_user
    said, end = tokenizer.decode_all(reply), chat.end_of_reply.strip()
    has_ended = any(token_id in tokenizer.eos_token_ids for token_id in reply[-1:]) or (end != "" and said.rstrip().endswith(end))
    if end and not has_ended:
        return tokenizer.encode_after("a", chat.end_of_reply + following)
    if said.endswith("\n") and following.startswith("\n"):
        return tokenizer.encode_after("\n", following[1:])
    return tokenizer.encode_after(tokenizer.text_of(reply[-1]) if has_ended else "a", following)


def reply_ids(tokenizer: Tokenizer, chat: ChatFormat, text: str) -> list[int]:
    """Ids of a whole reply as the model should sample it: the text, and the end-of-turn token (without one in the template: a newline)."""
    return tokenizer.encode_after(chat.after_user[-1:] or "\n", chat.before_reply + text + (chat.end_of_reply or "\n"))


def _opening(system: str, user: str, *, has_system: bool) -> list[Message]:
    if not has_system:
        return [{"role": "user", "content": f"{system}\n\n{user}"}]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _takes_system(tokenizer: Tokenizer) -> bool:
    """Some templates raise on a system message, others leave it out."""
    try:
        text = tokenizer.render(_opening("Sqzsystem", "Uqzone", has_system=True), add_generation_prompt=True)
    except jinja2.TemplateError:
        return False
    return "Sqzsystem" in text


def _first_prompt(tokenizer: Tokenizer, has_system: bool) -> str:
    return _render(tokenizer, _opening("Sqzsystem", _USER_MARKS[0], has_system=has_system))


def _rendered(tokenizer: Tokenizer, has_system: bool, *, num_replies: int, last_user: str | None = None) -> str:
    """A conversation of marks that ends with a user message and the generation prompt."""
    messages = _opening("Sqzsystem", _USER_MARKS[0], has_system=has_system)
    for reply, user in zip(_REPLY_MARKS[:num_replies], _USER_MARKS[1 : num_replies + 1], strict=True):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": user}]
    if last_user is not None:
        messages[-1]["content"] = last_user
    return _render(tokenizer, messages)


def _render(tokenizer: Tokenizer, messages: list[Message]) -> str:
    try:
        return tokenizer.render(messages, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError) as error:
        raise TemplateError(f"the chat template cannot render {len(messages)} messages: {error}") from error


def _check_first_turn(prompt: str, past: str) -> tuple[str, bool]:
    """A prompt must be how the conversation with its reply begins; returns `before_reply` and `drops_empty_thinking`."""
    generation_prompt = prompt.partition(_USER_MARKS[0])[2]
    if len(_OPENING.findall(generation_prompt)) > len(_CLOSING.findall(generation_prompt)):
        raise TemplateError(f"the chat template opens a thinking block ({generation_prompt!r}), even with enable_thinking=False")
    head, found, _ = past.partition(_REPLY_MARKS[0])
    if not found:
        raise TemplateError("the chat template leaves out the replies of earlier turns")
    if head.startswith(prompt) and not head[len(prompt) :].strip():
        return head[len(prompt) :], False
    if prompt.startswith(head) and _EMPTY_THINKING.fullmatch(prompt[len(head) :]):
        return "", True
    raise TemplateError(
        f"the chat template is not append-only: a prompt ends with {prompt[-40:]!r}, "
        f"but the same turn reads {head[-40:]!r} before its reply once it is past"
    )


def _check_second_turn(tokenizer: Tokenizer, has_system: bool, *, head: str, between: str, after_user: str) -> None:
    """Later turns must look as the first: nothing earlier changes, and a message is passed on as it is."""
    rest = head + _REPLY_MARKS[0] + between + _USER_MARKS[1]
    past_end = head[len(head.partition(_USER_MARKS[0])[0]) + len(_USER_MARKS[0]) :]  # after a user message, once its turn is past
    expected = rest + past_end + _REPLY_MARKS[1] + between + _USER_MARKS[2] + after_user
    got = _rendered(tokenizer, has_system, num_replies=2)
    if got != expected:
        raise TemplateError(f"the chat template is not append-only: a third turn changes earlier ones ({_difference(expected, got)})")
    got = _rendered(tokenizer, has_system, num_replies=1, last_user=_AWKWARD)
    if got != head + _REPLY_MARKS[0] + between + _AWKWARD + after_user:
        raise TemplateError(f"the chat template changes the text of a message: {got[len(head) :]!r}")


def _difference(expected: str, got: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return f"{expected[same : same + 40]!r} became {got[same : same + 40]!r}"


def _split_end(tokenizer: Tokenizer, between: str, after_user: str) -> tuple[str, str]:
    """Cut what follows a reply behind its end-of-turn token: one that the model's settings name, or that ends users' turns too."""
    text, closing = between.lstrip(), after_user.lstrip()
    known = [tokenizer.text_of(token_id) for token_id in tokenizer.eos_token_ids]
    ends = [end for end in known if end and text.startswith(end)]
    ends += [end for end in tokenizer.special_texts if text.startswith(end) and closing.startswith(end)]
    cut = len(between) - len(text) + max(map(len, ends)) if ends else 0
    return between[:cut], between[cut:]
