"""Shared fixtures. After each test: no child process and no file of ours in /dev/shm or the socket folder."""

import glob
import os
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes or shared memory behind (session fixtures may hold their own)."""
    before = _leftovers()
    yield
    deadline = time.monotonic() + 5
    while (left := _leftovers() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"{request.node.name} left behind: {sorted(left)}"


def _leftovers() -> set[str]:
    children = {f"pid {child.pid} {child.name()}" for child in _children()}
    files = glob.glob("/dev/shm/accerl*") + glob.glob(f"{tempfile.gettempdir()}/accerl-{os.getuid()}-*")
    return children | set(files)


def _children() -> list[psutil.Process]:
    alive = []
    for child in psutil.Process().children(recursive=True):
        try:
            tracker = "resource_tracker" in " ".join(child.cmdline())  # multiprocessing's own: lives as long as pytest does
            if child.status() != psutil.STATUS_ZOMBIE and not tracker:
                alive.append(child)
        except psutil.NoSuchProcess:
            continue
    return alive
