"""Trainer ranks that leave: what that means for the run, who is still there, whether any was cut short. Standard library only."""

from dataclasses import dataclass

from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import HealthRow, HealthTable, is_alive
from accerl_mp.transport.shared_files import parent_of_each

_UNSEEN_S = 10.0
"""So long a rank is waited for that has not come to the health table, where rank 0's parent has other children than torchrun has."""


@dataclass
class End:
    """Why the run ends."""

    reason: str
    """finished: training is over. stopped: asked to. orphaned: rank 0 is gone. failed: `lost` says what."""
    lost: PeerLost | None = None
    detail: str = ""


def ranks_of(table: HealthTable) -> list[HealthRow]:
    return [row for row in table.snapshot() if row.name.startswith("trainer/")]


def who_was_signalled(table: HealthTable) -> str:
    """Ranks that SIGTERM or SIGINT has reached by themselves, in words; empty: none."""
    names = [row.name for row in ranks_of(table) if table.word(table.row_of(row.name), "signalled")]
    return f"{', '.join(names)} got a signal to end" if names else ""


def end_by_ranks(table: HealthTable, paths: RunPaths, *, was_signalled: str, rank_0: int) -> End | None:
    """The end that ranks ask for which have not failed. A person or a cluster may send a signal to one process: the whole run stops.

    torchrun sends one too, once a rank has died. One that had not come to the table is known by its absence, after 10 s at most.

    rank_0: its pid
    """
    ranks = ranks_of(table)
    detail = was_signalled or ("all ranks have left before training was over" if all(row.state == "ended" for row in ranks) else "")
    never_came = [row.name for row in ranks if row.state == "none"]
    if not detail or (never_came and _signalled_for_s(table) < _UNSEEN_S and _some_are_on_their_way(ranks, rank_0)):
        return None
    if never_came:
        role, _, index = never_came[0].partition("/")
        return End("failed", PeerLost(never_came[0], None, str(paths.log(role, int(index))), "it ended before it had begun"))
    return End("stopped", detail=detail)


def _signalled_for_s(table: HealthTable) -> float:
    since = [word for row in ranks_of(table) if (word := table.word(table.row_of(row.name), "signalled"))]
    return table.clock() - min(since) if since else 0.0


def still_there(table: HealthTable, *, rank_0: int, waited_s: float) -> list[str]:
    """Names of those that have not left, those among them that are on their way to the table. rank_0: its pid."""
    ranks = ranks_of(table)
    names = [row.name for row in ranks if _is_there(row)]
    unseen = [row.name for row in ranks if row.state == "none"]
    return names + (unseen if unseen and waited_s < _UNSEEN_S and _some_are_on_their_way(ranks, rank_0) else [])


def who_has_left(table: HealthTable) -> str:
    """In words, for the end of a run; roles have ended before."""
    left = [row.name for row in ranks_of(table) if _is_there(row)]
    return f"all processes but {', '.join(left)}" if left else "all processes"


def none_was_cut_short(table: HealthTable) -> bool:
    """Each has left by itself, or had not begun to train when it ended: then it had nothing to save."""
    return all(row.state in ("none", "starting", "ended") for row in ranks_of(table))


def _is_there(row: HealthRow) -> bool:
    return row.state not in ("none", "ended", "failed") and is_alive(row.pid)


def _some_are_on_their_way(ranks: list[HealthRow], rank_0: int) -> bool:
    """A child of torchrun lives that is not in the table."""
    parents, known = parent_of_each(), {row.pid for row in ranks}
    return any(parent == parents.get(rank_0) and pid not in known for pid, parent in parents.items())
