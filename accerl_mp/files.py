"""Small files that a reader finds whole, notes for which a full disk has room, and reading that never waits. Standard library only."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 30
"""Of a text that is read whole into memory: a list of two million games is far below."""


def open_file(path: Path) -> BinaryIO:
    """A regular file, to be read. OSError for everything else: a FIFO without a writer would hold the reader for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")  # the caller's `with` closes it


def read_file(path: Path) -> bytes:
    """All of a regular file, however large: a rank's saved samples may be gigabytes. OSError for everything else."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """All of a regular file in UTF-8. OSError for everything else and beyond MOST_BYTES, UnicodeDecodeError as `errors` says."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read().decode(errors=errors)


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old or the new content; after a power cut too. OSError leaves nothing of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:  # names of files need not be UTF-8
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_over(path: Path, text: str, size_bytes: int) -> None:
    """`text` and blanks up to `size_bytes`, over what is there: a full disk has room for that.

    A file of another size, or none, is replaced, and so it is for a longer text. OSError without room for that, and where the disk
    refuses all the same (one that copies on write).
    """
    content = text.encode(errors="surrogateescape").ljust(size_bytes)
    if len(content) > size_bytes or not path.is_file() or path.stat().st_size != size_bytes:
        write_atomically(path, content.decode(errors="surrogateescape"))
        return
    with path.open("r+b", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
