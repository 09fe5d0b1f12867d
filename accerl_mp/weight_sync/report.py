"""A finished push as a line of the log."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accerl_mp.weight_sync.sender import PushReport

_PHASES = ("gather", "send", "pause", "load", "resume")


def describe(report: "PushReport") -> str:
    """Sizes, and milliseconds of each phase; sending and what follows it overlap with generation and training."""
    times = ", ".join(f"{name} {1e3 * getattr(report, f'{name}_s'):.1f}" for name in _PHASES)
    rate = report.num_bytes / 1e9 / report.send_s if report.send_s else 0.0
    return (
        f"push {report.version}: {report.num_bytes / 2**20:.1f} MiB in {1e3 * report.seconds:.1f} ms ({times}), "
        f"{rate:.1f} GB/s on the wire, swapped {report.path}" + (", verified" if report.verified else "")
    )
