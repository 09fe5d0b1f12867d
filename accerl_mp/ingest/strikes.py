"""Strikes against games on disk: a game that was set aside stays so when ingest, or the whole run, is started again."""

import json
import logging
from pathlib import Path
from typing import Any

from accerl_mp.ingest.dealer import Dealer
from accerl_mp.recovery import Start, noted_strikes, write_atomically

_log = logging.getLogger(__name__)


class StrikesFile:
    """The run folder's strikes.json; a start from another folder's state begins with what that state holds."""

    def __init__(self, path: Path, dealer: Dealer, start: Start) -> None:
        self._path, self._dealer = path, dealer
        self._saved = self._load(start)
        if self._saved:
            dealer.take_strikes(self._saved)

    def save_if_changed(self) -> None:
        """A full disk costs the note, not the run."""
        now = self._dealer.strikes()
        if now == (self._saved or {"strikes": [], "set_aside": []}):
            return
        self._saved = now
        try:
            write_atomically(self._path, json.dumps(now) + "\n")
        except OSError as error:
            _log.warning("cannot write %s: %s; a restarted ingest will try the games that were set aside", self._path, error)

    def _load(self, start: Start) -> dict[str, Any] | None:
        return noted_strikes(self._path) or (start.saved.content["strikes"] if start.saved else None)
