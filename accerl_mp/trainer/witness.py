"""What the trainer's weights made of the episodes that are written to `episodes/`: beside each transcript, its logprobs when trained.

    episodes/train-0000050.trained.jsonl    one line each time that a sample of the episode is trained:
        {"step": 7, "turns": [0, 0, 1, 1], "logprobs": [-0.1, ...]}     an entry a trained token

`step` is the optimizer step, from 0; `turns` are the sample's `response_indices`. Against the transcript's own logprobs
(of vLLM, when sampled) they show where the two policies differ: by staleness, and by their kernels.
"""

import json
import logging
from pathlib import Path

from torch import Tensor

from accerl_mp.samples import UNTRAINED, RLSample

_log = logging.getLogger(__name__)


class Witness:
    """Picks the sampled episodes out of what a rank trains. Each group has one rank, so each file has one writer."""

    def __init__(self, folder: Path, *, every: int) -> None:
        self._folder, self._every = folder, every

    def see(self, micro_batches: list[tuple[list[RLSample], Tensor]], *, step: int) -> None:
        """A trained step: each micro-batch's samples and [R] logprobs of their trained tokens, in their order.

        Nothing is copied off the device unless an episode of `--transcripts-every` is among them. A full disk costs lines.
        """
        for samples, logprobs in micro_batches:
            if any(self._wants(sample) for sample in samples):
                parts = logprobs.float().cpu().split([sample.num_trained for sample in samples])
                for sample, part in zip(samples, parts, strict=True):
                    if self._wants(sample):
                        self._append(sample, part.tolist(), step)

    def _wants(self, sample: RLSample) -> bool:
        return self._every > 0 and sample.episode_id % self._every == 0

    def _append(self, sample: RLSample, logprobs: list[float], step: int) -> None:
        turns = sample.response_indices[sample.labels != UNTRAINED].tolist()
        line = {"step": step, "turns": turns, "logprobs": [round(value, 4) for value in logprobs]}
        try:
            self._folder.mkdir(exist_ok=True)
            with (self._folder / f"train-{sample.episode_id:07d}.trained.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _log.warning("cannot write what was trained of episode %d: %s", sample.episode_id, error)
