"""The stats process: metric records of every process in; TensorBoard, metrics.jsonl, status.json and a line a round out.

    python -m accerl_mp.stats --run-dir DIR

One thread that sleeps in poll. After a respawn it appends to the same files; only the sliding window starts anew.
"""

import logging
import time

from accerl_mp import log
from accerl_mp.stats.collector import Collector
from accerl_mp.stats.cpu import CpuMeter
from accerl_mp.stats.status import Status
from accerl_mp.stats.writer import MetricFiles
from accerl_mp.transport.channels import MetricsReceiver
from accerl_mp.transport.process import Process, run_process

_log = logging.getLogger(__name__)

POLL_S = 1.0
DRAIN_QUIET_S = 0.3
DRAIN_LIMIT_S = 3.0


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
        drain(receiver, collector)
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
        due_s = collector.seconds_to_next(time.monotonic())
        with process.health.waiting("metric records", timeout_s=0) as wait:
            wait.check()
            records = receiver.receive(timeout_s=POLL_S if due_s is None else min(due_s, POLL_S))
        now_s = time.monotonic()
        for record in records:
            collector.take(record, now_s)


def drain(receiver: MetricsReceiver, collector: Collector) -> None:
    """Take what is still in the socket, until it has been quiet for `DRAIN_QUIET_S` or `DRAIN_LIMIT_S` are over."""
    deadline_s = time.monotonic() + DRAIN_LIMIT_S
    while time.monotonic() < deadline_s and (records := receiver.receive(timeout_s=DRAIN_QUIET_S)):
        for record in records:
            collector.take(record, time.monotonic())
    collector.finish(time.monotonic())


if __name__ == "__main__":
    run_process("stats", main)
