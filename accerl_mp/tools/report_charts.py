"""The report's charts as SVG text: lines over optimizer steps, and shares of time on top of each other.

Colours are classes (`s0`, `f0`, ...) of the page's style sheet, so that one picture serves dark, light and paper. Every line
has a dash pattern of its own: nobody has to tell colours apart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22
MAX_POINTS = 400
"""Of a line; a longer run's are means of neighbours."""

Point = tuple[float, float]
Series = dict[str, list[Point]]


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    title: str
    unit: str
    """Empty: a bare number. `share` is shown in percent."""
    tags: dict[str, str]
    """Legend -> tag, or for a stacked chart one `Time/<role>/` whose phases all are shown."""
    limits: tuple[float | None, float | None] = (None, None)
    """Of the y axis; None: as the values need."""
    is_stacked: bool = False
    note: str = ""


CHARTS = (
    Chart("Win rate", "share", {"training games": "TextWorld/WinRate", "held-out games": "Eval/WinRate"}, (0, 1)),
    Chart("Normalised score", "share", {"training games": "TextWorld/NormalizedScore", "held-out games": "Eval/NormalizedScore"}, (0, 1)),
    Chart(
        "Invalid replies", "share", {"training games": "TextWorld/InvalidActionRate", "held-out games": "Eval/InvalidActionRate"}, (0, None)
    ),
    Chart(
        "KL, sampling against training policy",
        "nats",
        {
            "all tokens": "KL/OldNewK3TokenMean",
            "same version (kernels alone)": "KL/TrainerInferK3",
            "from the start model": "KL/RefK3TokenMean",
        },
        (0, None),
    ),
    Chart(
        "Policy lag",
        "pushes",
        {
            "newest token, mean": "Replay/TrainSampleTrainerVersionLagMean",
            "oldest token, mean": "Replay/PolicyLagOldestMean",
            "oldest token, most": "Replay/PolicyLagOldestMax",
        },
        (0, None),
    ),
    Chart("Throughput", "tokens/s", {"trained": "Train/TokensPerSec", "generated": "Infer/TokensPerSec"}, (0, None)),
    Chart("Loss", "nats", {"loss": "Train/Loss"}),
    Chart("Entropy", "nats", {"entropy of the policy": "Train/Entropy"}, (0, None)),
    Chart("Gradient norm", "", {"before clipping": "Train/GradNorm"}, (0, None)),
    Chart("Rings", "share", {"filled": "Replay/FillRatio"}, (0, 1)),
    Chart("Time of the trainer", "share", {"Time/trainer/": "Time/trainer/"}, (0, 1), is_stacked=True),
    Chart("Time of the rollouts", "share", {"Time/rollout/": "Time/rollout/"}, (0, 1), is_stacked=True),
    Chart("Standstill of a push", "s", {"pause to resume": "Sync/ElapsedSeconds"}, (0, None)),
)


@dataclass(frozen=True)
class Drawn:
    """A chart as a figure, and the numbers that its cursor reads."""

    html: str
    data: dict[str, Any] = field(default_factory=dict)


def draw(chart: Chart, number: int, series: Series) -> Drawn | None:
    """None where nothing of it was measured. `number` is the chart's place on the page."""
    series = {name: thinned(points) for name, points in (_filled(series) if chart.is_stacked else series).items() if points}
    if not series:
        return None
    steps = [step for points in series.values() for step, _ in points]
    x_limits = (min(steps), max(steps)) if max(steps) > min(steps) else (min(steps) - 0.5, max(steps) + 0.5)
    y_limits = (0.0, 1.0) if chart.is_stacked else _limits(series, chart.limits)
    place = _placer(x_limits, y_limits)
    shapes = _areas(series, place) if chart.is_stacked else _lines(series, place)
    kind = "f" if chart.is_stacked else "s"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_spoken(chart, series))}">'
        f"{_axes(chart, x_limits, y_limits, place)}{shapes}"
        f'<line class="cursor" x1="-9" x2="-9" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true">{_key(kind, index)}</svg>{escape(name)} '
        f"<b>{escape(shown(points[-1][1], chart.unit))}</b></li>"
        for index, (name, points) in enumerate(series.items())
    )
    unit = "" if chart.unit in ("", "share") else f" <small>{escape(chart.unit)}</small>"
    html = (
        f'<figure class="chart" tabindex="0" data-chart="{number}"><figcaption>{escape(chart.title)}{unit}</figcaption>'
        f'{svg}<ul class="legend">{legend}</ul><output aria-live="polite"></output></figure>'
    )
    return Drawn(html, {"unit": chart.unit, "x": x_limits, "series": [{"name": name, "points": points} for name, points in series.items()]})


