"""From a reply's text to the command it names: exact after normalising, never a guess."""

import re
from collections.abc import Iterable

# One thing that may stand before a command: a prompt sign, a bullet, a number, the name of a role.
_LEADING = re.compile(r"\s*(?:>|[-*\u2022]|\(?\d+(?:[.):]|(?=\s))|(?:action|command|assistant|answer|output|input)\s*:)\s*", re.IGNORECASE)
_QUOTES = {'"': '"', "'": "'", "`": "`", "\u201c": "\u201d", "\u2018": "\u2019"}


def parse_action(text: str, admissible: Iterable[str]) -> str | None:
    """The admissible command that `text` names, in its own spelling, or None.

    Only the first line counts; before it, empty lines, prompt signs, bullets, numbers and role names are dropped, after it
    full stops and exclamation marks, around it quotes and backticks. Of two commands that read alike the last wins.
    Example: `"- Command: Go  East!"` names `go east`.
    """
    commands = list(admissible)
    plain = {_plain(command): command for command in commands}
    bare: dict[str, str] | None = None
    for candidate in _candidates(text):
        if candidate in plain:  # a command's own spelling goes before the stripped form of another: "say hi!" beside "say hi"
            return plain[candidate]
        if bare is None:  # rarely needed, and dear
            bare = {normalise(command): command for command in commands}
        if candidate in bare:
            return bare[candidate]
    return None


def normalise(text: str) -> str:
    """What is left of a reply's first line when everything around a command is dropped; lower case, single spaces."""
    return list(_candidates(text))[-1]


def _candidates(text: str) -> Iterable[str]:
    """Every reading of the text, from the untouched first line to the barest."""
    text = text.lstrip()
    while True:
        line = _first_line(text)
        yield _plain(line)
        yield from _unwrapped(line)
        leading = _LEADING.match(text)
        if leading is None:
            return
        text = text[leading.end() :]


def _unwrapped(line: str) -> Iterable[str]:
    """The line without its end marks and its quotes, and again, until nothing changes."""
    while True:
        bare = line.strip().rstrip(".!").rstrip()
        if len(bare) >= 2 and _QUOTES.get(bare[0]) == bare[-1]:
            bare = bare[1:-1].strip()
        if bare == line:
            return
        line = bare
        yield _plain(line)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
