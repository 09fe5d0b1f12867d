"""The screen of `tools.top`: one frame, from what a run's folder and shared memory say. No reading, no clock."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from accerl_mp.tools.live import Live, ProcessView
from accerl_mp.tools.run_folder import PHASE_NAMES

WAITS = {"wait", "reply", "work", "ack", "idle", "evaluation"}
"""Phases of `Time/<role>/<phase>` in which a process does nothing itself."""
STATE_STYLES = {
    "running": "green",
    **dict.fromkeys(("starting", "stopping"), "yellow"),
    **dict.fromkeys(("failed", "dead", "silent"), "bold red"),
}
LONG_WAIT_S = 30.0
"""From here on a wait is in the logs too."""
_LABEL_WIDTH = 11
_GROUPS_WIDTH = 78
_SPARK, _ASCII_SPARK = "".join(map(chr, range(0x2581, 0x2589))), "_.-=*#"
_FULL, _LIGHT = "\u2588", "\u2591"


@dataclass(frozen=True)
class Frame:
    """Everything that a frame shows."""

    run_dir: str
    live: Live
    status: Mapping[str, Any]
    flags: Mapping[str, Any]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By tag, oldest first."""
    failure: str = ""
    is_stopped: bool = False
    """Somebody has asked it to end."""
    has_ended: bool = False
    """Its newest start has ended in order."""
    begins_at: tuple[int, int] = (0, 0)
    """Optimizer step and round that its newest start goes on from."""
    is_interactive: bool = False

    @property
    def is_starting(self) -> bool:
        """There is no supervisor yet, but somebody who is about to make one; or nothing is played yet, as vLLM has no weights."""
        if self.live.is_running:
            return not self.live.has_weights and any(process.state in ("none", "starting") for process in self.live.processes)
        return self.live.is_launched and not (self.failure or self.is_stopped or self.has_ended)

    @property
    def step(self) -> int:
        return self._now("optimizer_step", "step", self.begins_at[0])

    @property
    def round(self) -> int:
        return self._now("round", "round", self.begins_at[1])

    def _now(self, word: str, field_name: str, first: int) -> int:
        """Of a run that starts, what it goes on from: its trainer says so only once it has read the state."""
        if self.is_starting:
            return first
        noted = self.status.get(field_name, 0)
        return max(self.live.board.get(word, noted), first) if self.live.is_running else noted

    @property
    def version(self) -> int:
        return (
            self.live.board.get("policy_version", self.status.get("version", -1))
            if self.live.is_running
            else self.status.get("version", -1)
        )


