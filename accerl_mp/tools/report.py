"""Make a run's report: one HTML file with curves, evaluations, flags, restarts and a viewer of token-by-token transcripts.

    python -m accerl_mp.tools.report [RUN] [--out FILE] [--episodes 40]

RUN is a run folder, or a folder of runs, of which the newest is taken (default: runs/TextWorld_FSDP); it may still be going on.
The file (default: RUN/report.html) needs nothing beside it: no network, no server. What games and models wrote is shown as text;
the page's own policy forbids every script and every address but what the tool put in.
"""

import argparse
import base64
import collections
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.cli import option_of
from accerl_mp.config import Config, ConfigError
from accerl_mp.stats.bottleneck import Doctor
from accerl_mp.tools import report_charts
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.report_charts import CHARTS, Chart, Drawn, Series, shown
from accerl_mp.tools.report_episodes import as_data, fitting
from accerl_mp.tools.run_folder import PHASE_NAMES, NoRunError, Row, RunFolder, find_run
from accerl_mp.tools.scores import wilson

_PAGE = Path(__file__).parent / "page"
_MOST_BYTES = 32 << 20
"""Of the transcripts in a page: what a phone still opens."""


def build(run: RunFolder, *, most_episodes: int = 40) -> str:
    """The whole page."""
    run.metrics()
    charts = [drawn for chart in CHARTS if (drawn := report_charts.draw(chart, 0, chart_series(run, chart)))]
    charts = [_numbered(drawn, number) for number, drawn in enumerate(charts)]
    sizes = run.transcript_sizes()
    picked = fitting(sizes, most_episodes, _MOST_BYTES)
    episodes = [as_data(name, transcript) for name in picked if (transcript := run.transcript(name))]
    data = {
        "geometry": {"left": report_charts.LEFT, "right": report_charts.RIGHT, "width": report_charts.WIDTH},
        "charts": [drawn.data for drawn in charts],
        "episodes": episodes,
    }
    sections = {
        "Curves": '<div class="charts">' + "".join(drawn.html for drawn in charts) + "</div>"
        if charts
        else _soft("No round has closed yet."),
        "Evaluations": evaluation_tables(run.evaluations()),
        "What bounded the run": bounds(run),
        "Transcripts": viewer(len(episodes), len(sizes)),
        "Settings": settings(run),
        "Restarts": restarts(run),
    }
    return _document(run, sections, data)


def chart_series(run: RunFolder, chart: Chart) -> Series:
    """The chart's lines by legend; of a stacked one every phase, the largest first."""
    if not chart.is_stacked:
        return {name: points for name, tag in chart.tags.items() if (points := run.series(tag))}
    prefix = next(iter(chart.tags.values()))
    tags = {tag for row in run.metrics() for tag in row if tag.startswith(prefix)}
    found = {PHASE_NAMES.get(phase := tag.removeprefix(prefix), phase): run.series(tag) for tag in tags}
    return dict(sorted(found.items(), key=lambda item: -math.fsum(value for _, value in item[1])))


def evaluation_tables(evaluations: Sequence[Row]) -> str:
    """One row an evaluation, with the 95 % interval of its win rate; then every game in the first and the last of them."""
    if not evaluations:
        return _soft("The run had no held-out games (--eval-game-dir), or no evaluation has ended.")
    best = max(evaluations, key=lambda one: (one.get("Eval/WinRate", 0.0), one.get("step", 0)))
    rows = [(_evaluation_row(one), "best" if one is best and len(evaluations) > 1 else "") for one in evaluations]
    head = ("step", "version", "win rate", "95 % interval", "score", "invalid", "env steps", "cut", "episodes", "seconds")
    return _table(head, [row for row, _ in rows], classes=[kind for _, kind in rows]) + _games_table(evaluations[0], evaluations[-1])


def _evaluation_row(one: Row) -> list[str]:
    def cell(tag: str, unit: str = "share") -> str:
        return shown(one[tag], unit) if tag in one else "-"

    episodes = one.get("Eval/Episodes", 0)
    won = wilson(one.get("Eval/WinRate", 0.0) * episodes, episodes)
    return [
        str(one.get("step", "-")),
        str(one.get("version", "-")),
        cell("Eval/WinRate"),
        f"{100 * won.low:.0f} to {100 * won.high:.0f} %",
        *(cell(f"Eval/{name}") for name in ("NormalizedScore", "InvalidActionRate")),
        cell("Eval/EnvStepsMean", ""),
        cell("Eval/TruncatedRate"),
        *(cell(f"Eval/{name}", "") for name in ("Episodes", "Seconds")),
    ]


