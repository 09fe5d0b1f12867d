"""The meter of free cores, against files as the kernel writes them, and against this machine."""

import os
import time
from pathlib import Path

import pytest

from accerl_mp.stats import cpu
from accerl_mp.stats.cpu import CpuMeter


class Machine:
    """Four cores, of which the process may use two; `group` is its control group."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, group: str = "/", max_of: dict[str, str] | None = None) -> None:
        self.proc, self.cgroups, self.group = folder / "proc", folder / "cgroup", folder / "cgroup" / group.lstrip("/")
        (self.proc / "self").mkdir(parents=True)
        self.group.mkdir(parents=True, exist_ok=True)
        (self.proc / "self" / "cgroup").write_text(f"12:cpu:/old\n0::{group}\n")
        for name, text in (max_of or {}).items():
            (self.cgroups / name / "cpu.max").write_text(f"{text}\n")
        self.now = 100.0
        monkeypatch.setattr(cpu.time, "monotonic", lambda: self.now)
        self.ticks = [[100] * 10 for _ in range(4)]
        self.used_s = 0.0
        self.write()
        self.meter = CpuMeter({0, 2}, self.proc, self.cgroups)

    def spend(self, seconds: float, busy: list[float], *, used_s: float = 0.0) -> float | None:
        """`busy` of each core's `seconds` went by in work, the rest idle or in iowait; then a look."""
        self.now += seconds
        self.used_s += used_s
        for ticks, share in zip(self.ticks, busy, strict=True):
            ticks[2] += round(100 * seconds * share)
            ticks[3] += round(50 * seconds * (1 - share))
            ticks[4] += round(50 * seconds * (1 - share))
            ticks[8] += 1000  # a guest's time is in the user's already
        self.write()
        return self.meter.free_cores()

    def write(self) -> None:
        lines = [f"cpu{core} {' '.join(map(str, ticks))}" for core, ticks in enumerate(self.ticks)]
        (self.proc / "stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2", "ctxt 3"]) + "\n")
        for folder in (self.cgroups, *self.cgroups.rglob("*")):
            if folder.is_dir():
                (folder / "cpu.stat").write_text(f"usage_usec {int(1e6 * self.used_s)}\nuser_usec 1\n")


def test_only_the_cores_that_it_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    assert machine.spend(10, [1.0, 0.0, 0.5, 0.0]) == pytest.approx(0.5)
    assert machine.spend(10, [1.0, 0.0, 1.0, 0.0]) == pytest.approx(0.0)
    assert machine.spend(10, [0.0, 1.0, 0.0, 1.0]) == pytest.approx(2.0)
    assert machine.spend(0, [1.0] * 4) is None, "no time has gone by"


@pytest.mark.parametrize(
    ("group", "max_of"),
    [
        ("/", {"": "150000 100000"}),  # a container that sees its own group as the root
        ("/pod/box", {"": "max 100000", "pod": "max 100000", "pod/box": "150000 100000"}),
        ("/pod/box", {"pod": "150000 100000", "pod/box": "max 100000"}),
    ],
)
def test_a_containers_quota_counts_where_it_leaves_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, max_of: dict[str, str]
) -> None:
    machine = Machine(tmp_path, monkeypatch, group=group, max_of=max_of)
    assert machine.spend(10, [0.0] * 4, used_s=12.0) == pytest.approx(0.3), "1.5 cores, of which 1.2 were used"
    assert machine.spend(10, [0.9, 1.0, 0.9, 1.0], used_s=0.0) == pytest.approx(0.2), "others have the cores"
    assert machine.spend(10, [0.0] * 4, used_s=99.0) == 0.0


def test_a_quota_elsewhere_counts_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup/other").mkdir(parents=True)
    machine = Machine(tmp_path, monkeypatch, group="/pod", max_of={"other": "1000 100000", "pod": "max 100000"})
    assert machine.spend(10, [0.0] * 4, used_s=12.0) == pytest.approx(2.0)


def test_without_the_kernels_files_nothing_is_measured(tmp_path: Path) -> None:
    assert CpuMeter({0}, tmp_path, tmp_path).free_cores() is None


def test_this_machine_has_cores() -> None:
    meter = CpuMeter()
    deadline = time.monotonic() + 20
    while (free := meter.free_cores()) is None:  # until the kernel has counted a tick
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert 0.0 <= free <= len(os.sched_getaffinity(0))
