"""What state.json of a saved state must hold. Its checksum says that it is as it was written, not that this build could have written it."""

import math
from typing import Any

LARGEST_VERSION = 10**9
"""Of any policy version: samples carry them in 32 bits, and no run pushes so often."""
_LARGEST = 10**12
"""Of any other count, as of the flags (`bounds.py`)."""
_MOST_RANKS = 100_000
_COUNTS = {"step": _LARGEST, "round": _LARGEST, "version": LARGEST_VERSION, "num_bad_in_a_row": _LARGEST}
_SUMS = ("all_tokens", "all_samples")


def wrong_field(content: dict[str, Any]) -> str:
    """The first field that is missing or of another kind, with what it holds; empty: none is."""
    rules = {
        "step": is_count(content.get("step")),
        "version": is_count(content.get("version"), LARGEST_VERSION, least=-1),
        "next_version": is_count(content.get("next_version"), LARGEST_VERSION),
        "num_ranks": is_count(content.get("num_ranks"), _MOST_RANKS, least=1),
        "trainer": _is_progress(content.get("trainer"), content.get("step")),
        "groups": _is_ledger(content.get("groups")),
        "strikes": content.get("strikes", 0) is None or are_strikes(content.get("strikes")),
        "identity": _is_map(content.get("identity"), str),
        "files": _are_files(content.get("files")),
    }
    name = next((name for name, is_right in rules.items() if not is_right), "")
    return f"{name}: {str(content.get(name, 'missing'))[:60]}" if name else ""


def is_count(value: Any, most: int = _LARGEST, *, least: int = 0) -> bool:
    return type(value) is int and least <= value <= most


def are_strikes(value: Any) -> bool:
    """`{"strikes": [[kind, number, count], ...], "set_aside": [game id, ...]}` (`ingest/dealer.py`)."""
    if not isinstance(value, dict) or not _is_list(value.get("strikes")) or not _is_list(value.get("set_aside")):
        return False
    return all(map(_is_strike, value["strikes"])) and all(map(is_count, value["set_aside"]))


def _is_strike(value: Any) -> bool:
    return _is_list(value) and len(value) == 3 and type(value[0]) is str and all(is_count(number, 1 << 62) for number in value[1:])


def _is_progress(value: Any, step: Any) -> bool:
    """`trainer.state.Progress`: every field has a default, none may be unknown."""
    if not isinstance(value, dict) or not value.keys() <= {*_COUNTS, *_SUMS, "is_evaluating"} or value.get("step") != step:
        return False
    counts = all(is_count(value.get(name, 0), most, least=-1) for name, most in _COUNTS.items())
    sums = all(type(value.get(name, 0)) in (int, float) and math.isfinite(value.get(name, 0)) for name in _SUMS)
    return counts and sums and type(value.get("is_evaluating", False)) is bool


def _is_ledger(value: Any) -> bool:
    """Every group below `low_water` is done, and of those up to `next` some."""
    if not isinstance(value, dict) or not is_count(value.get("next")) or not is_count(value.get("low_water"), value["next"]):
        return False
    return _is_list(value.get("done_above")) and all(is_count(number, value["next"]) for number in value["done_above"])


def _are_files(value: Any) -> bool:
    """{name: [size in bytes, CRC-32]}, of files in the state's own folder."""
    if not isinstance(value, dict) or any("/" in name or "\0" in name or name in ("", ".", "..") for name in value):
        return False
    are_pairs = all(_is_list(entry) and len(entry) == 2 for entry in value.values())
    return are_pairs and all(is_count(size, 1 << 60) and is_count(crc, 0xFFFFFFFF) for size, crc in value.values())


def _is_map(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, kind) for entry in value.values())


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