class Screen:
    """A frame as rich draws it: as wide as the terminal, never higher; processes give way first."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, can_draw = options.max_width, not options.ascii_only
        head = [_title(self._frame, width), *_numbers(self._frame, width, can_draw)]
        yield from head
        used = sum(len(console.render_lines(part, options.reset_height())) for part in head)
        room = options.height - used - self._frame.is_interactive if options.height else None
        yield from _process_lines(self._frame, room)
        if self._frame.is_interactive:
            yield Text("q quits", style="dim")


def sparkline(values: Sequence[float], width: int, *, can_draw: bool = True) -> str:
    """The newest values, `width` at most; one that is constant is drawn low."""
    glyphs = _SPARK if can_draw else _ASCII_SPARK
    shown = list(values)[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    if high <= low:
        return glyphs[0] * len(shown)
    return "".join(glyphs[min(len(glyphs) - 1, int((value - low) / (high - low) * len(glyphs)))] for value in shown)


def bar(share: float, width: int, *, can_draw: bool = True) -> str:
    full, light = (_FULL, _LIGHT) if can_draw else ("#", ".")
    filled = round(max(0.0, min(1.0, share)) * width)
    return full * filled + light * (width - filled)


def duration(seconds: float) -> str:
    """Example: `4:05`, `2:14:00`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def plain(text: str) -> str:
    """Without control characters: errors and names may hold what a game or a model wrote, and a terminal obeys it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def fold(processes: Sequence[ProcessView]) -> list[tuple[str, ProcessView]]:
    """(name, one of them): neighbours of a role in one state, waiting for the same, are one line with the longest wait."""
    groups: list[list[ProcessView]] = []
    for process in processes:
        alike = groups and _kind(groups[-1][-1]) == _kind(process)
        if alike:
            groups[-1].append(process)
        else:
            groups.append([process])
    return [(_folded_name(group), max(group, key=lambda one: (one.waits_s, one.tick_age_s))) for group in groups]


def _kind(process: ProcessView) -> tuple[Any, ...]:
    what = "".join(" " if letter.isdigit() else letter for letter in process.waits_for)
    return process.role, process.state, what, process.num_restarts, process.error


def _folded_name(group: Sequence[ProcessView]) -> str:
    if len(group) == 1:
        return group[0].name
    return f"{group[0].name}-{group[-1].name.partition('/')[2]}"


def _title(frame: Frame, width: int) -> RenderableType:
    """The folder, its end if there is no room for more, and how far the run is."""
    state, style = _run_state(frame)
    steps = f"step {frame.step}" + (f"/{frame.flags['max_steps']}" if "max_steps" in frame.flags else "")
    version = frame.version if frame.version >= 0 else "-"
    right = Text.assemble((state, style), f" {duration(frame.status.get('wall_s', 0))}  {steps}  round {frame.round}  version {version}")
    name = plain(frame.run_dir)
    room = max(4, width - len(right) - 2)
    name = name if len(name) <= room else f"..{name[2 - room :]}"
    return Text.assemble((name, "bold"), " " * max(2, width - len(name) - len(right)), right, overflow="ellipsis", no_wrap=True)


def _run_state(frame: Frame) -> tuple[str, str]:
    if frame.live.holder:
        return f"held by pdb in {frame.live.holder}", "bold yellow"
    if frame.is_starting:
        return "starting", "bold yellow"
    if frame.live.is_running:
        return "running", "bold green"
    if frame.failure:
        return "failed", "bold red"
    if frame.is_stopped:
        return "stopped", "bold"
    return ("ended", "bold") if frame.status.get("has_ended") else ("not running", "bold yellow")


def _numbers(frame: Frame, width: int, can_draw: bool) -> list[RenderableType]:
    """Labelled lines; one of which nothing is measured yet is left out."""
    spark = max(8, min(40, (width - 60) // 2 + 10))
    rows = [
        ("win rate", _win_rate(frame, spark, can_draw, with_groups=width >= _GROUPS_WIDTH)),
        ("held out", _held_out(frame)),
        ("tokens/s", _throughput(frame, spark, can_draw)),
        ("lag", _lag(frame)),
        ("rings" if frame.live.rings else "engines", _rings(frame, can_draw)),
        *((role, _shares(shares, can_draw)) for role, shares in _by_role(frame.status)),
        ("bottleneck", Text(plain(frame.status.get("bottleneck", "")), style="bold")),
        ("failure", Text(plain(frame.failure), style="bold red")),
        (
            "",
            Text("the first round has not closed yet", style="dim")
            if frame.live.is_running and "bottleneck" not in frame.status
            else Text(),
        ),
    ]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH, style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text.plain:
            grid.add_row(label, text)
    return [grid]


def _win_rate(frame: Frame, width: int, can_draw: bool, *, with_groups: bool) -> Text:
    """With the share of groups whose episodes end alike, as the bottleneck's sentence has it: they hold no signal."""
    if "win_rate" not in frame.status:
        return Text("")
    line = sparkline(frame.series.get("TextWorld/WinRate", ()), width, can_draw=can_draw)
    window = f"last {frame.status.get('window_episodes', 0):,.0f}"
    invalid = f"invalid {100 * frame.status.get('invalid_action_rate', 0):.1f} %"
    share = frame.status.get("groups_alike")
    alike = f"  {100 * share:.0f} % alike" if with_groups and share is not None else ""
    return Text.assemble((f"{frame.status['win_rate']:.2f} ", "bold"), (line, "green"), f"  {window}  {invalid}{alike}")


def _held_out(frame: Frame) -> Text:
    first, last = frame.status.get("eval_first", {}), frame.status.get("eval_last", {})
    if "win_rate" not in last:
        return Text("")
    parts = [f"{last['win_rate']:.2f} at step {last['step']}"]
    if first.get("step") != last["step"] and "win_rate" in first:
        best = frame.status.get("eval_best", last)
        parts += [f"{first['win_rate']:.2f} before (step {first['step']})", f"best {best['win_rate']:.2f} (step {best['step']})"]
    running = frame.live.board.get("eval_asked", 0) - frame.live.board.get("eval_done", 0)
    return Text("  ".join([*parts, *(["one is running"] if frame.live.is_running and running > 0 else [])]))


