"""A real disk that is full: a small tmpfs, kept full by a thread in a block."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 14


class SmallDisk:
    """A tmpfs on `folder`, if this user may mount one."""

    def __init__(self, folder: Path, *, size: str) -> None:
        """`size` as mount takes it: "96m"."""
        self.folder = folder
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """To the last byte, and again whenever somebody makes room."""
        ballast, is_over = self.folder / "ballast", threading.Event()
        self._fill(ballast)
        filler = threading.Thread(target=self._keep_full, args=(ballast, is_over), daemon=True)
        filler.start()
        try:
            yield
        finally:
            is_over.set()
            filler.join()
            ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)

    def _keep_full(self, ballast: Path, is_over: threading.Event) -> None:
        while not is_over.wait(0.01):
            self._fill(ballast)

    def _fill(self, ballast: Path) -> None:
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(CHUNK_BYTES)):
                pass
