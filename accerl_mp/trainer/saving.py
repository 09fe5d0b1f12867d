"""Saved states, written by a thread while training goes on. What they hold is copied at a step boundary, on the main thread.

The threads of all ranks talk over a process group of their own, so their collectives never meet those of the main threads.
A state gets its name once every rank has written its part; a rank that cannot (a full disk) leaves the older states as they are.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accerl_mp.config import Config
from accerl_mp.files import write_atomically
from accerl_mp.recovery import (
    CURRENT,
    FORMAT,
    STATE_FILE,
    checksum,
    folder_name,
    identity,
    low_water,
    rank_file_name,
    state_text,
    states_in,
)
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.checkpoint import flush, replace_folder
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.state import Progress
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import Health
from accerl_mp.transport.ring_memory import NUM_RECENT
from accerl_mp.transport.saved_ring import RingCut, pack_rank

_GROUP_TIMEOUT = timedelta(minutes=30)
_LOOK_S = 0.5
_STOP_SHOWS_S = 1.0
_VERDICT_S = 10.0
"""The supervisor looks round five times a second; on a starved machine it may take this long."""
_MEET = timedelta(seconds=6)
"""Ranks that all leave reach `all_are_at` within this time; one that died, or hangs in a collective, never does."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """One rank's part of a state. Nothing in it is changed by training."""

    progress: Progress
    tensors: dict[str, Tensor]
    """On the CPU, DTensors over `Saver.mesh`."""
    ring: RingCut
    fields: dict[str, Any]
    """What only this rank knows: random numbers, the pack that it had chosen."""
    strikes: dict[str, Any] | None = None


