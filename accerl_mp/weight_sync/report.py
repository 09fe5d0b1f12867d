"""What a finished push took, and that as a line of the log."""

from dataclasses import dataclass

_PHASES = ("gather", "send", "pause", "load", "resume")


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Of one finished push, as rank 0 saw it (other ranks know version and verified)."""

    version: int
    seconds: float = 0.0
    """From start_push to the swap everywhere."""
    standstill_s: float = 0.0
    """In which no step of the engine began, of the slowest inference process: pause to resume; without a pause the load alone."""
    num_bytes: int = 0
    verified: bool = False
    begin_s: float = 0.0
    """On the main thread, as is the gathering: inference gets ready to receive."""
    gather_s: float = 0.0
    """Gather, cast, copy into messages."""
    send_s: float = 0.0
    """On the wire, beside everything else."""
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0
    swap_s: float = 0.0
    """From the first request that was held until requests are let in again: pause, load, cut of the versions, resume."""
    path: str = ""
    """How weights are swapped: "layerwise", "plain" or "captured"."""


def describe(report: PushReport) -> str:
    """Sizes, and milliseconds of each phase; sending and what follows it overlap with generation and training."""
    times = ", ".join(f"{name} {1e3 * getattr(report, f'{name}_s'):.1f}" for name in _PHASES)
    rate = report.num_bytes / 1e9 / report.send_s if report.send_s else 0.0
    return (
        f"push {report.version}: {report.num_bytes / 2**20:.1f} MiB in {1e3 * report.seconds:.1f} ms ({times}), "
        f"{rate:.1f} GB/s on the wire, swapped {report.path}" + (", verified" if report.verified else "")
    )
