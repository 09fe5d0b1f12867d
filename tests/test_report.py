"""The report: its numbers against the run's files, its charts against the formula, and the page in a real browser.

`finished_run/` is a real run, trimmed (`trim_run.py`). Browser tests are skipped where there is no Chromium or Chrome.
"""

import base64
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import dump_dom, needs_browser

from accerl_mp.tools import report
from accerl_mp.tools.report_charts import BOTTOM, CHARTS, HEIGHT, LEFT, MAX_POINTS, RIGHT, TOP, WIDTH, Chart, draw, shown, thinned
from accerl_mp.tools.report_episodes import as_data, chosen, fitting
from accerl_mp.tools.run_folder import RunFolder
from accerl_mp.tools.top import read_frame
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE

FINISHED = Path(__file__).parent / "finished_run"
ATTACK = '</script><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>&lt;b&gt;' + 150 * "w"


FINISHED = Path(__file__).parent / "finished_run"


@pytest.mark.parametrize("damage", ["", "[1, 2, 3]", "[" * 100000, "7", "{}", '{"turns": 4, "step": "x"}', None])
@pytest.mark.parametrize("file", sorted(str(file.relative_to(FINISHED)) for file in FINISHED.rglob("*") if file.is_file()))
def test_a_damaged_file_of_a_run_costs_what_is_in_it(tmp_path: Path, file: str, damage: str | None) -> None:
    """Cut, replaced by something else, or (None) a folder in its place."""
    run = tmp_path / "run"
    shutil.copytree(FINISHED, run)
    (run / file).unlink()
    if damage is None:
        (run / file).mkdir()
    else:
        (run / file).write_text(damage)
    assert "</html>" in report.build(RunFolder(run))
    read_frame(RunFolder(run))


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text of each kind."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(FINISHED, tmp_path / "run"))


def attacked(run_dir: Path) -> Path:
    """Every text that a run holds is an attack."""

    def spoil(value: Any) -> Any:
        match value:
            case dict():
                return {name: spoil(one) for name, one in value.items()}
            case list():
                return [spoil(one) for one in value]
            case str() if value not in ("train", "eval", "samples", "zero_std", "rejected"):
                return value + ATTACK
        return value

    for path in (*run_dir.glob("*.json"), *run_dir.glob("eval/*.json"), *run_dir.glob("episodes/*.json")):
        path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    (run_dir / "command.txt").write_text(ATTACK)
    (run_dir / "failure.txt").write_text(f"role: {ATTACK}\nexit code: 1\nlog file: {ATTACK}\n\n{ATTACK}\n")
    with (run_dir / "logs" / "supervisor-0.log").open("a") as log:
        log.write(f"20:26:11.100 supervisor/0 WARNING lost rollout/1: {ATTACK}, starts again in 0.5 s (restart 1 of 3)\n")
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 5, "version": 5, f"Time/trainer/{ATTACK}": 0.1, "TextWorld/WinRate": 0.5}) + "\n")
    return Path(shutil.move(run_dir, run_dir.parent / "run <b>&amp;"))


# The page


def test_the_page_has_the_runs_numbers(run_dir: Path) -> None:
    run = RunFolder(run_dir)
    html = report.build(run)
    page, status, rows = Page(html), run.status(), run.metrics()
    text = " ".join(part for kind, parts in page.texts.items() if kind not in ("script", "style") for part in parts)
    for part in (status["bottleneck"], f"{status['eval_first']['win_rate']:.2f} \u2192 {status['eval_last']['win_rate']:.2f}"):
        assert part in text
    series = {one["name"]: one["points"] for chart in page.data["charts"] for one in chart["series"]}
    assert series["newest token, mean"] == [
        [row["step"], row[tag]] for row in rows if (tag := "Replay/TrainSampleTrainerVersionLagMean") in row
    ]
    assert series["compute"] == [[row["step"], row["Time/trainer/compute"]] for row in rows if "Time/trainer/compute" in row]
    for evaluation in run.evaluations():
        assert shown(evaluation["Eval/WinRate"], "share") in text
    assert "--train-packing" in text
    assert "no process had to be started again" in text.lower()
    assert len(page.data["episodes"]) == len(list(run_dir.glob("episodes/*.json")))