def _games_table(first: Row, last: Row) -> str:
    before = {game["game"]: game for game in first.get("games", [])}
    rows = [
        [Path(game["game"]).name, _wins(before.get(game["game"])), _wins(game), f"{game['score']:g} of {game['max_score']:g}"]
        for game in sorted(last.get("games", []), key=lambda game: (game["win_rate"], game["game"]))
    ]
    failed = "".join(f"<p>Not played, its files are broken: {escape(str(path))}</p>" for path in last.get("failed_games", []))
    head = ("game", f"won at step {first.get('step')}", f"won at step {last.get('step')}", "score there")
    return f"<details><summary>Game by game ({len(rows)})</summary>{_table(head, rows, num_text=1)}</details>{failed}"


def _wins(game: Row | None) -> str:
    return f"{sum(bool(episode['won']) for episode in game['episodes'])} of {len(game['episodes'])}" if game else "-"


def bounds(run: RunFolder) -> str:
    """How many rounds were bound by what, and the last sentence of each kind."""
    try:
        config = Config.from_flat(run.flags())
    except (ConfigError, TypeError):  # settings of another version of the package
        return _soft("The run's settings are those of another version, so its rounds cannot be judged.")
    doctor = Doctor(config)
    said = [doctor.say(row) for row in run.metrics() if "Time/trainer/wait" in row or "Time/trainer/compute" in row]
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for one in said:
        kinds[one.partition(":")[0]].append(one)
    rows = [[f"{len(found)} of {len(said)}", found[-1]] for found in sorted(kinds.values(), key=len, reverse=True)]
    if not rows:
        return _soft("No round has closed yet.")
    return re.sub(r"--[a-z-]+", r'<span class="flag">\g<0></span>', _table(("rounds", "the last time"), rows, num_text=2))


def viewer(num_shown: int, num_written: int) -> str:
    """The frame that `script.js` fills."""
    if not num_shown:
        return _soft("The run wrote no transcripts (--transcripts-every).")
    of_all = f"{num_shown} of the {num_written} transcripts" if num_shown < num_written else f"all {num_written} transcripts"
    options = {"all": "all", "train": "training", "eval": "held out", "trained": "trained", "won": "won", "notwon": "not won"}
    choices = "".join(f'<option value="{value}">{text}</option>' for value, text in options.items())
    return f"""<p class="soft">{of_all} in <code>episodes/</code> (every N-th episode, --transcripts-every).
<span class="keys">Keys: <kbd>j</kbd> <kbd>k</kbd> next and previous episode, arrows token by token, <kbd>n</kbd> <kbd>p</kbd> within the
replies, <kbd>1</kbd> to <kbd>5</kbd> what the colours say.</span></p>
<noscript><p>The viewer needs JavaScript; nothing else on this page does.</p></noscript>
<div data-part="viewer">
<div class="controls">
<label>which <select data-part="filter">{choices}</select></label>
<label>episode <select data-part="episode"></select></label>
<button type="button" data-part="previous">previous</button> <button type="button" data-part="next">next</button>
<fieldset data-part="modes" aria-label="what the colours say"></fieldset>
</div>
<p class="scale" data-part="scale"></p><div data-part="about"></div>
<div class="viewer"><div data-part="stream" tabindex="0" role="group" aria-label="tokens of the episode"></div>
<aside class="details" aria-live="polite" aria-label="the token"><strong>token</strong><div data-part="token"></div></aside></div>
</div>"""


def settings(run: RunFolder) -> str:
    """What was typed, what differs from the defaults, and the rest."""
    flags, defaults = run.flags(), Config().to_flat()
    changed = [[option_of(name), _flag(value), _flag(defaults.get(name))] for name, value in flags.items() if value != defaults.get(name)]
    rest = [[option_of(name), _flag(value)] for name, value in flags.items()]
    versions = [[name, str(value)] for name, value in run.versions().items()]
    return (
        f"<pre>{escape(run.command())}</pre>"
        + _table(("not as by default", "value", "default"), changed, num_text=3)
        + f"<details><summary>All flags ({len(rest)})</summary>{_table(('flag', 'value'), rest, num_text=2)}</details>"
        + f"<details><summary>Versions</summary>{_table(('part', 'version'), versions, num_text=2)}</details>"
    )


def restarts(run: RunFolder) -> str:
    """Processes that died and were started again, and the failure that ended the run."""
    failure, found = run.failure(), run.restarts()
    said = f'<p class="said bad">The run failed: {escape(failure)}</p>' if failure else ""
    if not found:
        return said + _soft("No process had to be started again.")
    return said + _table(("time of day", "what happened"), [[one.time, one.text] for one in found], num_text=2)


