"""Games that no interpreter survives: real story files whose length and checksum are right."""

import json
import os
import shutil
from pathlib import Path

STORY_START = 6
"""Header word: where the interpreter begins."""
LENGTH, CHECKSUM, UNIT = 0x1A, 0x1C, 8

_CODE = {
    "crashes": bytes((0xE8, 0x7F, 1, 0x8C, 0xFF, 0xFC)),  # push 1, jump back: the interpreter's stack overflows (SIGSEGV)
    "hangs": bytes((0x8C, 0xFF, 0xFF)),  # a jump to itself
}

_JSON = {
    "json: an empty map": b"{}",
    "json: a list": b"[]",
    "json: no json": b"{",
    "json: nothing": b"",
    "json: bytes": os.urandom(200),
    "json: nested 5000 deep": b"[" * 5000 + b"]" * 5000,
}

KINDS = ("crashes", "hangs", "damaged", "without json", *_JSON)


def poison(good: Path, bad: Path, kind: str) -> Path:
    """Make `bad` a copy of the game `good` that fails in this way."""
    story = bytearray(good.read_bytes())
    shutil.copy(good.with_suffix(".json"), bad.with_suffix(".json"))
    if kind in _CODE:
        start = int.from_bytes(story[STORY_START : STORY_START + 2], "big")
        story[start : start + len(_CODE[kind])] = _CODE[kind]
        story = _sealed(story)
    elif kind == "damaged":
        story = story[: len(story) // 2]
    elif kind == "without json":
        bad.with_suffix(".json").unlink()
    else:
        bad.with_suffix(".json").write_bytes(_JSON[kind])
    bad.write_bytes(bytes(story))
    return bad


def types_swapped(good: Path) -> bytes:
    """A game's json in which every value is a number."""
    return json.dumps(dict.fromkeys(json.loads(good.with_suffix(".json").read_text()), 3)).encode()


def _sealed(story: bytearray) -> bytearray:
    size = int.from_bytes(story[LENGTH : LENGTH + 2], "big") * UNIT
    story[CHECKSUM : CHECKSUM + 2] = (sum(story[64:size]) % 65536).to_bytes(2, "big")
    return story
