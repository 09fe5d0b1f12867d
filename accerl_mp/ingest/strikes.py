"""Strikes against games on disk: a game that was set aside stays so when ingest, or the whole run, is started again."""

import json
import logging
from pathlib import Path
from typing import Any

from accerl_mp.files import write_atomically
from accerl_mp.ingest.dealer import Dealer
from accerl_mp.recovery import Start, StateError, noted_strikes

_NONE: dict[str, Any] = {"strikes": [], "set_aside": []}

_log = logging.getLogger(__name__)


class StrikesFile:
    """The run folder's strikes.json; a start from another folder's state begins with what that state holds."""

    def __init__(self, path: Path, dealer: Dealer, start: Start) -> None:
        self._path, self._dealer = path, dealer
        self._saved = noted_strikes(path)
        if self._saved is None and start.state is not None:
            self._saved = self._taken_over(start)
        if self._saved and len(self._saved["set_aside"]) >= dealer.schedule.num_games:  # their folder was away for a while
            _log.warning("every game had been set aside: all are tried again")
            self._write(_NONE)
        if self._saved:
            dealer.take_strikes(self._saved)

    def save_if_changed(self) -> None:
        """A full disk costs the note, not the run."""
        now = self._dealer.strikes()
        if now != (self._saved or _NONE):
            self._write(now)

    def _taken_over(self, start: Start) -> dict[str, Any]:
        """From the state, which may be gone (`--keep-checkpoints`) when the next ingest starts: so they are noted here as well."""
        try:
            found = (start.saved.content["strikes"] if start.saved else None) or _NONE
        except StateError as error:
            _log.warning("%s; games that it had set aside are tried again", error)
            found = _NONE
        self._write(found)
        return found

    def _write(self, now: dict[str, Any]) -> None:
        self._saved = now
        try:
            write_atomically(self._path, json.dumps(now) + "\n")
        except OSError as error:
            _log.warning("cannot write %s: %s; a restarted ingest will try the games that were set aside", self._path, error)
