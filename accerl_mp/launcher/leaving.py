"""Which trainer ranks are still there while a run ends, and whether any was cut short. Standard library only."""

from accerl_mp.transport.health import HealthRow, HealthTable, is_alive

_UNSEEN_S = 10.0
"""So long a rank is waited for that has not come to the health table: it may be on its way, or have left before."""


def ranks_of(table: HealthTable) -> list[HealthRow]:
    return [row for row in table.snapshot() if row.name.startswith("trainer/")]


def still_there(table: HealthTable, *, waited_s: float) -> list[str]:
    """Names of those that have not left."""
    return [row.name for row in ranks_of(table) if _is_there(row, waited_s)]


def who_has_left(table: HealthTable) -> str:
    """In words, for the end of a run; roles have ended before."""
    left = still_there(table, waited_s=_UNSEEN_S)
    return f"all processes but {', '.join(left)}" if left else "all processes"


def none_was_cut_short(table: HealthTable) -> bool:
    """Each has left by itself, or had not begun to train when it ended: then it had nothing to save."""
    return all(row.state in ("none", "starting", "ended") for row in ranks_of(table))


def _is_there(row: HealthRow, waited_s: float) -> bool:
    if row.state == "none":
        return waited_s < _UNSEEN_S
    return row.state not in ("ended", "failed") and is_alive(row.pid)