def _document(run: RunFolder, sections: Mapping[str, str], data: Mapping[str, Any]) -> str:
    style, script = ((_PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    allowed = f"style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    name = run.run_dir.resolve().name
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    menu = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for title, anchor in anchors.items())
    body = "".join(f'<section id="{anchors[title]}"><h2>{title}</h2>{html}</section>' for title, html in sections.items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>{escape(name)}: accerl_mp run</title><style>{style}</style></head><body>
<a class="skip" href="#transcripts">to the transcripts</a>
<header><h1>{escape(name)}</h1><p class="soft">{escape(str(run.run_dir))}, as of {time.strftime("%Y-%m-%d %H:%M:%S")}</p>
{headlines(run)}<nav aria-label="sections"><ul>{menu}</ul></nav></header>
<main>{body}</main>
<script type="application/json" id="data">{as_inline_json(data)}</script>
<script>{script}</script></body></html>
"""


def _how_it_ended(run: RunFolder) -> str:
    """Empty for a run that reached its end."""
    if run.status().get("has_ended"):
        return ""
    if failure := run.failure():
        return f"The run has failed: {failure.splitlines()[0]}"
    if run.paths.stop.exists():
        return "The run was stopped on request; with the same --log-dir, --resume auto goes on."
    return "The run had not ended when this page was made."


def headlines(run: RunFolder) -> str:
    status = run.status()
    throughput, first, last = status.get("throughput", {}), status.get("eval_first", {}), status.get("eval_last", {})
    facts = {
        "held-out win rate": f"{first['win_rate']:.2f} \u2192 {last['win_rate']:.2f}"
        if "win_rate" in first and "win_rate" in last
        else None,
        f"win rate, last {status.get('window_episodes', 0):,.0f} episodes": f"{status['win_rate']:.2f}" if "win_rate" in status else None,
        "optimizer steps": f"{status.get('step', 0):,}",
        "episodes": f"{status.get('episodes', 0):,}",
        "time in rounds": f"{status.get('training_s', 0) / 60:.1f} min",
        **{
            f"tokens/s {what}, last round": f"{throughput[f'{what}_tokens_per_s']:,.0f}" if f"{what}_tokens_per_s" in throughput else None
            for what in ("trained", "generated")
        },
        "processes restarted": f"{len(run.restarts())}" + (f", in {starts} starts" if (starts := len(run.commands())) > 1 else ""),
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items() if text is not None)
    state = f'<p class="said">{escape(said)}</p>' if (said := _how_it_ended(run)) else ""
    bound = f'<p class="said">The last rounds: {escape(status["bottleneck"])}</p>' if "bottleneck" in status else ""
    return f'<dl class="facts">{cells}</dl>{state}{bound}'


def as_inline_json(data: Any) -> str:
    """JSON that can stand in a script element: no `<`, `>` or `&` in it, whatever the strings hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], *, num_text: int = 0, classes: Sequence[str] = ()) -> str:
    """`num_text`: how many of the first columns are text; the others are numbers, to the right."""

    def cells(name: str, row: Iterable[str]) -> str:
        return "".join(f"<{name}{' class=n' if at >= num_text else ''}>{escape(text)}</{name}>" for at, text in enumerate(row))

    body = "".join(
        f"<tr{f' class={classes[at]}' if at < len(classes) and classes[at] else ''}>{cells('td', row)}</tr>" for at, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _flag(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _numbered(drawn: Drawn, number: int) -> Drawn:
    return Drawn(drawn.html.replace('data-chart="0"', f'data-chart="{number}"', 1), drawn.data)


def _digest(text: str) -> str:
    """As a content security policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("report", "[RUN] [FLAGS ...]", __doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder, or a folder of runs: the newest")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write [RUN/report.html]")
    parser.add_argument("--episodes", type=int, default=40, metavar="N", help="most transcripts in the page")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.episodes < 0:
        parser.error(f"--episodes {args.episodes}: must be 0 or more")
    try:
        run = RunFolder(find_run(args.run))
    except NoRunError as error:
        parser.error(str(error))
    out = args.out or run.run_dir / "report.html"
    page = build(run, most_episodes=args.episodes)
    temporary = out.with_name(out.name + ".new")
    try:
        # Half a surrogate, which a broken reply may hold, has no bytes of its own.
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(out)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        parser.error(f"--out {out}: cannot be written ({error.strerror})")
    print(f"{out} ({len(page) / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
