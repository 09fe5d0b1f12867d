"""TensorBoard itself, in a real browser, with the numbers of a real run (`finished_run/`)."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import dump_dom, needs_browser

from accerl_mp.stats import events
from accerl_mp.stats.writer import MetricFiles
from accerl_mp.tools.run_folder import RunFolder

FINISHED = Path(__file__).parent / "finished_run"
HEAD = ("step", "version", "time")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Words(HTMLParser):
    """Titles and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.titles: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.titles |= {value for name, value in attrs if name == "title" and value}

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """The run's lines, written as the stats process does."""
    run, files = RunFolder(FINISHED), MetricFiles(tmp_path)
    files.write_flags(run.flags(), started_s=run.status()["started"])
    for row in run.metrics():
        values = {tag: value for tag, value in row.items() if tag not in HEAD}
        files.write(step=row["step"], version=row["version"], time_s=row["time"], values=values)
        files.write_histograms(step=row["step"], time_s=row["time"], counted={"Replay/PolicyLagOldest": {0: 3, row["step"]: 5}})
    files.write_text("Episodes/train", "an episode of the run", step=1)
    files.close()
    return run.metrics()


def ask(address: str, path: str) -> Any:
    return json.loads(urllib.request.urlopen(f"{address}data/plugin/{path}", timeout=60).read())


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Its address, while it serves the run folder, from when it has read all of it: it listens before, and a page would be empty."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--host", "127.0.0.1", "--load_fast=false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stderr is not None
            lines = []
            for line in popen.stderr:
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                    until = time.monotonic() + 60
                    while "Episodes/train" not in (tags := ask(found[0], "text/tags").get(".", {})):  # written last
                        assert time.monotonic() < until, tags
                        time.sleep(0.1)
                    yield found[0]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            popen.kill()


def test_its_server_lists_everything_of_the_run(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with tensorboard(tmp_path) as address:
        listed = {plugin: ask(address, f"{plugin}/tags")["."] for plugin in ("scalars", "histograms", "text")}
        [episode] = ask(address, "text/text?run=.&tag=Episodes%2Ftrain")
        [flags] = ask(address, "text/text?run=.&tag=run%2Fflags")
        layout = ask(address, "custom_scalars/layout")
    assert set(listed["scalars"]) == {tag for row in rows for tag in row} - set(HEAD)
    assert set(listed["histograms"]) == {"Replay/PolicyLagOldest"}
    assert set(listed["text"]) == {"run/flags", "Episodes/train"}
    assert (episode["step"], "an episode of the run" in episode["text"]) == (1, True)
    assert "<code>--train-packing</code>" in flags["text"]
    assert [category["title"] for category in layout["category"]] == list(events.OVERVIEW)


@needs_browser
def test_a_browser_finds_the_curves_of_the_run(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with tensorboard(tmp_path) as address:
        page = f"{address}?tagFilter=WinRate%7CKL%7CLag#timeseries"
        curves = Words(dump_dom(page, tmp_path / "profile", "--window-size=1400,4000"))
    expected = {tag for row in rows for tag in row if re.search("WinRate|KL|Lag", tag)} | {"Replay/PolicyLagOldest"}
    assert {title for title in curves.titles if re.fullmatch(r"\w+/\w+", title)} == expected, [text for text in curves.texts if text][:40]
    last = [row for row in rows if "TextWorld/WinRate" in row][-1]
    assert f"{last['TextWorld/WinRate']:.4f}".rstrip("0") in curves.texts, "the newest value stands under its curve"
