"""A Ray actor as replay buffer, for `bench/transport.py --vs ray` and bench/startup.py. Runs in a throw-away environment, never in ours.

The buffer is what the reference describes: an actor with a bounded deque; workers add lists of samples and do not wait; a trainer asks for
samples. Two things are kinder to Ray than the reference is: a worker waits when two of its calls are on their way, so that nothing has to
be evicted, and the trainer takes each sample once instead of drawing at random from all of them (`drawn` measures that as well).

Reads one JSON command a line from stdin, answers with one JSON object a line: {"stream": {...}, "form": "lists" | "arrays"}.
"""

import json
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray

from bench.transport_common import POLL_S, Arrivals, Clock, ListSample, Stream, make_groups, stamped

BATCH = 64
"""Samples that the trainer asks for at a time (the reference's candidate pool)."""
MAX_IN_FLIGHT = 2


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self._samples: deque[Any] = deque(maxlen=capacity)
        self._new: deque[Any] = deque()

    def add(self, samples: list[Any]) -> None:
        self._samples.extend(samples)
        self._new.extend(samples)

    def take(self, count: int) -> list[Any]:
        """The oldest that were not taken yet."""
        return [self._new.popleft() for _ in range(min(count, len(self._new)))]

    def sample(self, count: int) -> list[Any]:
        """Uniform, without replacement within a call; nothing is removed."""
        return random.sample(list(self._samples), min(count, len(self._samples)))


class Rollout:
    def __init__(self, stream: Stream, index: int, form: str) -> None:
        self._stream, self._index = stream, index
        groups = make_groups(stream, index)
        # The reference's workers build lists in the first place, so the conversion is not in the time.
        self._groups = [[ListSample(sample) for sample in group] for group in groups] if form == "lists" else groups

    def ready(self) -> bool:
        return True

    def send(self, buffer: Any) -> None:
        on_their_way: deque[Any] = deque()
        for group in self._stream.paced(self._groups, self._index):
            if len(on_their_way) >= MAX_IN_FLIGHT:
                ray.get(on_their_way.popleft())
            on_their_way.append(buffer.add.remote(stamped(group)))
        ray.get(list(on_their_way))


class Trainer:
    def ready(self) -> bool:
        return True

    def receive(self, buffer: Any, num_samples: int) -> dict[str, Any]:
        arrivals = Arrivals(num_samples)
        while not arrivals.complete:
            samples = ray.get(buffer.take.remote(BATCH))
            for sample in samples:
                arrivals.add(sample.reward, len(sample))
            if not samples:
                time.sleep(POLL_S)
        return arrivals.summary()

    def draw(self, buffer: Any, num_samples: int) -> float:
        """Samples a second as the reference's trainer gets them from a full buffer, repeats included."""
        start, count = time.monotonic(), 0
        while count < num_samples:
            count += len(ray.get(buffer.sample.remote(BATCH)))
        return count / (time.monotonic() - start)


def run(stream: Stream, form: str) -> dict[str, Any]:
    buffer = ray.remote(ReplayBuffer).options(num_cpus=0).remote(256)
    trainer = ray.remote(Trainer).options(num_cpus=0).remote()
    workers = [ray.remote(Rollout).options(num_cpus=0).remote(stream, index, form) for index in range(stream.num_workers)]
    ray.get([one.ready.remote() for one in (trainer, *workers)])
    clock = Clock()
    clock.start()
    received = trainer.receive.remote(buffer, stream.num_samples)
    sent = [worker.send.remote(buffer) for worker in workers]
    measured = ray.get(received)
    measured["cpu_s"] = clock.cpu_seconds()
    ray.get(sent)
    if not stream.rate:
        measured["drawn_per_s"] = ray.get(trainer.draw.remote(buffer, stream.num_samples))
    for actor in (buffer, trainer, *workers):
        ray.kill(actor)
    return measured


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        start = time.monotonic()
        ray.init(
            include_dashboard=False, log_to_driver=False, logging_level="error", num_cpus=2, object_store_memory=1 << 29, _temp_dir=folder
        )
        init_s = time.monotonic() - start
        ray.get(ray.remote(Trainer).options(num_cpus=0).remote().ready.remote())
        print(json.dumps({"init_s": init_s, "first_actor_s": time.monotonic() - start, "ray": ray.__version__}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(run(Stream(**command["stream"]), command["form"])), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
