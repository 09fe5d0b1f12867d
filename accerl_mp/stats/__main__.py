"""The stats process: metric records of every process in; TensorBoard, metrics.jsonl, status.json and a line a round out.

    python -m accerl_mp.stats --run-dir DIR

One thread that sleeps in poll. After a respawn it appends to the same files, and takes the sliding window that it had saved.
"""

import logging
import time
from collections.abc import Callable

from accerl_mp import log
from accerl_mp.stats.collector import Collector
from accerl_mp.stats.cpu import CpuMeter
from accerl_mp.stats.status import Status
from accerl_mp.stats.writer import MetricFiles
from accerl_mp.transport.channels import MetricsReceiver
from accerl_mp.transport.health import is_alive
from accerl_mp.transport.process import Process, run_process

_log = logging.getLogger(__name__)

POLL_S = 1.0
DRAIN_QUIET_S = 0.3
DRAIN_LIMIT_S = 3.0
TRAINER_LIMIT_S = 10.0


def main(process: Process) -> None:
    files, status = MetricFiles(process.paths.run_dir), Status(process.paths.run_dir)
    files.write_flags(process.config.to_flat(), started_s=status.started)
    table = process.health.table
    collector = Collector(
        process.config,
        files,
        status,
        say=log.terminal_line,
        num_restarts=lambda: sum(row.num_restarts for row in table.snapshot()),
        free_cores=CpuMeter().free_cores,
    )
    receiver = MetricsReceiver(process.paths)
    process.health.set_state("running")
    try:
        collect(process, receiver, collector)
    finally:
        drain(receiver, collector, trainer_closes=lambda: trainer_closes(process))
        if receiver.num_broken:
            _log.warning("%d messages had no known form and were left out", receiver.num_broken)
        receiver.close()
        status.save(has_ended=process.board.get("finished") == 1)
        files.close()


def collect(process: Process, receiver: MetricsReceiver, collector: Collector) -> None:
    """Take records until the run ends.

    waits for      records of any process, or the time to close a round
    when full      senders drop records and count them: nobody waits for stats
    at the end     raises Closed
    a dead peer    sends nothing; the supervisor sees to it
    """
    while True:
        process.health.tick()
        if process.board.get("policy_version") >= 0:
            collector.start_clock(time.monotonic())
        collector.close_due(time.monotonic())
        collector.speak_up(time.monotonic(), starved_s(process))
        due_s = collector.seconds_to_next(time.monotonic())
        with process.health.waiting("metric records", timeout_s=0) as wait:
            wait.check()
            records = receiver.receive(timeout_s=POLL_S if due_s is None else min(due_s, POLL_S))
        now_s = time.monotonic()
        for record in records:
            collector.take(record, now_s)


def drain(receiver: MetricsReceiver, collector: Collector, *, trainer_closes: Callable[[], bool] = lambda: False) -> None:
    """Take what is still in the socket.

    waits for      `DRAIN_QUIET_S` without a record, at most `DRAIN_LIMIT_S`; and, in a run that was asked to end, the last round of
                   the trainer, which ends its step first: as long as `trainer_closes`, at most `TRAINER_LIMIT_S`
    """
    began_s = time.monotonic()
    while True:
        is_closing = trainer_closes() and time.monotonic() - began_s < TRAINER_LIMIT_S  # asked before looking for what it has sent
        records = receiver.receive(timeout_s=DRAIN_QUIET_S)
        for record in records:
            collector.take(record, time.monotonic())
        if not (is_closing or (records and time.monotonic() - began_s < DRAIN_LIMIT_S)):
            break
    collector.finish(time.monotonic())


def starved_s(process: Process) -> float:
    """How long a trainer rank has waited for samples, the longest of them; 0: none does."""
    rows = process.health.table.snapshot()
    return max((row.waits_s for row in rows if row.name.startswith("trainer/") and row.waits_for.startswith("ring/")), default=0.0)


def trainer_closes(process: Process) -> bool:
    """The run was asked to end, and rank 0 has not left yet."""
    table, name = process.health.table, "trainer/0"
    if not process.board.get("stop") or name not in table.names:
        return False
    row = table.read(table.row_of(name))
    return row.state in ("running", "stopping") and is_alive(row.pid)


if __name__ == "__main__":
    run_process("stats", main)
