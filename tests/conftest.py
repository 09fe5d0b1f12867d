"""Shared fixtures. After each test: no child process and no file of ours in /dev/shm or the socket folder."""

import glob
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accerl_mp.topology import RunPaths, folder_of_sockets

# A shell ignores SIGINT in what it starts in the background, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves processes or shared memory behind (session fixtures may hold their own)."""
    before = _children() | _files()
    yield
    deadline = time.monotonic() + 5
    while (left := _left(before, tmp_path_factory.getbasetemp())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"{request.node.name} left behind: {sorted(left)}"


def _left(before: set[str], session_folder: Path) -> set[str]:
    """What is new. Files count only if their run's folder is this session's: another session may be running beside it."""
    files = _files() - before
    if files:
        run_ids = {RunPaths(folder).run_id for folder in session_folder.rglob("*") if folder.is_dir()}
        files = {file for file in files if any(run_id in file for run_id in run_ids)}
    return (_children() - before) | files


def _files() -> set[str]:
    return set(glob.glob("/dev/shm/accerl*") + glob.glob(f"{folder_of_sockets()}/accerl-{os.getuid()}-*"))


def _children() -> set[str]:
    alive = set()
    for child in psutil.Process().children(recursive=True):
        try:
            tracker = "resource_tracker" in " ".join(child.cmdline())  # multiprocessing's own: lives as long as pytest does
            if child.status() != psutil.STATUS_ZOMBIE and not tracker:
                alive.add(f"pid {child.pid} {child.name()}")
        except psutil.NoSuchProcess:
            continue
    return alive
