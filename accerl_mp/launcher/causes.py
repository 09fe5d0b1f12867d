"""Why a run ends, in words: which rank failed first, what an exit code means, the end of a log. Standard library only."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accerl_mp.files import open_file
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import HealthRow, is_alive

_LAST_LINES = 20

_log = logging.getLogger(__name__)


def first_failure(ranks: list[HealthRow], paths: RunPaths) -> PeerLost | None:
    """The rank that was killed, else the one that failed first: the others only follow."""
    failed = sorted((row for row in ranks if row.state == "failed"), key=lambda row: row.changed)
    killed = [row for row in ranks if row.pid and row.state not in ("ended", "failed") and not is_alive(row.pid)]
    for row in killed + failed:
        role, _, index = row.name.partition("/")
        return PeerLost(row.name, None, str(paths.log(role, int(index))), row.error or "it died without a word (killed?)")
    return None


@contextmanager
def without_disk(consequence: str) -> Iterator[None]:
    """A full disk must not take the supervisor along."""
    try:
        yield
    except OSError as error:
        _log.warning("cannot write to the run folder: %s; %s", error, consequence)


def note(text: str) -> None:
    """For the log alone: a terminal would show it whenever the machine is busy."""
    _log.info("%s", text, extra={"shown": True})


def describe(exit_code: int) -> str:
    if exit_code >= 0:
        return "it ended by itself before the run was over" if exit_code == 0 else "it ended with an error"
    return f"it was killed by {signal.Signals(-exit_code).name}"


def last_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with open_file(path) as file:
        file.seek(max(0, path.stat().st_size - 16384))
        return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
