"""Files that are whole or not there, and folders that one run writes at a time."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["append", "owned", "sweep", "write_atomically"]

DRAFT = re.compile(r"\..+\.\d+")


def write_atomically(path: Path, content: bytes) -> Path:
    """Write so that ``path`` holds all of ``content`` or what it held before; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def append(path: Path, content: bytes) -> None:
    """Add ``content``, which is on the disk when this returns; a kill may leave a part of it."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove the drafts that killed processes left below ``folder``."""
    for path in folder.rglob(".*"):
        if DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keep other runs out of ``folder`` inside the block.

    The lock is the kernel's and ends with the process, however that ends; no file is left.

    Raises
    ------
    ValueError
        Another process owns the folder.
    """
    import fcntl  # not on Windows, where a client may run

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another run is still writing here; wait for its end, or end it first"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
