"""What a run has left to be read, for bench/four_gpus.py and bench/mixture.py."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from accerl_mp.config import Config
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.recovery import Start
from accerl_mp.trainer.recording import load_step, step_file


class Failed(RuntimeError):
    """A run that did not do what it has to."""


class RunFolder:
    """What a run has left to be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.start = Config.load(folder / "args.json"), Start.load(folder / "resume")

    def log(self, name: str) -> str:
        file = self.folder / "logs" / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "Train/Loss" in line]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in lines_of(self.folder / "metrics.jsonl")]

    def versions_by_engine(self) -> list[list[int]]:
        """Versions of the tokens that each engine sampled, of the recorded samples."""
        num_engines = self.config.inference.infer_size or 1
        found: list[set[int]] = [set() for _ in range(num_engines)]
        for step in self.recorded():
            for sample in (sample for samples in step for sample in samples):
                found[sample.episode_id % num_engines].update(sample.output_versions.tolist())
        return [sorted(versions) for versions in found]

    def recorded(self) -> list[list[list[Any]]]:
        """Samples by step and rank, of the run's last start."""
        folder, ranks = self.folder / "samples", range(self.config.run.fsdp_world_size or 1)
        first = int(Path(self.start.state).name.split("-")[1]) if self.start.state else 0  # the state may be gone by now
        steps = itertools.takewhile(lambda step: all(step_file(folder, step, rank).exists() for rank in ranks), itertools.count(first))
        found = [[load_step(folder, step, rank) for rank in ranks] for step in steps]
        return [[[s for batch in one.micro_batches for s in batch] for one in step] for step in found]

    def loads(self) -> np.ndarray:
        """[steps, ranks]: estimated FLOPs."""
        estimate = FlopsEstimate.of_model(Path(self.config.model.model_path))
        return np.array([[estimate.of(np.array([len(s) for s in samples])) for samples in step] for step in self.recorded()])

    def balance(self) -> list[float]:
        """Largest over mean load of the ranks, a step."""
        loads = self.loads()
        return (loads.max(1) / loads.mean(1)).tolist()

    def last_words(self, num_lines: int = 30) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        logs = [log for log in logs if log.name.split("-")[0] in ("trainer", "inference", "supervisor", "torchrun.log", "ingest")]
        return "".join(f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) + "\n" for log in logs)


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
