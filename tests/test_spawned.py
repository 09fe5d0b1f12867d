"""Processes that are spawned die with their parent, also where it died before they could ask the kernel for that."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accerl_mp.transport.health import is_alive
from accerl_mp.transport.process import SPAWNER

ROOT = Path(__file__).parent.parent
CHILD = """
import sys, time
print("began", flush=True)
sys.stdin.readline()  # stands for the interpreter's start and the import of torch
from accerl_mp.transport.process import die_with_spawner
die_with_spawner()
print("lives", flush=True)
{then}
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
from accerl_mp.transport.process import spawns
spawns()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


@contextlib.contextmanager
def spawned(then: str = "") -> Iterator[tuple[subprocess.Popen, int]]:
    """A parent and the pid of its child, which has begun and waits for a line; both share the parent's pipes."""
    code = CHILD.format(then=then)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pids: list[int] = []
    try:
        assert parent.stdout
        assert parent.stdout.readline() == "began\n"
        pids += [child.pid for child in psutil.Process(parent.pid).children()]
        [child] = pids
        yield parent, child
    finally:
        for pid in [parent.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()


def test_a_child_whose_parent_died_while_it_started_ends_at_once() -> None:
    with spawned() as (parent, _):
        parent.kill()
        parent.wait(20)
        assert parent.stdin
        assert parent.stdout
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.read() == "", "it has not come so far as to live"


def test_a_child_whose_parent_dies_later_ends_with_it() -> None:
    with spawned() as (parent, child):
        assert parent.stdin
        assert parent.stdout
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "lives\n"
        assert is_alive(child)
        parent.kill()
        assert parent.stdout.read() == ""


def test_each_generation_tells_the_next_whose_child_it_is() -> None:
    with spawned(then=f'import os; print(os.environ["{SPAWNER}"], flush=True)') as (parent, child):
        assert parent.stdin
        assert parent.stdout
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert [parent.stdout.readline(), parent.stdout.readline()] == ["lives\n", f"{child}\n"]


@pytest.mark.parametrize("noted", ["", "no number", "-1"])
def test_without_a_parents_word_it_goes_on(noted: str) -> None:
    code = "from accerl_mp.transport.process import die_with_spawner; die_with_spawner(); print('lives')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), SPAWNER: noted}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout == "lives\n"
