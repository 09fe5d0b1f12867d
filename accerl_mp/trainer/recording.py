"""A run's trained samples on disk (`--record-samples`): one file a rank and optimizer step, for `accerl_mp.trainer.replayed`.

    args.json                     the run's resolved settings
    step-000007-rank-1.samples    msgpack {"version": n, "micro_batches": [[frame, ...], ...]}

A micro-batch's frames are a message of `transport/codec.py`, checksums included.
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgpack

from accerl_mp.config import Config
from accerl_mp.files import read_file
from accerl_mp.samples import RLSample
from accerl_mp.transport.codec import CodecError, decode_samples, encode_samples

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedStep:
    """What one rank trained in one optimizer step."""

    micro_batches: list[list[RLSample]]
    version: int
    """Whose tokens were on-policy, -1: none (see `Stepper.run`)."""


class Recorder:
    """Writes one rank's steps into a folder."""

    def __init__(self, folder: Path, config: Config, *, rank: int) -> None:
        """A full disk costs what could be replayed, not the start: it may be one after a rank's death."""
        self._folder, self._rank = folder, rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                config.save(folder / "args.json")
        except OSError as error:
            _log.error("settings of the samples are not recorded: %s; a replay needs them", error)

    def add(self, step: int, recorded: RecordedStep) -> None:
        """A file that is there is whole: it gets its name last. A full disk costs the file; what can be replayed ends before it."""
        content = {"version": recorded.version, "micro_batches": [encode_samples(samples) for samples in recorded.micro_batches]}
        path = step_file(self._folder, step, self._rank)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(msgpack.packb(content))
            unfinished.rename(path)
        except OSError as error:
            _log.error("the samples of step %d are not recorded: %s; a replay ends before it", step, error)
            unfinished.unlink(missing_ok=True)


def load_step(folder: Path, step: int, rank: int) -> RecordedStep:
    """Raises CodecError, with the file's name, where it is damaged or foreign."""
    path = step_file(folder, step, rank)
    try:
        content = msgpack.unpackb(read_file(path))
        return RecordedStep([decode_samples(frames) for frames in content["micro_batches"]], int(content["version"]))
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"{path}: {error}") from error


def step_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:06d}-rank-{rank}.samples"


def recorded_shape(folder: Path) -> tuple[int, int]:
    """(steps that every rank has recorded without a gap, ranks)."""
    names = [re.fullmatch(r"step-(\d+)-rank-(\d+)\.samples", path.name) for path in folder.glob("*.samples")]
    found = {(int(name[1]), int(name[2])) for name in names if name}
    num_ranks = 1 + max((rank for _, rank in found), default=-1)
    num_steps = 0
    while num_ranks and all((num_steps, rank) in found for rank in range(num_ranks)):
        num_steps += 1
    return num_steps, num_ranks