def test_the_page_needs_nothing_beside_it_and_allows_only_its_own_script(run_dir: Path) -> None:
    html = report.build(RunFolder(attacked(run_dir)))
    page = Page(html)
    policy = next(attributes["content"] for tag, attributes in page.elements if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for kind in ("style", "script"):
        [content] = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S)
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href", "action")]
    assert all(link and link.startswith(("#", "data:,")) for link in links), links
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.elements for name in attributes)


def test_what_a_run_holds_is_never_html(run_dir: Path) -> None:
    clean = Page(report.build(RunFolder(run_dir)))
    spoilt = Page(report.build(RunFolder(attacked(run_dir))))
    assert spoilt.count("img") == spoilt.count("b") - clean.count("b") - 1 == 0  # one legend more: the attack as a phase
    assert spoilt.count("script") == clean.count("script") == 2
    texts = [part for kind in ("td", "pre", "p", "li", "h1") for part in spoilt.texts[kind] if "onerror" in part or "<b>" in part]
    assert len(texts) > 20
    observations = [turn["prompt"] for episode in spoilt.data["episodes"] for turn in episode["turns"]]
    assert all(ATTACK in text for prompt in observations for text in prompt)
    script = (Path(report.__file__).parent / "page" / "script.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|DOMParser|srcdoc|fetch|XMLHttp|WebSocket|import\(", script
    )