def _throughput(frame: Frame, width: int, can_draw: bool) -> Text:
    now = frame.status.get("throughput", {})
    line = Text()
    for name, field_name, tag in (
        ("trained", "trained_tokens_per_s", "Train/TokensPerSec"),
        ("generated", "generated_tokens_per_s", "Infer/TokensPerSec"),
    ):
        if field_name in now:
            spark = sparkline(frame.series.get(tag, ()), width // 2, can_draw=can_draw)
            line.append(f"{name} {now[field_name]:,.0f} ").append(spark, "blue").append("  ")
    rates = (("samples", "samples_per_s"), ("episodes", "episodes_per_s"))
    line.append("  ".join(f"{name} {now[key]:.1f}/s" for name, key in rates if key in now))
    return line


def _lag(frame: Frame) -> Text:
    if "policy_lag_mean" not in frame.status:
        return Text("")
    limit = frame.flags.get("max_policy_lag")
    oldest = frame.status.get("policy_lag_oldest_max", 0)
    return Text(f"mean {frame.status['policy_lag_mean']:.1f}  oldest {oldest:.0f}  limit {limit or 'none'} versions")


def _rings(frame: Frame, can_draw: bool) -> Text:
    """Of each rank: fill, samples that are not trained yet, slots; of many ranks the mean and the emptiest. Then requests in engines."""
    rings, line = frame.live.rings, Text()
    for ring in rings if len(rings) <= 2 else sorted(rings, key=lambda one: one.fill)[:1]:
        wanted = f" wants {ring.num_wanted}" if ring.num_wanted else ""
        text = f"{bar(ring.fill, 10, can_draw=can_draw)} {ring.num_unused}/{ring.capacity}{wanted}  "
        line.append(f"{'emptiest ' if len(rings) > 2 else ''}{ring.rank} {text}")
    if len(rings) > 2:
        line.append(f"mean fill {100 * statistics.mean(ring.fill for ring in rings):.0f} %  ")
    if running := frame.series.get("Infer/RunningRequestsMean"):
        line.append(f"requests {running[-1]:.1f}")
    return line


def _by_role(status: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    shares = status.get("shares", {})
    order = [role for role in ("trainer", "rollout", "inference", "ingest") if role in shares]
    return [(role, shares[role]) for role in order]


def _shares(shares: Mapping[str, float], can_draw: bool) -> Text:
    """Busy part of the bar first, then each phase that counts."""
    busy = sum(share for phase, share in shares.items() if phase not in WAITS)
    largest = sorted(shares.items(), key=lambda item: -item[1])
    text = "  ".join(f"{PHASE_NAMES.get(phase, phase)} {100 * share:.0f} %" for phase, share in largest if share >= 0.005)
    return Text.assemble((bar(busy, 12, can_draw=can_draw), "magenta"), f" {text}")


def _process_lines(frame: Frame, room: int | None) -> list[RenderableType]:
    """The table of processes in `room` lines (None: as many as it takes)."""
    if not frame.live.processes:
        said = "its processes come next" if frame.is_starting else "no process of the run lives"
        return [Text(said, style="dim")]
    processes = [_not_yet_begun(process, frame) for process in frame.live.processes]
    rows = [(process.name, process) for process in processes]
    if room is not None and len(rows) + 1 > room:
        rows = fold(processes)
    num_shown = len(rows) if room is None or len(rows) + 1 <= room else max(1, room - 2)
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name, options in (
        ("process", {}),
        ("state", {}),
        ("waits for", {"ratio": 1, "overflow": "ellipsis"}),
        ("since", {"justify": "right"}),
        ("restarts", {"justify": "right"}),
    ):
        table.add_column(name, no_wrap=True, **options)
    for name, process in rows[:num_shown]:
        table.add_row(name, *_cells(process))
    more = [Text(f"and {len(rows) - num_shown} more", style="dim")] if num_shown < len(rows) else []
    return [Group(table, *more)]


def _not_yet_begun(process: ProcessView, frame: Frame) -> ProcessView:
    """A process of a running run enters itself into the table once Python is up, which takes seconds under load."""
    return replace(process, state="starting") if process.state == "none" and frame.live.is_running else process


def _cells(process: ProcessView) -> list[Text]:
    """State; what it waits for, or that it works; since when: of the wait, or of the last turn of its loop; restarts."""
    restarts = Text(str(process.num_restarts), style="yellow") if process.num_restarts else Text("")
    what, since_s = Text(plain(process.waits_for)), process.waits_s
    if process.error and process.state in ("failed", "dead"):
        what = Text(plain(process.error), style="red")
    elif not process.waits_for and process.state == "running":
        what, since_s = Text("works", style="dim"), process.tick_age_s
    is_long = since_s >= LONG_WAIT_S and process.state == "running" and process.role not in ("stats", "supervisor")
    since = Text(duration(since_s) if what.plain and since_s >= 1 else "", style="yellow" if is_long else "")
    state = "-" if process.state == "none" else process.state  # it has not begun
    return [Text(state, style=STATE_STYLES.get(process.state, "")), what, since, restarts]