def _filled(series: Series) -> Series:
    """A phase that a round did not have took none of its time."""
    steps = sorted({step for points in series.values() for step, _ in points})
    values = {name: dict(points) for name, points in series.items()}
    return {name: [(step, found.get(step, 0.0)) for step in steps] for name, found in values.items()}


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS: means of as many neighbours each; the last point stands for itself."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil((len(points) - 1) / (MAX_POINTS - 1))
    parts = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts] + [points[-1]]


def shown(value: float, unit: str) -> str:
    """A number for people: three digits that count, shares in percent."""
    if unit == "share":
        return f"{100 * value:.1f} %" if abs(value) < 0.995 else f"{100 * value:.0f} %"
    if value == 0 or 0.001 <= abs(value) < 100_000:
        return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"
    return f"{value:.2e}"


def _limits(series: Series, wanted: tuple[float | None, float | None]) -> tuple[float, float]:
    values = [value for points in series.values() for _, value in points]
    low = min(values) if wanted[0] is None else min(wanted[0], *values, wanted[0])
    high = max(values) if wanted[1] is None else max(wanted[1], *values, wanted[1])
    return (low, high) if high > low else (low, low + 1.0)


def _placer(x_limits: Point, y_limits: Point) -> Callable[[Point], Point]:
    """(step, value) -> a place in the picture."""
    (x_low, x_high), (y_low, y_high) = x_limits, y_limits

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    return place


def _lines(series: Series, place: Callable[[Point], Point]) -> str:
    """A few points get marks; one alone would have no line."""
    parts = []
    for index, points in enumerate(series.values()):
        places = [place(point) for point in points]
        parts.append(f'<polyline class="line s{index}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>')
        if len(points) <= 40:
            parts += [f'<circle class="mark s{index}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in places]
    return "".join(parts)


def _areas(series: Series, place: Callable[[Point], Point]) -> str:
    """Each on top of those before; all have the same steps."""
    base = [(step, 0.0) for step, _ in next(iter(series.values()))]
    parts = []
    for index, points in enumerate(series.values()):
        top = [(step, min(1.0, below + value)) for (step, below), (_, value) in zip(base, points, strict=True)]
        edge = [place(point) for point in (*top, *reversed(base))]
        parts.append(f'<polygon class="area f{index % 8}" points="{" ".join(f"{x},{y}" for x, y in edge)}"/>')
        base = top
    return "".join(parts)


def _axes(chart: Chart, x_limits: Point, y_limits: Point, place: Callable[[Point], Point]) -> str:
    parts = []
    for value in _ticks(*y_limits, 4):
        y = place((x_limits[0], value))[1]
        label = f"{100 * value:.0f} %" if chart.unit == "share" and y_limits[1] >= 0.1 else shown(value, chart.unit)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3}" text-anchor="end">{escape(label)}</text>')
    for value in _ticks(*x_limits, 5):
        if value == int(value):
            x = place((value, y_limits[0]))[0]
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 7}" text-anchor="middle">{value:,.0f}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within the limits, `most` or fewer."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(number * size, 12) for number in range(first, last + 1)]


def _key(kind: str, index: int) -> str:
    if kind == "f":
        return f'<rect class="area f{index % 8}" width="22" height="8"/>'
    return f'<line class="line s{index}" x1="0" x2="22" y1="4" y2="4"/>'


def _spoken(chart: Chart, series: Series) -> str:
    """For those who don't see it."""
    parts = []
    for name, points in series.items():
        (first, before), (last, after) = points[0], points[-1]
        parts.append(f"{name}: {shown(before, chart.unit)} at step {first:,.0f}, {shown(after, chart.unit)} at step {last:,.0f}")
    return f"{chart.title}. " + "; ".join(parts)