def test_json_in_the_page_has_no_markup() -> None:
    text = report.as_inline_json({"a": [ATTACK, "<!--", "]]>", "\u2028"]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["a"][0] == ATTACK


def test_a_run_that_has_nothing_yet_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text("{}")
    page = Page(report.build(RunFolder(tmp_path)))
    assert page.data == {"geometry": {"left": LEFT, "right": RIGHT, "width": WIDTH}, "charts": [], "episodes": []}
    assert any("had not ended" in text for text in page.texts["p"])
    RunPaths(tmp_path).stop.touch()
    assert any("was stopped on request" in text for text in Page(report.build(RunFolder(tmp_path))).texts["p"])
    PeerLost("rollout/0", 1, "rollout-0.log", "it broke").save(tmp_path / FAILURE_FILE)
    said = Page(report.build(RunFolder(tmp_path))).texts["p"]
    assert any("The run has failed: lost rollout/0" in text and "it broke" in text for text in said)


def test_settings_of_another_version_are_shown_all_the_same(run_dir: Path) -> None:
    flags = json.loads((run_dir / "args.json").read_text()) | {"flag_of_tomorrow": "x"}
    (run_dir / "args.json").write_text(json.dumps(flags))
    assert "--flag-of-tomorrow" in report.build(RunFolder(run_dir))


def test_the_program_writes_beside_the_run(run_dir: Path) -> None:
    command = [sys.executable, "-m", "accerl_mp.tools.report", str(run_dir), "--episodes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run_dir}/report.html (")
    assert len(Page((run_dir / "report.html").read_text()).data["episodes"]) == 1
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([*(path.name for path in FINISHED.iterdir()), "report.html"])


def test_a_wrong_place_to_write_is_refused_by_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main([str(run_dir), "--out", str(run_dir / "none" / "x.html")])
    assert "--out" in capsys.readouterr().err


# Charts


def places(html: str) -> list[tuple[float, float]]:
    [points] = re.findall(r'<polyline class="line s0" points="([^"]*)"', html)
    return [tuple(map(float, pair.split(","))) for pair in points.split()]  # type: ignore[misc]


def test_a_line_goes_through_its_values() -> None:
    points = [(10.0, 0.25), (30.0, 1.0), (50.0, 0.0)]
    drawn = draw(Chart("t", "share", {}, (0, 1)), 7, {"a": points})
    assert drawn is not None
    for (x, y), (step, value) in zip(places(drawn.html), points, strict=True):
        assert x == pytest.approx(LEFT + (step - 10) / 40 * (WIDTH - LEFT - RIGHT), abs=0.06)
        assert y == pytest.approx(TOP + (1 - value) * (HEIGHT - TOP - BOTTOM), abs=0.06)
    assert 'data-chart="7"' in drawn.html
    assert "a: 25.0 % at step 10, 0.0 % at step 50" in drawn.html


@pytest.mark.parametrize("points", [[(1.0, 5.0)], [(0.0, 0.0), (1.0, 0.0)], [(3.0, -1e-9), (4.0, 2e6)], [(0.0, 0.5)] * 2])
def test_odd_curves_are_drawn_inside_the_picture(points: list[tuple[float, float]]) -> None:
    for limits in ((0, None), (None, None), (0, 1)):
        drawn = draw(Chart("t", "nats", {}, limits), 0, {"a": points})
        assert drawn is not None
        assert all(LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for x, y in places(drawn.html))
    assert draw(Chart("t", "", {}), 0, {"a": []}) is None


def test_time_without_work_is_not_called_work(tmp_path: Path) -> None:
    """In the report as in top."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "Time/rollout/work": 0.6, "Time/rollout/env": 0.2}\n')
    chart = next(chart for chart in CHARTS if chart.title == "Time of the rollouts")
    assert list(report.chart_series(RunFolder(tmp_path), chart)) == ["no work", "env"]


def test_shares_stand_on_each_other_and_a_missing_phase_is_none() -> None:
    drawn = draw(Chart("t", "share", {}, (0, 1), is_stacked=True), 0, {"a": [(1, 0.5), (2, 0.25)], "b": [(2, 0.75)]})
    assert drawn is not None
    assert [one["points"] for one in drawn.data["series"]] == [[(1, 0.5), (2, 0.25)], [(1, 0.0), (2, 0.75)]]
    first, second = (polygon.split() for polygon in re.findall(r'points="([^"]*)"', drawn.html))
    middle = TOP + 0.5 * (HEIGHT - TOP - BOTTOM)
    assert first[0] == second[-1] == f"{float(LEFT)},{middle}"
    assert second[1] == f"{float(WIDTH - RIGHT)},{float(TOP)}"


def test_a_long_run_is_thinned_to_means_that_keep_its_ends() -> None:
    points = [(float(step), float(step % 7)) for step in range(12345)]
    thin = thinned(points)
    assert len(thin) <= MAX_POINTS
    assert thin[-1] == points[-1]
    assert sum(value for _, value in thin) / len(thin) == pytest.approx(3.0, abs=0.05)
    assert [step for step, _ in thin] == sorted({step for step, _ in thin})
    assert thinned(points[:50]) == points[:50]


# Episodes


def test_transcripts_are_spread_over_the_run() -> None:
    names = [f"eval-001-{i:04d}.json" for i in range(3)] + [f"train-{i:07d}.json" for i in range(100)]
    picked = chosen(names, 10)
    assert len(set(picked)) == 10
    assert (picked[0], picked[6:]) == (names[3], [names[-1], *names[:3]])
    assert sorted(chosen(names[:5], 10)) == names[:5]
    assert [len(chosen(names, most)) for most in (0, 1, 2, 3, 500)] == [0, 1, 2, 3, 103]
    assert sum(name.startswith("eval") for name in chosen([f"eval-{i}" for i in range(50)] + names, 40)) == 20


def test_long_episodes_make_fewer_not_a_page_that_opens_nowhere() -> None:
    sizes = {f"train-{number:03d}": 1000 + 9000 * (number >= 50) for number in range(100)}
    assert fitting(sizes, 40, 10**6) == chosen(list(sizes), 40)
    picked = fitting(sizes, 40, 60_000)
    assert 5 < len(picked) < 40
    assert sum(sizes[name] for name in picked) <= 60_000
    assert (picked[0], picked[-1]) == ("train-000", "train-099"), "still over the whole run"
    assert len(fitting(sizes, 40, 1)) == 1
    assert fitting({}, 40, 1) == []


def test_half_a_letter_in_a_reply_or_a_name_is_no_error(run_dir: Path) -> None:
    """A token can end within a letter; JSON then holds half a surrogate, which UTF-8 has not."""
    name = next((run_dir / "episodes").glob("train-*.json"))
    transcript = json.loads(name.read_text()) | {"game": "\ud83d", "last_observation": "\ud83d"}
    name.write_text(json.dumps(transcript))
    flags = json.loads((run_dir / "args.json").read_text()) | {"checkpoint_name": "\ud83d"}
    (run_dir / "args.json").write_text(json.dumps(flags))
    assert report.main([str(run_dir)]) == 0
    (run_dir / "report.html").read_bytes().decode("utf-8")


def test_a_full_disk_leaves_the_old_page_and_nothing_else(run_dir: Path) -> None:
    """Files of at most 1 KiB."""
    (run_dir / "report.html").write_text("old")
    command = shlex.join([sys.executable, "-m", "accerl_mp.tools.report", str(run_dir)])
    done = subprocess.run(["bash", "-c", f"ulimit -f 1; exec {command}"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "report.html: cannot be written (File too large)" in done.stderr
    assert (run_dir / "report.html").read_text() == "old"
    assert not list(run_dir.glob("*.new"))


def test_a_token_shows_the_trainers_logprob_of_its_first_time() -> None:
    turns = [{"tokens": ["a", "b"]}, {"tokens": ["c"]}, {"tokens": ["d", "e"]}]
    trained = [{"step": 3, "turns": [0, 0, 2], "logprobs": [-1, -2, -3]}, {"step": 4, "turns": [0, 0, 1], "logprobs": [-7, -8, -9]}]
    data = as_data("x.json", {"turns": turns, "trained": trained})
    assert [turn["trainer"] for turn in data["turns"]] == [[-1, -2], [-9], None]  # one of two tokens is no turn
    assert data["steps"] == [3, 4]


def test_a_transcript_of_an_older_run_shows_its_messages() -> None:
    data = as_data("x.json", {"turns": [{"message": "Go.", "tokens": ["look"], "logprobs": [-1.0], "versions": [0]}]})
    assert data["turns"][0]["prompt"] == ["Go."]
    assert data["turns"][0]["advantages"] is None


# A real browser

HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="found"></pre><iframe id="page"></iframe><script>
const found = {}, frame = document.getElementById("page");
function look() {
  const page = frame.contentDocument, part = (name) => page.querySelector(`[data-part="${name}"]`);
  const kinds = ["token", "reply", "prompt", "trained", "plus", "minus", "even"], stream = part("stream");
  return {
    episode: part("episode").selectedOptions[0].textContent, mode: page.querySelector("input:checked").value,
    hash: frame.contentWindow.location.hash, title: page.title, images: page.querySelectorAll("img").length,
    here: page.querySelector(".here").textContent, token: part("token").textContent, text: stream.textContent,
    counts: Object.fromEntries(kinds.map((kind) => [kind, stream.querySelectorAll("." + kind).length])),
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  };
}
function press(key, target) {
  target.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", { key, bubbles: true }));
}
function overflow() {
  const root = frame.contentDocument.documentElement;
  return root.scrollWidth - root.clientWidth;
}
frame.onload = () => {
  const page = frame.contentDocument, stream = page.querySelector('[data-part="stream"]');
  try {
    found.ready = page.documentElement.dataset.ready;
    found.start = look();
    found.overflow = {};
    for (const width of [360, 768, 1280]) {
      frame.width = width;
      found.overflow[width] = overflow();
    }
    press("n", stream); found.next = look();
    press("2", stream); found.advantage = look();
    press("3", stream); found.difference = look();
    press("j", stream); found.later = look();
    press("k", stream); found.back = look();
    const chart = page.querySelector(".chart");
    chart.focus(); press("Home", chart); found.first = chart.querySelector("output").textContent;
    press("ArrowRight", chart); found.second = chart.querySelector("output").textContent;
  } catch (error) { found.error = String(error); }
  document.getElementById("found").textContent = JSON.stringify(found);
};
frame.width = 1280; frame.height = 800; frame.src = "report.html#episode=EPISODE&colours=trained";
</script>"""


def browse(folder: Path, episode: str, *flags: str) -> dict[str, Any]:
    """Open `report.html` in a browser without a network, press keys in it, and say what was there."""
    (folder / "harness.html").write_text(HARNESS.replace("EPISODE", episode))
    flags = ("--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND", *flags)
    dom = dump_dom(f"file://{folder / 'harness.html'}", folder / "profile", *flags)
    [found] = [text for text in Page(dom).texts["pre"] if text.startswith("{")] or [dom]
    return json.loads(found)


@needs_browser
def test_the_viewer_in_a_browser(run_dir: Path) -> None:
    assert report.main([str(run_dir)]) == 0
    trained = sorted(path.name.split(".")[0] for path in run_dir.glob("episodes/*.trained.jsonl"))[0]
    transcript = json.loads((run_dir / "episodes" / f"{trained}.json").read_text())
    prompts = [text for turn in transcript["turns"] for text in turn["prompt_tokens"]]
    replies = [text for turn in transcript["turns"] for text in turn["tokens"]]
    assert trained in browse(run_dir, "none")["start"]["episode"], "without a link: the first that was trained"
    found = browse(run_dir, trained)
    assert "error" not in found, found
    assert found["ready"] == "yes"
    start = found["start"]
    assert start["episode"].startswith(trained)
    assert (start["counts"]["prompt"], start["counts"]["reply"], start["counts"]["trained"]) == (len(prompts), len(replies), len(replies))
    assert all(text in start["text"] for text in prompts + replies)
    assert found["overflow"] == {"360": 0, "768": 0, "1280": 0}
    assert (start["here"], found["next"]["here"]) == (replies[0], replies[1]), "n goes on to the next token of a reply"
    assert f"vLLM{transcript['turns'][0]['logprobs'][0]:.3f}" in start["token"]
    sign = "plus" if transcript["advantage"] >= 0 else "minus"
    assert (found["advantage"]["mode"], found["advantage"]["counts"][sign]) == ("advantage", len(replies))
    assert found["difference"]["counts"]["plus"] + found["difference"]["counts"]["minus"] == len(replies)
    assert found["later"]["episode"] != start["episode"] == found["back"]["episode"]
    assert f"episode={trained}" in found["back"]["hash"]
    rows = RunFolder(run_dir).metrics()
    steps = sorted({row["step"] for row in rows if {"TextWorld/WinRate", "Eval/WinRate"} & row.keys()})
    assert (found["first"].split(":")[0], found["second"].split(":")[0]) == (f"step {steps[0]}", f"step {steps[1]}")


@needs_browser
def test_a_browser_runs_nothing_that_a_run_wrote(run_dir: Path) -> None:
    run_dir = attacked(run_dir)
    assert report.main([str(run_dir), "--out", str(run_dir.parent / "report.html")]) == 0
    episode = sorted(path.stem for path in run_dir.glob("episodes/*.json"))[0]
    found = browse(run_dir.parent, episode)
    assert "error" not in found, found
    assert set(found["overflow"].values()) == {0}, "no text is too long for a telephone"
    for view in ("start", "advantage", "later"):
        assert "owned" not in found[view]["title"]
        assert found[view]["images"] == 0
        assert ATTACK in found[view]["text"]


@needs_browser
def test_the_page_is_dark_where_that_is_preferred(run_dir: Path) -> None:
    assert report.main([str(run_dir)]) == 0
    episode = sorted(path.stem for path in run_dir.glob("episodes/*.json"))[0]
    papers = {browse(run_dir, episode, f"--blink-settings=preferredColorScheme={scheme}")["start"]["paper"] for scheme in (0, 1)}
    assert papers == {"rgb(22, 24, 26)", "rgb(253, 253, 252)"}
