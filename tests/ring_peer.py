"""The other process of a ring test: `python tests/ring_peer.py write|read|die ...`, run by test_ring.py."""

import os
import signal
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from sample_factory import make_group

from accerl_mp.transport.codec import encode_samples
from accerl_mp.transport.ring import SharedRing
from accerl_mp.transport.ring_writer import RingWriter

GROUP_SIZE = 3


def group_of(number: int) -> list:
    """Lengths go up and down, so that records move over the pages."""
    return make_group(number, GROUP_SIZE, num_tokens=20 + 97 * (number % 23))


def checksum_of(sample) -> int:
    return zlib.crc32(b"".join(encode_samples([sample])))


def write(path: Path, start: int, count: int) -> None:
    """Put groups start..start+count-1 in order, waiting for room."""
    writer = SharedRing.attach_writer(path)
    for number in range(start, start + count):
        while not writer.try_put_group(group_of(number)):
            time.sleep(0.0005)


def read(path: Path, count: int) -> None:
    """Read and release `count` samples, print how many were right."""
    reader, num_right, seen, deadline = SharedRing.attach_reader(path), 0, [], time.monotonic() + 60
    while len(seen) < count and time.monotonic() < deadline:
        for ready in reader.ready():
            sample = reader.read(ready)
            expected = group_of(ready.group_id)[ready.sequence - ready.group_first]
            num_right += sample is not None and checksum_of(sample) == checksum_of(expected)
            seen.append((ready.group_id, ready.sequence - ready.group_first))
            reader.release(ready, "trained")
        time.sleep(0.0005)
    print(num_right, len(seen), len(set(seen)), seen == sorted(seen))


def die(path: Path, where: str) -> None:
    """Put group 1000 and be killed at a chosen point of it."""
    writer = SharedRing.attach_writer(path, evict_used=True)
    kill_at_call = {"_write_pages": 0, "_write": 0, "_commit": 0, "_free": 1, "_count": 0}[where]
    original, calls = getattr(RingWriter, where), iter(range(1000))

    def killed(*args, **options):
        if next(calls) == kill_at_call:
            if where == "_write_pages":
                original(*args[:2], [args[2][0], args[2][1][: len(args[2][1]) // 2]])  # half of the record
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(RingWriter, where, killed)
    writer.try_put_group(group_of(1000))


def main() -> None:
    action, path, *numbers = sys.argv[1:]
    if action == "die":
        die(Path(path), numbers[0])
    else:
        {"write": write, "read": read}[action](Path(path), *map(int, numbers))


if __name__ == "__main__":
    main()
