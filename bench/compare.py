"""Two results of one script side by side: `python bench/compare.py A.json B.json`.

Each is a file that `--out` wrote, or a script's captured output. Says what changed from A to B for every measure that both have, and what
differs between the two runs (machine, versions, flags): a change of a measure means nothing where the machine changed too. Its own last
line is a JSON object as well. Nothing is measured here, so nothing is limited.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from rich.console import Console
from rich.table import Column, Table

from bench.common import ResultError, read_result

Key = tuple[str, str]


def keyed(result: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Measures by name and setting."""
    return {(one["name"], " ".join(f"{k}={v}" for k, v in one["labels"].items())): one for one in result["measures"]}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """For every measure that both have: medians, B / A, whether that is better, and whether it is outside of both spreads."""
    found, left = [], keyed(before)
    for key, new in keyed(after).items():
        if key not in left:
            continue
        old = left[key]
        ratio = new["median"] / old["median"] if old["median"] else None
        better = {"higher": new["median"] > old["median"], "lower": new["median"] < old["median"]}.get(new["better"])
        apart = min(new["samples"]) > max(old["samples"]) or max(new["samples"]) < min(old["samples"])
        found.append({"name": key[0], "setting": key[1], "unit": new["unit"], "a": old["median"], "b": new["median"], "ratio": ratio})
        found[-1] |= {"better": better, "apart": apart}
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else is not the same between the two runs."""
    lines = []
    for part in ("commit", "hardware", "versions", "flags"):
        one, other = ({part: result[part]} if isinstance(result[part], str) else result[part] for result in (before, after))
        for name in sorted(one.keys() | other.keys()):
            if not name.startswith("load_") and name != "out" and one.get(name) != other.get(name):
                lines.append(f"{part} {name}: {one.get(name)} -> {other.get(name)}")
    return lines


def print_changes(found: list[dict[str, Any]], lines: list[str], names: tuple[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    numbers = [Column(name, justify="right") for name in ("A", "B", "B / A")]
    table = Table("measure", "setting", "unit", *numbers, "", title=f"A: {names[0]}   B: {names[1]}")
    for one in found:
        verdict = "" if one["better"] is None or not one["apart"] else "better" if one["better"] else "WORSE"
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        table.add_row(one["name"], one["setting"], one["unit"], f"{one['a']:.4g}", f"{one['b']:.4g}", ratio, verdict)
    console.print(table)
    for line in lines:
        console.print(f"differs: {line}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    args = parser.parse_args()
    try:
        before, after = read_result(args.before), read_result(args.after)
    except (ResultError, OSError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if before["bench"] != after["bench"]:
        print(f"compare.py: {args.before} is of bench/{before['bench']}.py, {args.after} of bench/{after['bench']}.py", file=sys.stderr)
        return 2
    found, lines = changes(before, after), differences(before, after)
    print_changes(found, lines, (str(args.before), str(args.after)))
    print(json.dumps({"bench": "compare", "of": before["bench"], "changes": found, "differences": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
