"""accerl_mp's path from rollout to trainer memory, with its own parts: codec, samples channel, ingest's Inbox and Rings, RingReader.

    W rollout processes --ipc--> ingest process --ring--> trainer process

Only who deals the games is left out. Used by bench/transport.py.
"""

import multiprocessing as mp
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import zmq

from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.inbox import Inbox
from accerl_mp.ingest.rings import Rings
from accerl_mp.launcher.sweep import sweep
from accerl_mp.samples import RLSample
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.outbox import Outbox
from accerl_mp.transport.process import die_with_parent, keep_freed_memory
from accerl_mp.transport.ring import RingReader, SharedRing
from bench.transport_common import Arrivals, Clock, Stream, make_groups, stamped

_TIMEOUT_S = 120.0
POLL_S = 0.2
"""A rank that waits looks at other things this often; a put wakes it."""


class Played:
    """Takes the place of ingest's dealer: every group counts as dealt, and nothing has to be taken off its books."""

    next_number = sys.maxsize

    def finish(self, group_id: int) -> None:
        pass

    def fail(self, group_id: int, reason: str) -> None:
        raise RuntimeError(f"group {group_id} did not arrive whole: {reason}")


def run(stream: Stream) -> dict[str, Any]:
    """One stream of samples through new processes; what the trainer saw."""
    context = mp.get_context("spawn")
    with _paths() as paths:
        ready, stop, answers = context.Barrier(stream.num_workers + 3), context.Event(), context.SimpleQueue()
        clock = Clock()
        SharedRing.create(paths.ring(0), stream.ring_slots, stream.ring_bytes)
        roles = [(_ingest, (paths.run_dir, ready, stop)), (_trainer, (paths.run_dir, stream, ready, stop, answers))]
        roles += [(_rollout, (paths.run_dir, stream, index, ready, stop)) for index in range(stream.num_workers)]
        processes = [_start(context, target, arguments) for target, arguments in roles]
        try:
            ready.wait(_TIMEOUT_S)
            clock.start()
            measured = _answer(answers, processes)
            spent = clock.by_pid()
            measured["cpu_s"] = sum(spent.values())
            measured["cpu_by_role"] = {
                "ingest": spent.get(processes[0].pid, 0.0),
                "trainer": spent.get(processes[1].pid, 0.0),
                "rollouts": sum(spent.get(process.pid, 0.0) for process in processes[2:]),
            }
            stop.set()
            for process in processes:
                process.join(_TIMEOUT_S)
        finally:
            for process in processes:
                process.kill()  # which has ended, unless something went wrong
                process.join()
        return measured


def _answer(answers: Any, processes: list[Any]) -> dict[str, Any]:
    """The trainer's. RuntimeError if a process has died, which says why on stderr."""
    while answers.empty():
        if any(process.exitcode not in (None, 0) for process in processes):
            raise RuntimeError("a process of the stream has died")
        time.sleep(0.05)
    return answers.get()


@contextmanager
def _paths() -> Iterator[RunPaths]:
    folder = Path(tempfile.mkdtemp(prefix="accerl-bench-"))
    paths = RunPaths(folder)
    try:
        yield paths
    finally:
        sweep(paths)
        shutil.rmtree(folder, ignore_errors=True)


def _start(context: SpawnContext, target: Any, arguments: tuple) -> Any:
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _rollout(run_dir: Path, stream: Stream, index: int, ready: Barrier, stop: Event) -> None:
    """Sends its share of the groups; at most MAX_UNACKED of them are on their way.

    Leaves when all is counted: ending costs CPU time, too.
    """
    die_with_parent()
    keep_freed_memory()
    context = sockets.new_context()
    socket = sockets.connect_dealer(context, RunPaths(run_dir), channels.SAMPLES, identity=f"rollout/{index}")
    groups, outbox = make_groups(stream, index), Outbox(RunPaths(run_dir), index)
    num_unacked = 0
    ready.wait(_TIMEOUT_S)
    for group in stream.paced(groups, index):
        while num_unacked >= channels.MAX_UNACKED or socket.poll(0):
            outbox.free(channels.unpack("ack", socket.recv())["group_id"])
            num_unacked -= 1
        _send(socket, outbox, stamped(group))
        num_unacked += 1
    while num_unacked:
        outbox.free(channels.unpack("ack", socket.recv())["group_id"])
        num_unacked -= 1
    stop.wait(_TIMEOUT_S)
    socket.close()
    context.term()
    outbox.close()


def _send(socket: zmq.Socket, outbox: Outbox, group: list[RLSample]) -> None:
    """As rollout/work.py does, without records of episodes."""
    header = {"op": "group", "group_id": group[0].group_id, "kind": "train", "eval_id": -1, "outcome": "samples", "episodes": []}
    socket.send_multipart(outbox.pack(header, group), copy=False)


def _ingest(run_dir: Path, ready: Barrier, stop: Event) -> None:
    """Ingest's loop, less dealing and metrics."""
    die_with_parent()
    keep_freed_memory()
    context = sockets.new_context()
    paths = RunPaths(run_dir)
    rings = Rings([SharedRing.attach_writer(paths.ring(0))], FlopsEstimate(), reuse=1)
    inbox = Inbox(context, paths, rings=rings, dealer=Played(), take_evaluated=lambda _: None)  # type: ignore[arg-type]
    ready.wait(_TIMEOUT_S)
    while not stop.is_set():
        sockets.wait_readable([inbox.socket], 0.001 if inbox.num_waiting else 0.02)
        inbox.receive()
        inbox.put()
    inbox.close()
    rings.close()
    context.term()


def _trainer(run_dir: Path, stream: Stream, ready: Barrier, stop: Event, answers: Any) -> None:
    """Reads whatever is there, as Replay does, and releases it."""
    die_with_parent()
    keep_freed_memory()
    reader = SharedRing.attach_reader(RunPaths(run_dir).ring(0))
    arrivals = Arrivals(stream.num_samples)
    ready.wait(_TIMEOUT_S)
    seen = 0
    while not arrivals.complete:
        if reader.last_sequence == seen:
            reader.sleep(seen, POLL_S)
            continue
        seen = reader.last_sequence
        _read_all(reader, arrivals)
    answers.put(arrivals.summary())
    stop.wait(_TIMEOUT_S)
    reader.close()


def _read_all(reader: RingReader, arrivals: Arrivals) -> None:
    records = reader.ready()
    for record, sample in zip(records, reader.read_all(records), strict=True):
        if sample is None:
            raise RuntimeError(f"record {record.sequence} was torn: nothing may overtake the reader here")
        arrivals.add(sample.reward, len(sample))
        reader.release(record, "trained")
