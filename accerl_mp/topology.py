"""Where things are: the run folder's files, and which GPUs which process gets.

Standard library only (the supervisor imports it before anything else).
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_LONGEST_FOLDER = 38
"""Bytes. Below it come a folder of some 25 and vLLM's own names of 37; a socket's path must fit in 107."""


def folder_of_sockets() -> Path:
    """Where folders of sockets are made: the temporary folder, or /tmp where that of a cluster's job is too long for them."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER else "/tmp")


@dataclass(frozen=True)
class RunPaths:
    """Every path of a run, from its folder alone, so that two runs on one machine never meet."""

    run_dir: Path

    @property
    def run_id(self) -> str:
        """The same for the same folder: the next start finds what a killed run left."""
        return hashlib.blake2s(os.fsencode(self.run_dir.resolve()), digest_size=5).hexdigest()

    @property
    def args(self) -> Path:
        return self.run_dir / "args.json"

    def begun(self) -> float:
        """`time.time()` when launch.sh made the folder ready for its newest start; now, where it never did (tests, by hand).

        Every clock that is shown counts from here: the status line, `tools.top`, status.json, the summary.
        """
        return self.args.stat().st_mtime if self.args.exists() else time.time()

    @property
    def tokenizer(self) -> Path:
        """Folder with tokenizer.json, chat_template.jinja and meta.json, for processes without torch."""
        return self.run_dir / "tokenizer"

    @property
    def stop(self) -> Path:
        """Exists once the user has asked the run to end."""
        return self.run_dir / "stop"

    @property
    def ended(self) -> Path:
        """Exists once a start has ended in order: finished, or stopped, and every rank has left by itself."""
        return self.run_dir / "ended"

    @property
    def claim(self) -> Path:
        """Which launch.sh has the folder (`launcher/claim.py`)."""
        return self.run_dir / "claim.json"

    @property
    def games(self) -> Path:
        """The run's games by number (`games.py`), listed once: what lies in their folders later is another matter."""
        return self.run_dir / "games.json"

    @property
    def reached(self) -> Path:
        """How far the newest start has come, and what of it is saved (`launcher/reached.py`)."""
        return self.run_dir / "reached.json"

    @property
    def books(self) -> Path:
        """Where every group and every sample of the newest start went: ingest's last word."""
        return self.run_dir / "books.json"

    @property
    def samples(self) -> Path:
        """Folder of `--record-samples`."""
        return self.run_dir / "samples"

    @property
    def resume(self) -> Path:
        """Folder of the saved states (`recovery.py`)."""
        return self.run_dir / "resume"

    @property
    def strikes(self) -> Path:
        """Which games and groups have failed how often: ingest's note to its successors."""
        return self.run_dir / "strikes.json"

    def log(self, role: str, index: int) -> Path:
        return self.run_dir / "logs" / f"{role}-{index}.log"

    @property
    def sockets(self) -> Path:
        """Folder (0700) of the ipc sockets. Not in the run folder: a socket's path must fit in 107 bytes."""
        return folder_of_sockets() / f"accerl-{os.getuid()}-{self.run_id}"

    @property
    def torchrun(self) -> Path:
        """Folder of torchrun's temporary files, which it leaves behind."""
        return self.sockets.with_name(f"{self.sockets.name}.torchrun")

    @property
    def health(self) -> Path:
        return self._shared("health")

    @property
    def board(self) -> Path:
        return self._shared("board")

    def ring(self, rank: int) -> Path:
        return self._shared(f"ring-{rank}")

    def outbox(self, name: str) -> Path:
        """Of a rollout process; `name`: its number and when it began."""
        return self._shared(f"outbox-{name}")

    def _shared(self, name: str) -> Path:
        return Path("/dev/shm") / f"accerl-{self.run_id}-{name}"


def visible_gpus() -> list[str]:
    """GPUs of this run, as CUDA_VISIBLE_DEVICES entries: the user's own list (indices or UUIDs), else all that nvidia-smi names."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [entry.strip() for entry in chosen.split(",") if entry.strip() and entry.strip() != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [str(index) for index, line in enumerate(filter(lambda text: text.startswith("GPU "), listing.stdout.splitlines()))]


def gpu_memory_bytes(gpus: list[str]) -> int | None:
    """Memory of the smallest of these CUDA_VISIBLE_DEVICES entries; None where nvidia-smi does not know them all."""
    sizes = _of_each(gpus, "memory.total")
    return min(int(size) for size in sizes) << 20 if sizes and all(size.isdigit() for size in sizes) else None


def gpu_capability(gpus: list[str]) -> tuple[int, int] | None:
    """Compute capability of the oldest of these CUDA_VISIBLE_DEVICES entries; None where nvidia-smi does not know them all."""
    found = _of_each(gpus, "compute_cap")
    if not found or not all(text.replace(".", "", 1).isdigit() for text in found):
        return None
    major, _, minor = min(found, key=lambda text: [int(part) for part in text.split(".")]).partition(".")
    return int(major), int(minor or 0)


def _of_each(gpus: list[str], field: str) -> list[str] | None:
    """What nvidia-smi says of these CUDA_VISIBLE_DEVICES entries; None where it does not know them all."""
    if not gpus or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{field}", "--format=csv,noheader,nounits"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    rows = [row for row in ([cell.strip() for cell in line.split(",")] for line in listing.splitlines()) if len(row) == 3]
    found = [next((value for index, uuid, value in rows if gpu == index or uuid.startswith(gpu)), None) for gpu in gpus]
    return None if None in found else [value for value in found if value is not None]


@dataclass(frozen=True)
class GpuPlan:
    """CUDA_VISIBLE_DEVICES entries of each process."""

    trainer: list[str]
    """One entry a rank; all the same GPU when colocated; empty on cpu."""
    inference: list[list[str]]
    """One list an inference process, as long as --infer-tp-size; empty lists on cpu."""


def plan_gpus(gpus: list[str], *, placement: str, world_size: int, infer_size: int, infer_tp_size: int) -> GpuPlan:
    """Trainer ranks take the first GPUs, inference the next ones. `checks.check` has made sure that there are enough."""
    if placement == "cpu":
        return GpuPlan(trainer=[], inference=[[] for _ in range(infer_size)])
    if placement == "colocated":
        return GpuPlan(trainer=gpus[:1] * world_size, inference=[gpus[:1]] * infer_size)
    rest = gpus[world_size:]
    inference = [rest[index * infer_tp_size : (index + 1) * infer_tp_size] for index in range(infer_size)]
    return GpuPlan(trainer=gpus[:world_size], inference=inference)


def torchrun_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
