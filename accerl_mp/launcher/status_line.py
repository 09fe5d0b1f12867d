"""The last line of a terminal while a run works: who is ready, then how far it is and whom the trainer waits for.

Rewritten in place, on a terminal only: a file or a pipe gets whole lines and no control characters. Standard library only.
"""

import time

from accerl_mp import log
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import HealthRow, HealthTable

_EVERY_S = 0.5
_SHORT_S = 2.0
"""Waits that are not worth a word."""
_BAR_CELLS = 12


class StatusLine:
    """Draws at most twice a second, and not while a debugger has the terminal."""

    def __init__(self, table: HealthTable, board: Board, *, begun: float | None = None) -> None:
        """begun: `time.time()` from which it counts (`RunPaths.begun`); None: now."""
        self._table, self._board = table, board
        self._is_terminal = log.terminal_can_rewrite()
        self._next = 0.0
        self._started = time.monotonic() - (time.time() - begun if begun else 0.0)

    def show(self) -> None:
        now = time.monotonic()
        if not self._is_terminal or now < self._next or self._table.holder:
            return
        self._next = now + _EVERY_S
        seconds = int(now - self._started)
        log.rewrite_line(f"[{seconds // 60}:{seconds % 60:02d}] {describe(self._table.snapshot(), self._board)}")

    def clear(self) -> None:
        if self._is_terminal:
            log.rewrite_line("")


def describe(rows: list[HealthRow], board: Board) -> str:
    """Example: `starting ######------ 3 of 6, not yet: inference/0, trainer/0, trainer/1`."""
    late = [row.name for row in rows if row.state in ("none", "starting")]
    if late and board.get("policy_version") < 0:
        done = len(rows) - len(late)
        filled = _BAR_CELLS * done // len(rows)
        return f"starting {'#' * filled}{'-' * (_BAR_CELLS - filled)} {done} of {len(rows)}, not yet: {', '.join(late)}"
    step, version = board.get("optimizer_step"), board.get("policy_version")
    text = "the first weights" if version < 0 else f"step {step}, weights {version}"
    if board.get("eval_asked") > board.get("eval_done"):
        text += ", evaluation runs"
    trainer = next((row for row in rows if row.name == "trainer/0"), None)
    if trainer and trainer.waits_for and trainer.waits_s > _SHORT_S:
        text += f"; trainer/0 waits {trainer.waits_s:.0f} s for {trainer.waits_for}"  # what is long is cut off last
    return text
