"""The best export: `<checkpoint-dir>/best`, the model of the evaluation with the highest held-out win rate so far.

Results come some rounds after the weights that they are about have moved on, so each evaluation's weights are exported when it
is asked for, and take the place of the best once it has won more (or as much: then the newer ones stay). Evaluations are played
one after the other: one that is asked for while another is played begins later, with other weights, and says so by its step.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

from accerl_mp.config import Config
from accerl_mp.export_place import BEST_NAME, CANDIDATE_NAME, STATE_NAME
from accerl_mp.files import read_text, write_atomically
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.checkpoint import export_folder, refuse_to_delete, replace_folder

_WIN_RATE = "Eval/WinRate"

_log = logging.getLogger(__name__)


class BestExport:
    """All ranks keep the same account of which evaluation has a candidate; rank 0 alone moves folders."""

    def __init__(self, checkpoint_dir: Path, eval_dir: Path, *, rank: int, is_resumed: bool) -> None:
        self._root, self._eval_dir, self._rank = checkpoint_dir, eval_dir, rank
        self._is_resumed = is_resumed
        self._pending = self._num_done = 0
        self._asked_at = 0.0

    @classmethod
    def if_wanted(cls, config: Config, paths: RunPaths, *, rank: int, is_resumed: bool) -> "BestExport | None":
        """With `--save-checkpoint` and `--eval-game-dir`."""
        if not (config.metrics.save_checkpoint and config.metrics.eval_game_dir):
            return None
        return cls(export_folder(config, 0).parent, paths.run_dir / "eval", rank=rank, is_resumed=is_resumed)

    @property
    def candidate(self) -> Path:
        """Where the model of the evaluation that is being asked for is exported to."""
        return self._root / CANDIDATE_NAME

    def takes(self, eval_id: int) -> bool:
        """Whether this evaluation's weights are to be exported: only if it begins now, so all before it must be judged."""
        if self._num_done < eval_id - 1:
            return False
        self._pending, self._asked_at = eval_id, time.time()
        return True

    def judge(self, num_done: int) -> None:
        """After `num_done` evaluations. A disk that refuses, or a damaged report, costs the best export, not the run."""
        self._num_done = num_done
        if not self._pending or num_done < self._pending:
            return
        eval_id, self._pending = self._pending, 0
        if self._rank != 0:
            return
        try:
            self._promote(eval_id)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            _log.error("%s could not be replaced: %s; what was there stays", self._root / BEST_NAME, error)

    def _promote(self, eval_id: int) -> None:
        if not (self.candidate / STATE_NAME).is_file():
            return
        state = json.loads(read_text(self.candidate / STATE_NAME))
        if (found := self._report(eval_id, state["optimizer_step"])) is None:
            _log.info("evaluation %d was not of the weights of step %d: it says nothing about them", eval_id, state["optimizer_step"])
            return
        file, report = found
        state |= {"eval_win_rate": report[_WIN_RATE], "eval_file": file.name}
        if state["eval_win_rate"] < self._best_so_far():
            return
        refuse_to_delete(self._root / BEST_NAME)
        write_atomically(self.candidate / STATE_NAME, json.dumps(state, indent=2) + "\n")
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

    def _report(self, eval_id: int, step: int) -> tuple[Path, dict[str, Any]] | None:
        """The evaluation's own file, if it began at `step`.

        Its number begins anew with each start of the run, so the file must be newer than the question. It began later if ingest was
        killed meanwhile, or the next push was faster than ingest.
        """
        path = self._eval_dir / f"step-{step:06d}.json"
        if not path.is_file():
            return None
        report = json.loads(read_text(path))
        is_mine = report["eval_id"] == eval_id and report["time"] >= self._asked_at and _WIN_RATE in report
        return (path, report) if is_mine else None

    def _best_so_far(self) -> float:
        """A folder that another run has left counts for nothing."""
        path = self._root / BEST_NAME / STATE_NAME
        return json.loads(read_text(path)).get("eval_win_rate", 0.0) if self._is_resumed and path.is_file() else 0.0
