"""Plots of results, one PNG a file: `python bench/plots.py RESULT.json ... [--curves] [--out FOLDER]`.

Every measure of a result becomes a panel of bars, one a setting, with the spread of its samples as a line; every series a panel of curves.
The last line is a JSON object that names the files. Nothing is measured here, so nothing is limited.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.common import ResultError, read_result, short

WIDTH, BAR = 9.0, 0.32
"""Inches."""
_DOTS_AN_INCH, _MOST_BYTES = (110, 95, 80, 65), 200 << 10
"""As fine as fits."""


def panels_of(result: dict[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """Measures and series by name, in their order."""
    measures, series = defaultdict(list), defaultdict(list)
    for one in result["measures"]:
        measures[f"{one['name']}, {one['unit']}"].append(one)
    for one in result["series"]:
        series[f"{one['name']}, {one['y']}"].append(one)
    return measures, series


def setting(one: dict[str, Any], common: dict[str, Any] | None = None) -> str:
    """What sets this one apart from others of its panel, which all have `common`."""
    return ", ".join(f"{name} {value}" for name, value in one["labels"].items() if (common or {}).get(name) != value)


def draw_bars(axes: Axes, title: str, bars: list[dict[str, Any]]) -> None:
    """Medians, written beside their bars; the line is from the smallest to the largest sample. Limits are grey."""
    places = range(len(bars))
    medians = [one["median"] for one in bars]
    low = [one["median"] - min(one["samples"]) for one in bars]
    high = [max(one["samples"]) - one["median"] for one in bars]
    common = {name: value for name, value in bars[0]["labels"].items() if all(one["labels"].get(name) == value for one in bars)}
    colours = ["#9a9a9a" if f"{title} {setting(one)}".count("limit:") else "#4878a8" for one in bars]
    drawn = axes.barh(places, medians, xerr=[low, high], color=colours, ecolor="#202020", height=0.7)
    axes.bar_label(drawn, [short(median) for median in medians], padding=4, fontsize=7)
    axes.margins(x=0.12)
    axes.set_yticks(places, [setting(one, common) for one in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_title("; ".join(filter(None, [title, setting({"labels": common})])), fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=7)


def draw_curves(axes: Axes, title: str, curves: list[dict[str, Any]]) -> None:
    colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(map(setting, curves)))}
    for one in curves:
        axes.plot(*zip(*one["points"], strict=True), color=colours[setting(one)], marker=".", label=setting(one))
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=7)
    axes.set_xlabel(curves[0]["x"], fontsize=7)
    axes.set_title(title, fontsize=9, loc="left")


def plot(result: dict[str, Any], file: Path, *, curves_alone: bool = False) -> None:
    measures, series = panels_of(result)
    measures = {} if curves_alone and series else measures
    heights = [0.7 + BAR * len(bars) for bars in measures.values()] + [3.0] * len(series)
    figure, grid = plt.subplots(len(heights), 1, figsize=(WIDTH, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained")
    drawn = [(draw_bars, *panel) for panel in measures.items()] + [(draw_curves, *panel) for panel in series.items()]
    for axes, (draw, title, content) in zip(grid[:, 0], drawn, strict=True):
        draw(axes, title, content)
    machine = result["hardware"]
    figure.suptitle(f"bench/{result['bench']}.py at {result['commit']}, {machine['cores']} cores, {machine['gpus']} GPUs", fontsize=10)
    for dots_an_inch in _DOTS_AN_INCH:
        figure.savefig(file, dpi=dots_an_inch)
        if file.stat().st_size <= _MOST_BYTES:
            break
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="files that --out wrote, or captured output")
    parser.add_argument("--out", type=Path, help="folder of the PNG files (default: beside each result)")
    parser.add_argument("--curves", action="store_true", help="leave the bars out where a result has curves")
    args = parser.parse_args()
    files = []
    for path in args.results:
        try:
            result = read_result(path)
        except (ResultError, OSError) as error:
            print(f"plots.py: {error}", file=sys.stderr)
            return 2
        files.append((args.out or path.parent) / f"{path.stem}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        plot(result, files[-1], curves_alone=args.curves)
        print(files[-1])
    print(json.dumps({"bench": "plots", "files": [str(file) for file in files]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
