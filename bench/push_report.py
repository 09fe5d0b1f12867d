"""What bench/weight_sync.py makes of the times at which vLLM's tokens came, and of the reports of the pushes."""

from typing import Any

import numpy as np

from bench.common import Result

TOKENS_FILE = "tokens.f64"
"""In the run folder, see bench/token_times.py."""
_BEFORE_S, _AFTER_S = 0.002, 0.03
"""A swap's effect on generation shows within this time of it."""
_PHASES = ("begin", "gather", "send", "pause", "load", "resume", "swap", "standstill")


def report_variant(
    result: Result,
    labels: dict[str, str],
    rows: np.ndarray,
    idle: tuple[float, float],
    pushes: list[tuple[float, Any]],
    *,
    reference_s: float,
) -> None:
    """`idle`: from when to when nothing was pushed; `pushes`: (when it began, its PushReport).

    reference_s: in which nothing has happened before each push
    """
    is_staged = labels["staging"] == "on"
    labels = labels | {"swapped": pushes[0][1].path}
    calm = _between(rows, *idle)
    rate = calm[:, 1].sum() / (idle[1] - idle[0])
    result.add("tokens/s without a push", rate, "1/s", "higher", **labels)
    result.add("gap between tokens, ordinary", 1e3 * calm[:: 1 + len(calm) // 400, 2], "ms", "lower", **labels)
    windows, wires, whole = [], [], []
    for at, report in pushes:
        end = at + report.seconds
        # Without staging it stands from before the first byte on.
        swap_at = end - (report.swap_s if is_staged else report.standstill_s)
        windows.append((swap_at - _BEFORE_S, end + _AFTER_S))
        wires.append((at, swap_at) if is_staged else (swap_at, end))
        whole.append(_between(rows, at, end)[:, 1].sum())
    _report_gaps(result, labels, rows, windows, "around a push")
    # New prompts and ended replies make long steps without any push: what windows of the same length hold otherwise.
    width = float(np.median([end - start for start, end in windows]))
    others = [(start, start + width) for start in np.arange(idle[0], idle[1] - width, width)]
    _report_gaps(result, labels, rows, others, "in as much time without a push")
    # A push holds a few steps only, and vLLM's own rate drifts: all pushes together, against as many times shortly before each.
    if rate_before := _rate(rows, [(start - reference_s, start) for start, _ in wires]):
        result.add("rate on the wire / before the push", _rate(rows, wires) / rate_before, "", "higher", **labels)
    result.add("rate on the wire / idle", [_rate(rows, [wire]) / rate for wire in wires], "", "higher", **labels)
    result.add("tokens during a push", whole, "", "higher", **labels)
    result.add("push time", [1e3 * report.seconds for _, report in pushes], "ms", "lower", **labels)
    for phase in _PHASES:
        result.add(f"{phase} time", [1e3 * getattr(report, f"{phase}_s") for _, report in pushes], "ms", "lower", **labels)
    result.add("size", [report.num_bytes / 2**20 for _, report in pushes], "MiB", **labels)
    result.add("on the wire", [report.num_bytes / 1e9 / report.send_s for _, report in pushes], "GB/s", "higher", **labels)


def _report_gaps(result: Result, labels: dict[str, str], rows: np.ndarray, windows: list[tuple[float, float]], where: str) -> None:
    """Twice: over all steps, and over those that no new prompt made longer.

    That is its own step and the one before it: with asynchronous scheduling a step's outputs are taken once the next one is launched.
    """
    has_prompt = rows[:, 3] > 0
    has_prompt[:-1] |= has_prompt[1:]
    decoding = [_between(rows[~has_prompt], *window) for window in windows]
    steps = [_between(rows, *window) for window in windows]
    for name, found in {f"longest {where}": steps, f"longest {where}, steps without a new prompt": decoding}.items():
        if longest := [1e3 * step[:, 2].max() for step in found if len(step)]:
            result.add(f"gap between tokens, {name}", longest, "ms", "lower", **labels)


def _rate(rows: np.ndarray, windows: list[tuple[float, float]]) -> float:
    """Tokens a second."""
    return sum(_between(rows, *window)[:, 1].sum() for window in windows) / sum(end - start for start, end in windows)


def _between(rows: np.ndarray, start: float, end: float) -> np.ndarray:
    return rows[(rows[:, 0] >= start) & (rows[:, 0] < end)]
