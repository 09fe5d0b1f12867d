"""The model's tokenizer and chat template without Transformers: the files that the launcher wrote to `<run-dir>/tokenizer/`.

Renders as Transformers does (same Jinja settings and names), so that both sides agree token by token.
"""

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

Message = dict[str, str]


class Tokenizer:
    """Text to ids and back, and conversations to text.

    `meta`: bos_token, eos_token, pad_token (str or None), eos_token_ids (ids that end a reply),
    add_bos (prepend the BOS where the template does not).
    """

    def __init__(self, fast: FastTokenizer, template: str, meta: dict[str, Any]) -> None:
        self._fast = fast
        # Transformers may have left these on in tokenizer.json; they would cut or pad every text.
        fast.no_truncation()
        fast.no_padding()
        self._template = _compile(template)
        self._special_tokens = {name: meta[name] for name in ("bos_token", "eos_token", "pad_token") if meta.get(name)}
        self._bos = meta["bos_token"] if meta.get("add_bos") else None
        self.eos_token_ids: frozenset[int] = frozenset(meta["eos_token_ids"])
        """Ids that end a reply; the model samples them like any other."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, chat_template.jinja and meta.json of `folder`."""
        template = (folder / "chat_template.jinja").read_text()
        meta = json.loads((folder / "meta.json").read_text())
        # Not from_file: it takes no path that is not UTF-8.
        return cls(FastTokenizer.from_buffer((folder / "tokenizer.json").read_bytes()), template, meta)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The text of every control token, longest first."""
        added = self._fast.get_added_tokens_decoder().values()
        return tuple(sorted((token.content for token in added if token.special), key=len, reverse=True))

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """The template's text of a conversation. Thinking is off where the template knows `enable_thinking`."""
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
            **self._special_tokens,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: control tokens are recognised, none is added."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def encode_start(self, text: str) -> list[int]:
        """Ids of the beginning of a rendered conversation."""
        if self._bos and not text.startswith(self._bos):
            text = self._bos + text
        return self.encode(text)

    def encode_after(self, before: str, text: str) -> list[int]:
        """Ids of `text` where it follows `before`: some tokenizers put a space before whatever begins a text."""
        head, both = self.encode(before), self.encode(before + text)
        return both[len(head) :] if both[: len(head)] == head else self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text without control tokens."""
        return self._fast.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """Text with control tokens."""
        return self._fast.decode(ids, skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """One token, also where it is a control token."""
        return self.decode_all([token_id])

    def without_special(self, text: str) -> str:
        """`text` with no control token spelt out in it: what a game or a model wrote must never end a turn."""
        while found := [special for special in self.special_texts if special in text]:
            for special in found:
                text = text.replace(special, " ")
        return text


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, with which some templates mark the assistant's text: only its body counts here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    """The template with what Transformers 5.19 offers it; sandboxed, since it came with a model."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    now = datetime.now()  # one moment for the whole process: a prompt that changed at midnight would not be append-only
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = now.strftime
    return env.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
