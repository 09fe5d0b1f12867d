"""Where things are: the run folder's files, and which GPUs which process gets.

Standard library only (the supervisor imports it before anything else).
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Every path of a run, from its folder alone, so that two runs on one machine never meet."""

    run_dir: Path

    @property
    def run_id(self) -> str:
        """The same for the same folder: the next start finds what a killed run left."""
        return hashlib.blake2s(str(self.run_dir.resolve()).encode(), digest_size=5).hexdigest()

    @property
    def args(self) -> Path:
        return self.run_dir / "args.json"

    @property
    def tokenizer(self) -> Path:
        """Folder with tokenizer.json, chat_template.jinja and meta.json, for processes without torch."""
        return self.run_dir / "tokenizer"

    @property
    def stop(self) -> Path:
        """Exists once the user has asked the run to end."""
        return self.run_dir / "stop"

    def log(self, role: str, index: int) -> Path:
        return self.run_dir / "logs" / f"{role}-{index}.log"

    @property
    def sockets(self) -> Path:
        """Folder (0700) of the ipc sockets. Not in the run folder: a socket's path must fit in 107 bytes."""
        return Path(tempfile.gettempdir()) / f"accerl-{os.getuid()}-{self.run_id}"

    @property
    def health(self) -> Path:
        return self._shared("health")

    @property
    def board(self) -> Path:
        return self._shared("board")

    def ring(self, rank: int) -> Path:
        return self._shared(f"ring-{rank}")

    def _shared(self, name: str) -> Path:
        return Path("/dev/shm") / f"accerl-{self.run_id}-{name}"
