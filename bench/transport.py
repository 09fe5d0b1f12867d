"""RLSamples from W rollout processes to trainer memory: samples/s, MB/s, latency and CPU time a sample; `--vs ray` beside it.

What is limited here: copying bytes, and the interpreter's time a sample. Both limits are measured in the same run: what one core copies
between two buffers that no cache holds (memcpy), and what ZeroMQ carries over an ipc socket between two processes when nobody looks at the
bytes. A sample counts when it lies in the trainer's memory as a checked RLSample. Throughput is taken with workers that send as fast as
they are acknowledged; latency (from before encoding to after decoding) at a fixed rate that both sides can keep up with.

`--vs ray` sends the same samples through a Ray actor (bench/ray_buffer.py) in the same run, alternating: as plain lists, which is how the
reference has them, and as our arrays.

    python bench/transport.py --vs ray
    python bench/transport.py --tokens 500 8000 --workers 1 4
"""

import dataclasses
import multiprocessing as mp
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import zmq

from accerl_mp.topology import RunPaths
from accerl_mp.transport import sockets
from accerl_mp.transport.codec import encode_group
from accerl_mp.transport.process import die_with_parent
from bench import transport_ours
from bench.common import Result, alternate, make_parser, memcpy_bytes_per_s, parse, repeat, stopwatch
from bench.scratch import ray_driver
from bench.transport_common import Stream, make_groups

Side = Callable[[Stream], dict[str, Any]]
NUM_SAMPLES, NUM_TOKENS = 4000, 8_000_000
"""A run's samples, or fewer of longer ones: this many tokens in all."""
LATENCY_S = 2.0
MEMCPY_BYTES = 512 << 20
"""More than a last-level cache of this decade (260 MB here)."""


def make_sides(vs: str | None, stack: ExitStack, result: Result) -> dict[str, Side]:
    sides: dict[str, Side] = {"accerl_mp": transport_ours.run}
    if vs == "ray":
        ray = stack.enter_context(ray_driver())
        result.note(f"Ray {ray.started['ray']} in an environment of its own; ray.init took {ray.started['init_s']:.1f} s")
        sides |= {
            "ray, lists": lambda stream: ray.run({"stream": dataclasses.asdict(stream), "form": "lists"}),
            "ray, arrays": lambda stream: ray.run({"stream": dataclasses.asdict(stream), "form": "arrays"}),
        }
    return sides


def measure_throughput(result: Result, sides: dict[str, Side], stream: Stream, repeats: int, *, warmup: int) -> None:
    """All sides, as fast as it goes."""
    labels = {"tokens": stream.num_tokens, "workers": stream.num_workers}
    size_bytes = round(encode_group(make_groups(stream, 0)[0]).size_bytes / stream.group_size)
    runs = alternate({name: lambda side=side: side(stream) for name, side in sides.items()}, repeats=repeats, warmup=warmup)
    rates = {name: [run["num_samples"] / run["seconds"] for run in values] for name, values in runs.items()}
    for name, values in runs.items():
        result.add("samples", rates[name], "samples/s", "higher", side=name, **labels)
        result.add("bytes", [rate * size_bytes / 1e6 for rate in rates[name]], "MB/s", "higher", side=name, **labels)
        result.add("CPU time", [1e6 * run["cpu_s"] / run["num_samples"] for run in values], "us/sample", "lower", side=name, **labels)
        for role in values[0].get("cpu_by_role", ()):
            spent = [1e6 * run["cpu_by_role"][role] / run["num_samples"] for run in values]
            result.add(f"CPU time of {role}", spent, "us/sample", "lower", side=name, **labels)
        if "drawn_per_s" in values[0]:
            drawn = [run["drawn_per_s"] for run in values]
            result.add("samples drawn again and again", drawn, "samples/s", "higher", side=name, **labels)
    for name in list(sides)[1:]:
        ratio = result.ratio(f"samples/s ours / {name}, {_setting(stream)}", rates["accerl_mp"], rates[name])
        if stream.num_workers == 4:
            result.target(f"samples/s against {name}, {_setting(stream)}", ratio, at_least=10)
    limits = measure_limits(result, size_bytes, labels, repeats)
    share = result.ratio(f"bytes/s ours / memcpy of one core, {_setting(stream)}", [r * size_bytes for r in rates["accerl_mp"]], limits)
    if stream.num_tokens == 8000:
        result.target(f"bytes/s against memcpy of one core, {_setting(stream)}", share, at_least=0.5)


