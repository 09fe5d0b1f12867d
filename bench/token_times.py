"""When vLLM's tokens were made: noted inside its own process, where a step's outputs are, and read by the benches.

A file of float64, a row a step that made tokens: time.monotonic(), its tokens, the longest time that one of its requests had waited
for the next one (s), first tokens of a reply among them.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

_FILE = "ACCERL_BENCH_TOKENS"
"""Variable with the file's path. vLLM's processes inherit it."""


def note_tokens(file: Path) -> None:
    """Of the engine that this process starts next. To be called before its start."""
    from accerl_mp.inference import engine

    file.touch()
    os.environ[_FILE] = str(file)
    arguments = engine.engine_arguments
    engine.engine_arguments = lambda *given: arguments(*given) | {"scheduler_cls": "bench.token_times.make_scheduler"}


def read_tokens(file: Path) -> np.ndarray:
    """[steps, 4]. A row that is not whole is left out."""
    rows = np.fromfile(file)
    return rows[: len(rows) // 4 * 4].reshape(-1, 4)


def make_scheduler(*args: Any, **options: Any) -> Any:
    """The product's, with each step noted."""
    from accerl_mp.inference import scheduler

    made = scheduler.make_scheduler(*args, **options)
    notes = _Notes(Path(os.environ[_FILE]))
    update, take = made.update_from_output, made._take

    def update_and_note(*args: Any) -> Any:
        found = update(*args)
        notes.end_step()
        return found

    def see_and_take(client: int, output: Any) -> Any:
        notes.see(output)
        return take(client, output)

    made.update_from_output, made._take = update_and_note, see_and_take
    return made


class _Notes:
    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)  # whoever ends this process, what was noted is there
        self._last: dict[str, float] = {}
        self._step: list[Any] = []

    def see(self, output: Any) -> None:
        self._step.append((output.request_id, len(output.new_token_ids), output.finish_reason is not None))

    def end_step(self) -> None:
        """All tokens of a step are made at one time: when its outputs have been seen."""
        now, count, gap, num_first = time.monotonic(), 0, 0.0, 0
        for key, num_tokens, is_over in self._step:
            if num_tokens:
                count += num_tokens
                num_first += key not in self._last
                gap = max(gap, now - self._last.get(key, now))
                self._last[key] = now
            if is_over:
                self._last.pop(key, None)
        self._step = []
        if count:
            self._file.write(np.array([now, count, gap, num_first], np.float64).tobytes())
