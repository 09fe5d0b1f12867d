"""Seeded requests on vLLM's CPU engine whose prompt does not fit into one step."""

from typing import Any

import numpy as np
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def rewind_what_is_discarded() -> None:
    """Let a seeded request draw its first token from the beginning of its random numbers, in however many steps its prompt was read.

    vLLM samples after each part of a prompt, discards that, and takes the generator's offset back. A CPU's generator has no offset:
    the engine died of it (RuntimeError). Here the generator begins anew instead; a preempted request repeats its first numbers.
    """
    keep_books = GPUModelRunner._bookkeeping_sync

    def rewind_and_keep_books(self: Any, *arguments: Any, **options: Any) -> Any:
        batch, seeded = self.input_batch, self.input_batch.generators
        parts = seeded.keys() & set(np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist())
        for row in parts:
            seeded[row].manual_seed(seeded[row].initial_seed())
        batch.generators = {row: generator for row, generator in seeded.items() if row not in parts}
        try:
            return keep_books(self, *arguments, **options)
        finally:
            batch.generators = seeded

    GPUModelRunner._bookkeeping_sync = rewind_and_keep_books