def measure_limits(result: Result, size_bytes: int, labels: dict[str, Any], repeats: int) -> list[float]:
    """memcpy out of memory and a bare socket for frames of this size. Returns memcpy's bytes a second."""
    copied = repeat(lambda: memcpy_bytes_per_s(MEMCPY_BYTES, total_bytes=2 * MEMCPY_BYTES), repeats=repeats)
    carried = repeat(lambda: bare_socket_bytes_per_s(size_bytes), repeats=repeats)
    result.add("limit: memcpy, one core", [value / 1e6 for value in copied], "MB/s", "higher", **labels)
    result.add("limit: ZeroMQ ipc socket alone", [value / 1e6 for value in carried], "MB/s", "higher", **labels)
    return copied


def measure_latency(result: Result, sides: dict[str, Side], stream: Stream, repeats: int) -> None:
    """All sides at `stream.rate`."""
    labels = {"tokens": stream.num_tokens, "workers": stream.num_workers, "rate": stream.rate}
    runs = alternate({name: lambda side=side: side(stream) for name, side in sides.items()}, repeats=repeats, warmup=0)
    for name, values in runs.items():
        result.add("latency p50", [1000 * run["p50_s"] for run in values], "ms", "lower", side=name, **labels)
        result.add("latency p95", [1000 * run["p95_s"] for run in values], "ms", "lower", side=name, **labels)
    for name in list(sides)[1:]:
        medians = [[run["p50_s"] for run in runs[side]] for side in ("accerl_mp", name)]
        ratio = result.ratio(f"latency p50 ours / {name}, {_setting(stream)}", *medians)
        if stream.num_workers == 4:
            result.target(f"latency p50 against {name}, {_setting(stream)}", ratio, at_most=0.1)


def bare_socket_bytes_per_s(size_bytes: int) -> float:
    """Frames of this size from one process to another, received and dropped."""
    context, count = sockets.new_context(), max(32, (1 << 27) // size_bytes)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        pull = sockets.bind_pull(context, paths, "bare")
        process = mp.get_context("spawn").Process(target=_push, args=(Path(folder), size_bytes, count), daemon=True)
        process.start()
        pull.recv()
        with stopwatch() as seconds:
            for _ in range(count):
                pull.recv()
        process.join()
        pull.close()
        context.term()
        for file in paths.sockets.iterdir():
            file.unlink()
        paths.sockets.rmdir()
    return count * size_bytes / seconds()


def _push(folder: Path, size_bytes: int, count: int) -> None:
    die_with_parent()
    context = sockets.new_context()
    socket = sockets.connect_push(context, RunPaths(folder), "bare")
    socket.setsockopt(zmq.LINGER, -1)
    frame = bytes(size_bytes)
    for _ in range(count + 1):
        socket.send(frame)
    socket.close()
    context.term()


def _setting(stream: Stream) -> str:
    return f"{stream.num_tokens} tokens, W = {stream.num_workers}"


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--vs", choices=("ray",), help="measure this beside us, alternating (installs it into a throw-away environment)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 8000], help="tokens of a sample")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="rollout processes")
    parser.add_argument("--rate", type=float, default=50.0, help="samples a second while latency is taken")
    args = parse(parser)
    if args.quick:
        args.tokens, args.workers, args.repeats = args.tokens[:1], args.workers[-1:], 1
    latency_s = 0.7 if args.quick else LATENCY_S
    result = Result("transport", args)
    with ExitStack() as stack:
        sides = make_sides(args.vs, stack, result)
        for num_tokens in args.tokens:
            for num_workers in args.workers:
                per_round = 8 * num_workers
                count = min(NUM_SAMPLES, NUM_TOKENS // num_tokens) // (8 if args.quick else 1)
                fast = Stream(num_tokens, num_workers, max(4, count // per_round) * per_round)
                measure_throughput(result, sides, fast, args.repeats, warmup=0 if args.quick else 1)
                slow = max(1, round(args.rate * latency_s / per_round)) * per_round
                measure_latency(result, sides, dataclasses.replace(fast, num_samples=slow, rate=args.rate), args.repeats)
    result.finish()


if __name__ == "__main__":
    main()
