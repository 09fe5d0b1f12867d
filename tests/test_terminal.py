"""What tools print: bars on terminals, plain lines elsewhere, NO_COLOR, and libraries' talk in the log."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parent.parent
COLOUR = re.compile(r"\x1b\[[\d;]*[3-9]\d[\d;]*m")
CODE = """
import sys, time
from accerl_mp.tools.terminal import Terminal
terminal = Terminal()
with terminal.progress("playing", 3) as advance:
    for _ in range(3):
        advance()
        time.sleep(0.15)
terminal.table("title", ["", "win rate"], [["all [games]", "0.5 [0, 1]"]])
"""
QUIET = """
import os, subprocess, sys
from pathlib import Path
from accerl_mp.tools.terminal import Terminal, quiet
terminal = Terminal()
with quiet(Path(sys.argv[1]), terminal):
    print("a library talks")
    subprocess.run(["echo", "its child talks"])
    terminal.say("ours")
    if sys.argv[2] == "fail":
        raise RuntimeError("no memory")
print("afterwards")
"""


def on_terminal(code: str = CODE, columns: int = 100, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")} | {"PYTHONPATH": str(ROOT)}
    child = pexpect.spawn(sys.executable, ["-c", code], env=environment | variables, encoding="utf-8", timeout=60, dimensions=(30, columns))
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return child.before


def piped(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    return subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_terminal_gets_a_bar_in_colour_and_no_color_takes_the_colour() -> None:
    coloured = on_terminal(TERM="xterm-256color")
    assert "3/3" in coloured
    assert COLOUR.search(coloured)
    plain = on_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert "3/3" in plain
    assert not COLOUR.search(plain)


def test_a_pipe_gets_lines_without_control_characters() -> None:
    done = piped(CODE)
    assert re.search(r"^playing: 3 of 3 in \d+ s\n\Z", done.stderr, re.M)
    assert "0.5 [0, 1]" in done.stdout
    assert "all [games]" in done.stdout, "brackets are text, not markup"
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", done.stdout + done.stderr)


@pytest.mark.parametrize("mode", ["work", "fail"])
def test_what_libraries_print_is_in_the_log_and_its_end_is_shown_when_they_fail(mode: str, tmp_path: Path) -> None:
    done = piped(QUIET, str(tmp_path / "logs/play.log"), mode)
    log = (tmp_path / "logs/play.log").read_text()
    assert "a library talks" in log
    assert "its child talks" in log
    assert "ours\n" in done.stderr
    if mode == "work":
        assert (done.returncode, done.stdout, done.stderr) == (0, "afterwards\n", "ours\n")
    else:
        assert done.returncode == 1
        assert "    RuntimeError: no memory" in done.stderr


def test_what_libraries_print_stays_in_the_log_on_a_terminal_too(tmp_path: Path) -> None:
    """While a spinner or a bar is drawn, from this process and from its children."""
    code = f"""
import logging, subprocess, sys, time
from pathlib import Path
from accerl_mp.tools.terminal import Terminal, quiet
terminal = Terminal()
with quiet(Path({str(tmp_path / "play.log")!r}), terminal):
    with terminal.waiting("starting {{it}} [now]"):
        logging.StreamHandler(sys.stdout).emit(logging.makeLogRecord({{"msg": "chatter"}}))
        print("chatter", file=sys.stderr)
        subprocess.run(["echo", "chatter"])
        time.sleep(0.3)
    with terminal.progress("playing", 1) as advance:
        print("chatter")
        advance()
"""
    shown = on_terminal(code, TERM="xterm-256color")
    assert "starting {it} [now]" in shown
    assert "1/1" in shown
    assert "chatter" not in shown
    assert (tmp_path / "play.log").read_text().count("chatter") == 4


def test_a_table_that_is_too_wide_becomes_lines_and_loses_no_number() -> None:
    header = ["", "win rate", "normalised score", "turns"]
    code = f"""
from accerl_mp.tools.terminal import Terminal
Terminal().table("title", {header}, [["model (step 20), T 1", "0.50 [0.25, 0.75]", "0.61 [0.40, 0.80]", "5.0"], ["b", "1", "2", "3"]])
"""
    wide = on_terminal(code, columns=80, TERM="xterm").splitlines()
    assert [line for line in wide if "model" in line and "0.61 [0.40, 0.80]" in line]
    narrow = [line.rstrip() for line in on_terminal(code, columns=48, TERM="xterm").splitlines()]
    assert narrow == [
        "title",
        *("model (step 20), T 1", "  win rate 0.50 [0.25, 0.75]", "  normalised score 0.61 [0.40, 0.80]  turns 5.0"),
        *("b", "  win rate                 1", "  normalised score                 2  turns   3"),
    ]


def test_a_table_that_is_too_wide_gives_up_what_it_can_do_without_first() -> None:
    """Then the rows stay rows: twenty of them would be sixty lines."""
    code = """
from accerl_mp.tools.terminal import Terminal
rows = [[f"kind {number}", *["0.50 [0.25, 0.75]"] * 4] for number in range(20)]
title = "a title that is longer than all of the columns are together"
Terminal().table(title, ["", "(1)", "(2)", "(3)", "(4)"], rows, narrow=[[row[0], *["0.50"] * 4] for row in rows])
"""
    for columns, cell, num_lines in ((100, "0.50 [0.25, 0.75]", 22), (80, "0.50", 22), (20, "0.50", 64)):
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in on_terminal(code, columns=columns, TERM="xterm").splitlines()]
        assert len(lines) == num_lines, lines
        assert ["title" in line for line in lines[:1]] == [True]
        if columns > 20:
            assert lines[2].split("  ")[0] == "kind 0"
            assert lines[2].count(cell) == 4
            assert ("[" in lines[2]) == (columns == 100)


def test_what_a_game_says_does_not_steer_the_terminal_and_any_encoding_shows_it() -> None:
    code = """
from accerl_mp.tools.terminal import Terminal
terminal = Terminal()
terminal.say("a game: \\x1b[2J\\x07 caf\\u00e9")
terminal.table("title", ["", "n"], [["\\x1b]0;owned\\x07 caf\\u00e9", "1"]])
"""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for variables in ({}, ascii_only):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for shown in (done.stdout, done.stderr):
            assert "caf" in shown
            assert not re.search(r"[\x00-\x08\x0b-\x1f]", shown)
