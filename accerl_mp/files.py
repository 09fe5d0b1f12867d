"""Small files that a reader finds whole, and notes for which a full disk has room. Standard library only."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old or the new content; after a power cut too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def write_over(path: Path, text: str, size_bytes: int) -> None:
    """`text` and blanks up to `size_bytes`, over what is there: a full disk has room for that.

    A file of another size, or none, is replaced, and so it is for a longer text. OSError without room for that, and where the disk
    refuses all the same (one that copies on write).
    """
    content = text.encode().ljust(size_bytes)
    if len(content) > size_bytes or not path.is_file() or path.stat().st_size != size_bytes:
        write_atomically(path, content.decode())
        return
    with path.open("r+b", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
