"""The next micro-batch is built on a thread while the current one computes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Part = TypeVar("_Part")
_Built = TypeVar("_Built")


def built_ahead(parts: Sequence[_Part], build: Callable[[_Part], _Built], *, device: torch.device) -> Iterator[_Built]:
    """`build(part)` of each part in order, one ahead of the caller and never two: its memory is that of two micro-batches.

    waits for      the thread to finish the part that is due
    an error       of `build` is raised where that part is due
    at the end     the thread ends with the iterator: close it where the caller may stop early
    """
    with ThreadPoolExecutor(1, thread_name_prefix="packs", initializer=_use, initargs=(device,)) as thread:
        upcoming = [thread.submit(build, part) for part in parts[:1]]
        for part in parts[1:]:
            built = upcoming.pop().result()
            upcoming.append(thread.submit(build, part))
            yield built
        for last in upcoming:
            yield last.result()


def _use(device: torch.device) -> None:
    """A thread begins on the first GPU whatever the rank's is: pinning memory would take a share of it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
