"""A headless Chromium or Chrome, where one is installed: pages are opened by its command line, without a driver."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


def dump_dom(url: str, profile: Path, *flags: str) -> str:
    """The document as it is once the page has come to rest (20 s of its own time at most)."""
    settings = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}", *flags]
    command = [str(BROWSER), *settings, "--virtual-time-budget=20000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