class Saver:
    """Writes states into `folder`, and keeps the newest `--keep-checkpoints`. Every rank makes the same calls in the same order."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks, health: Health) -> None:
        self._folder, self._config, self._ranks, self._health = folder, config, ranks, health
        # As the run began: games that are deleted later are still the ones it is numbered by.
        self._identity = identity(config, RunPaths(folder.parent).games)
        self.group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        self._meeting = dist.new_group(backend="gloo", timeout=_MEET)
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self._thread: threading.Thread | None = None
        self._unsaved: Content | None = None
        self.saved_step = 0
        """Step of the newest state that all ranks know to be whole; valid while nothing is being written."""
        if ranks.rank == 0:
            for path in folder.glob(".*.new"):  # of a run that was killed while it saved
                shutil.rmtree(path, ignore_errors=True)

    @property
    def is_busy(self) -> bool:
        """A state is still being written by this rank; not collective."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: Content, *, is_last: bool = False) -> None:
        """Write it in the background, after the one that may still be under way. The last one is kept until it is written (`try_again`).

        at the end     an error is logged and forgotten: training does not depend on it
        """
        self.finish()
        self._unsaved = content if is_last else None
        self._thread = threading.Thread(target=self._run, args=(content,), name="save-state", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 0) -> bool:
        """Wait until nothing is being written. False at the deadline (0: none).

        waits for      the disks and the other ranks' threads; also while the run ends
        when full      what is being written grows: that is no hang, however long it takes; what does not for --step-timeout-s is one
        """
        if self._thread is None:
            return True
        with self._health.waiting("its state to be written", timeout_s=timeout_s) as wait:
            written = -1
            while self._thread.is_alive() and wait.remaining_s > 0:
                self._thread.join(min(wait.remaining_s, _LOOK_S))
                wait.warn()
                if (now := _bytes_below(self._folder)) != written:
                    written = now
                    self._health.tick()
        return not self._thread.is_alive()

    def all_are_at(self, step: int) -> bool:
        """Whether every rank has come here, with the same step behind it: then a last state can be saved. May be the last call.

        waits for      the other ranks, at most 6 s; a dead one is noticed earlier
        """
        if not self.finish(_MEET.total_seconds()):
            _log.warning("no last state is saved: the one before is still being written")
            return False
        steps = torch.tensor([step, -step])
        try:
            dist.all_reduce(steps, dist.ReduceOp.MAX, self._meeting)
        except RuntimeError as error:  # gloo's word for a dead rank, and for one that does not come
            _log.info("no last state is saved: not all ranks can (%s)", error)
            return False
        if step < 0 or steps.tolist() != [step, -step]:
            _log.warning("no last state is saved: the end came in the middle of a step")
            return False
        return True

    def goes_on_from(self, step: int, *, is_own: bool) -> None:
        """There is a whole state of this step; another run's is saved in this one's folder all the same. Not collective."""
        if is_own:
            self.saved_step = step
        self._note_saved(step)

    def try_again(self) -> None:
        """Once more the last state, as it was then, where its first try has failed: room may be back. Collective.

        waits for      the disks and the other ranks' threads
        """
        self.finish()
        content = self._unsaved
        all_have_it = -self._ranks.maxima([-int(content is not None)])[0]
        if content is not None and all_have_it:
            self.start(content)
            self.finish()

    def _note_saved(self, step: int) -> None:
        """At the run's end somebody asks the board whether this is the last one."""
        if self._ranks.rank == 0:
            self._health.board.set("saved_step", step)

    def _run(self, content: Content) -> None:
        try:
            self._save(content)
        except RuntimeError as error:  # the group broke: a rank is gone
            _log.warning("a rank was lost while the state at step %d was saved, it may be missing: %s", content.progress.step, error)

    def _save(self, content: Content) -> None:
        started = time.monotonic()
        target = self._folder / folder_name(content.progress.step, content.progress.version)
        temporary = self._folder / f".{target.name}.new"
        reason = _attempt(lambda: self._write_part(temporary, content))
        files, sum_reason = {}, ""
        if not reason:
            files, sum_reason = self._sums(temporary)
        part = {
            "reason": reason or sum_reason,
            "files": files,
            "done": content.ring.done,
            "next": content.ring.next_number,
            "strikes": content.strikes,
        }
        parts: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(parts, part, group=self.group)
        verdict = [""]
        if self._ranks.rank == 0:
            verdict = [self._conclude(temporary, target, content.progress, parts)]
        dist.broadcast_object_list(verdict, src=0, group=self.group)
        if not verdict[0]:
            self.saved_step, self._unsaved = content.progress.step, None
            self._note_saved(self.saved_step)
            _log.info("saved the state at step %d (%s) in %.1f s", self.saved_step, target.name, time.monotonic() - started)

    def _conclude(self, temporary: Path, target: Path, progress: Progress, parts: list[dict[str, Any]]) -> str:
        """Rank 0: publish what all have written, or take it away. Returns why it failed."""
        reason = next((part["reason"] for part in parts if part["reason"]), "")
        reason = reason or _attempt(lambda: self._publish(temporary, target, progress, parts))
        shutil.rmtree(temporary, ignore_errors=True)
        if reason:
            _log.error("the state at step %d was not saved to %s: %s; older states stay, training goes on", progress.step, target, reason)
        return reason

    def _write_part(self, temporary: Path, content: Content) -> None:
        writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
        dcp.save(content.tensors, storage_writer=writer, process_group=self.group)
        (temporary / rank_file_name(self._ranks.rank)).write_bytes(pack_rank(content.fields, content.ring.groups))

    def _sums(self, temporary: Path) -> tuple[dict[str, tuple[int, int]], str]:
        """Size and checksum of the files that this rank wrote."""
        rank = self._ranks.rank
        names = [rank_file_name(rank), *(path.name for path in temporary.glob(f"__{rank}_*"))] + ([".metadata"] if rank == 0 else [])
        files = {}
        reason = _attempt(lambda: files.update({name: _sum(temporary / name) for name in names}))
        return files, reason

    def _publish(self, temporary: Path, target: Path, progress: Progress, parts: list[dict[str, Any]]) -> None:
        """Rank 0: state.json, then the name, then the pointer, then away with the oldest."""
        next_number = max(part["next"] for part in parts)
        done = {number for part in parts for number in part["done"]}
        low, above = low_water(next_number, done, first=max(0, next_number - NUM_RECENT // 2))
        content = {
            "format": FORMAT,
            "step": progress.step,
            "version": progress.version,
            "next_version": progress.version + 1,
            "num_ranks": self._ranks.size,
            "time": time.time(),
            "trainer": progress.to_json(),
            "groups": {"next": next_number, "low_water": low, "done_above": above},
            "strikes": parts[0]["strikes"],
            "identity": self._identity,
            "files": {name: entry for part in parts for name, entry in part["files"].items()},
        }
        (temporary / STATE_FILE).write_text(state_text(content))
        replace_folder(temporary, target)
        if reason := _attempt(lambda: write_atomically(self._folder / CURRENT, target.name + "\n")):
            _log.warning("%s cannot be written: %s; the state is there, and a start finds it by its name", self._folder / CURRENT, reason)
            _attempt(lambda: (self._folder / CURRENT).unlink(missing_ok=True))  # else an older state would go first
        flush(self._folder)
        for old in states_in(self._folder)[self._config.metrics.keep_checkpoints :]:
            shutil.rmtree(old, ignore_errors=True)


def was_asked_to_end(paths: RunPaths, board: Board, *, is_leaving: bool = False) -> bool:
    """Whether a person or the cluster has asked the run to end: DIR/stop, or the supervisor's word where the disk has no room for that.

    waits for      either, at most 1 s: a signal to all processes at once reaches ranks before launch.sh writes DIR/stop. `is_leaving`
                   (a rank was sent a signal): at most 10 s, until the supervisor says whether that is a stop or follows a failure
    a dead parent  (the supervisor) is waited for as long
    """
    until = time.monotonic() + (_VERDICT_S if is_leaving else _STOP_SHOWS_S)
    while not (is_asked := paths.stop.exists() or board.get("asked_to_end") == 1) and time.monotonic() < until:
        if is_leaving and (board.get("failed") or board.get("stop")):
            return board.get("asked_to_end") == 1  # set before `stop` is
        time.sleep(0.02)
    return is_asked


def _bytes_below(folder: Path) -> int:
    """Of a folder in which others write and remove."""
    total = 0
    for place, _, names in os.walk(folder):  # bears folders that go meanwhile; `rglob` does not
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _attempt(work: Callable[[], None]) -> str:
    """Why it failed; empty if it did not. The disk's reasons only."""
    try:
        work()
    except OSError as error:
        return str(error)
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        return next((str(cause) for cause in causes if isinstance(cause, OSError)), "") or "; ".join(map(repr, causes))
    return ""


def _sum(path: Path) -> tuple[int, int]:
    return path.stat().st_size, checksum(path)
