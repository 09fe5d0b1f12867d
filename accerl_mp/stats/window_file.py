"""The sliding window on disk, so that a run that goes on draws its curves on, and not anew from the first few episodes.

<run-dir>/window.json     {"start": which one wrote it, "episodes": the newest ones, a list of FIELDS each}

A start that goes on from a state takes those episodes alone whose groups are done in it: the others are played again.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accerl_mp.files import read_text, write_atomically
from accerl_mp.recovery import Start, StateError
from accerl_mp.stats.windows import EpisodeRecord, EpisodeWindow
from accerl_mp.topology import RunPaths

NAME = "window.json"
FIELDS = (
    *("episode_id", "won", "lost", "truncated", "score", "max_score"),
    *("num_turns", "num_env_steps", "num_invalid", "num_tokens", "seconds"),
)
"""What the window counts of an episode; all are numbers."""
SAVE_EVERY_S = 10.0

_log = logging.getLogger(__name__)


class WindowFile:
    """A run's window.json. What cannot be read or written costs the curves their past, not the run."""

    def __init__(self, run_dir: Path, *, group_size: int) -> None:
        """group_size: episodes of a training group, which are numbered by it."""
        self._path, self._paths, self._group_size = run_dir / NAME, RunPaths(run_dir), group_size
        self._begun = self._paths.begun()
        self._start = Start()
        self._saved_s = float("-inf")
        self._is_failing = False

    def load_into(self, window: EpisodeWindow) -> None:
        """The episodes before this process: of this start, or of the one that it goes on from. None for a run from the beginning."""
        try:
            self._start = Start.load(self._paths.resume)
            for episode in self._episodes():
                window.restore(episode)
        except (OSError, ValueError, RecursionError, StateError) as error:
            _log.warning("%s cannot be read (%s): the sliding window starts anew", NAME, error)

    def save(self, window: EpisodeWindow, now_s: float) -> None:
        """At most every `SAVE_EVERY_S` of `now_s` (`time.monotonic`; infinity: in any case)."""
        if now_s - self._saved_s < SAVE_EVERY_S:
            return
        self._saved_s = now_s
        rows = [[_plain(episode[field]) for field in FIELDS] for episode in window.episodes()]
        try:
            write_atomically(self._path, json.dumps({"start": self._start_id(), "episodes": rows}))
        except OSError as error:
            if not self._is_failing:
                _log.warning("cannot write %s: %s", self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _episodes(self) -> Iterator[EpisodeRecord]:
        """ValueError where a file is not as it was written, StateError where the state is not."""
        own = self._of_this_start()
        yield from own
        if own:
            return
        if (saved := self._start.saved) is None:
            return
        ledger, above = saved.content["groups"], set(saved.content["groups"]["done_above"])
        path = saved.folder.parent.parent / NAME  # of the run that saved it: this one, or another one
        for episode in _read(path)[1] if path.exists() else []:
            group = episode["episode_id"] // self._group_size
            if group < ledger["low_water"] or group in above:
                yield episode

    def _of_this_start(self) -> list[EpisodeRecord]:
        """Of this very start, whose stats process has died. A damaged file is no reason to leave out another run's."""
        try:
            writer, own = _read(self._path) if self._path.exists() else (None, [])
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read (%s): the sliding window starts anew", NAME, error)
            return []
        return own if writer == self._start_id() else []

    def _start_id(self) -> list[float]:
        """A trainer that is started again goes on from a state, too."""
        return [self._begun, self._start.num_restarts]


def _read(path: Path) -> tuple[Any, list[EpisodeRecord]]:
    """(the start that wrote it, episodes); ValueError: damaged."""
    noted = json.loads(read_text(path))
    if not isinstance(noted, dict) or not isinstance(rows := noted.get("episodes"), list) or not all(map(_is_row, rows)):
        raise ValueError("damaged")
    return noted.get("start"), [dict(zip(FIELDS, row, strict=True)) for row in rows]


def _plain(value: Any) -> int | float:
    return int(value) if isinstance(value, bool) else value


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == len(FIELDS) and all(type(value) in (int, float) for value in row)
