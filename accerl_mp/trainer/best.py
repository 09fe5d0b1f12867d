"""The best export: `<checkpoint-dir>/best`, the model of the evaluation with the highest held-out win rate so far.

Results come some rounds after the weights that they are about have moved on, so each evaluation's weights are exported when it
is asked for, and take the place of the best once it has won more (or as much: then the newer ones stay).
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

from accerl_mp.checks import BEST_NAME
from accerl_mp.recovery import write_atomically
from accerl_mp.trainer.checkpoint import replace_folder

_WIN_RATE = "Eval/WinRate"

_log = logging.getLogger(__name__)


class BestExport:
    """All ranks keep the same account of which evaluation has a candidate; rank 0 alone moves folders."""

    def __init__(self, checkpoint_dir: Path, eval_dir: Path, *, rank: int, is_resumed: bool) -> None:
        self._root, self._eval_dir, self._rank = checkpoint_dir, eval_dir, rank
        self._is_resumed = is_resumed
        self._pending = 0
        self._asked_at = 0.0

    @property
    def candidate(self) -> Path:
        """Where the model of the evaluation that is being asked for is exported to."""
        return self._root / ".evaluated"

    def takes(self, eval_id: int) -> bool:
        """Whether this evaluation's weights are to be exported: not while an earlier one's result is still to come."""
        if self._pending:
            return False
        self._pending, self._asked_at = eval_id, time.time()
        return True

    def judge(self, num_done: int) -> None:
        """After `num_done` evaluations. A disk that refuses costs the best export, not the run."""
        if not self._pending or num_done < self._pending:
            return
        eval_id, self._pending = self._pending, 0
        if self._rank != 0:
            return
        try:
            self._promote(eval_id)
        except OSError as error:
            _log.error("%s could not be replaced: %s; what was there stays", self._root / BEST_NAME, error)

    def _promote(self, eval_id: int) -> None:
        found = self._report(eval_id)
        if found is None or not (self.candidate / "trainer_state.json").is_file():
            return
        file, report = found
        state = json.loads((self.candidate / "trainer_state.json").read_text())
        state |= {"eval_win_rate": report[_WIN_RATE], "eval_file": file.name}
        if state["eval_win_rate"] < self._best_so_far():
            return
        (self.candidate / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
        replace_folder(self.candidate, self._root / BEST_NAME)
        self._is_resumed = True  # from here on the folder is ours
        mark = {
            "export": str(self._root / BEST_NAME),
            "optimizer_step": state["optimizer_step"],
            "eval_file": file.name,
            _WIN_RATE: report[_WIN_RATE],
        }
        write_atomically(self._eval_dir / "best.json", json.dumps(mark, indent=1) + "\n")
        _log.info("the best export is that of step %d: win rate %.3f", state["optimizer_step"], report[_WIN_RATE])

    def _report(self, eval_id: int) -> tuple[Path, dict[str, Any]] | None:
        """The evaluation's own file: its number begins anew with each start of the run, so it must be newer than the question."""
        reports = [(path, json.loads(path.read_text())) for path in self._eval_dir.glob("step-*.json")]
        mine = [
            entry for entry in reports if entry[1]["eval_id"] == eval_id and entry[1]["time"] >= self._asked_at and _WIN_RATE in entry[1]
        ]
        return max(mine, key=lambda entry: entry[1]["time"], default=None)

    def _best_so_far(self) -> float:
        """A folder that another run has left counts for nothing."""
        path = self._root / BEST_NAME / "trainer_state.json"
        return json.loads(path.read_text()).get("eval_win_rate", 0.0) if self._is_resumed and path.is_file() else 0.0
