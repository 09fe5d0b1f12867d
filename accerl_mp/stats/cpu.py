"""How many of the cores that this process may use are free: without any, more processes gain a run nothing.

Two sources, the fuller one counts: /proc/stat for the cores of this process's affinity (whoever uses them), and the quota of
its control group, as containers set it (version 2; under version 1 only the first is seen). Standard library only.
"""

import os
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

_NUM_TIMES = 8
"""Of a line of /proc/stat: user nice system idle iowait irq softirq steal; what follows is in user and nice already."""
_IDLE = (3, 4)


@dataclass(frozen=True)
class _Look:
    time_s: float
    busy: float
    total: float
    """Both in ticks, summed over the cores."""
    used_s: float
    """By the control group, over its cores."""


class CpuMeter:
    """Between two looks; the first one is at construction."""

    def __init__(self, cores: Set[int] | None = None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._stat = proc / "stat"
        self._group = _group_with_quota(proc, cgroups)
        self._last = self._look()

    def free_cores(self) -> float | None:
        """Mean number of idle cores since the last call; None where nothing was measured."""
        last, self._last = self._last, self._look()
        now, free = self._last, []
        if now.total > last.total:
            free.append(len(self._cores) * (1.0 - (now.busy - last.busy) / (now.total - last.total)))
        if (quota := _quota(self._group)) and now.time_s > last.time_s:
            free.append(quota - (now.used_s - last.used_s) / (now.time_s - last.time_s))
        return max(0.0, min(free)) if free else None

    def _look(self) -> _Look:
        busy = total = 0.0
        for line in _text(self._stat).splitlines():
            name, *times = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in self._cores:
                ticks = [float(word) for word in times[:_NUM_TIMES]]
                total += sum(ticks)
                busy += sum(ticks) - sum(ticks[at] for at in _IDLE)
        return _Look(time.monotonic(), busy, total, _used_s(self._group))


def _group_with_quota(proc: Path, cgroups: Path) -> Path | None:
    """The nearest group around this process that has a quota. A container often sees its own group as the root."""
    words = _text(proc / "self" / "cgroup").strip().rpartition("0::/")
    own = cgroups / words[2] if words[1] else cgroups
    return next((group for group in (own, *own.parents) if group.is_relative_to(cgroups) and _quota(group)), None)


def _quota(group: Path | None) -> float:
    """Cores; 0: no limit. `cpu.max` is `max PERIOD` or `QUOTA PERIOD`, in us."""
    quota, _, period = (_text(group / "cpu.max") if group else "").partition(" ")
    return float(quota) / float(period) if quota.isdecimal() and period.strip().isdecimal() else 0.0


def _used_s(group: Path | None) -> float:
    words = (_text(group / "cpu.stat") if group else "").split()
    return int(words[words.index("usage_usec") + 1]) / 1e6 if "usage_usec" in words else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
