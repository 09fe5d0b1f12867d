"""How far a start has come and what of that is saved: the supervisor's last word, for which a full disk has room. Standard library only."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from accerl_mp.files import read_text, write_over
from accerl_mp.transport.board import Board

_BYTES = 128


@dataclass(frozen=True)
class Reached:
    """Zeros: it has trained nothing, or nobody could say."""

    step: int = 0
    """Optimizer steps."""
    saved_step: int = 0
    """Those of them that the newest saved state holds."""
    version: int = 0
    """Weight pushes after the first."""
    asked_to_end: int = 0
    """1: by a person or the cluster. DIR/stop says so too, where the disk has room for that."""
    step_before: int = 0
    """Optimizer steps up to which an earlier start of the same launch.sh had come when a trainer rank died; 0: this is the first."""

    @classmethod
    def of(cls, board: Board, *, step_before: int = 0) -> "Reached":
        pushes = max(0, board.get("policy_version"))
        return cls(board.get("optimizer_step"), board.get("saved_step"), pushes, board.get("asked_to_end"), step_before)

    @property
    def is_saved(self) -> bool:
        return self.saved_step >= self.step

    def save(self, path: Path) -> None:
        """Over the one before. OSError where there is none and no room."""
        write_over(path, json.dumps(asdict(self)), _BYTES)

    @classmethod
    def load(cls, path: Path) -> "Reached":
        """Zeros where it is missing or damaged."""
        try:
            noted = json.loads(read_text(path))
            found = cls(*(noted[field.name] for field in fields(cls)))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return cls()
        return found if all(type(number) is int and number >= 0 for number in vars(found).values()) else cls()
