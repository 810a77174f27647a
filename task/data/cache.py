"""Arrays that took seconds to build, kept on disk so that the next process needs milliseconds.

In a simulation every worker loads the data, in a deployment every message is a new process. The
folder is ``$FEDSPARSE_CACHE``, or ``~/.cache/fedsparse``; it can be deleted at any time.
"""

import contextlib
import hashlib
import logging
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

__all__ = ["cached", "key", "source", "versions"]

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

_FORMAT = 1  # of the files below; a new number leaves older files unread
_DAMAGED = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


def versions(*packages: str) -> str:
    """Return ``"name==version"`` of installed packages, for use in a key."""
    return " ".join(f"{name}=={_version(name)}" for name in packages)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def source(*modules: str) -> bytes:
    """Return the text of modules beside this one, so that a key changes when the code does."""
    return b"\0".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in modules)


def key(name: str, *parts: str | bytes) -> str:
    """Return the key of a result: its name, the file format and a hash of all that shapes it.

    Parameters
    ----------
    name : str
        Readable beginning of the file's name, e.g. ``"digits"``.
    parts : str or bytes
        Options, :func:`versions`, input arrays, :func:`source`: whatever changes the result.

    Examples
    --------
    >>> key("digits", "numpy==2.0.0")
    'digits-v1-4f3da09fd2bb9c39'
    """
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big") + raw)  # ("ab", "c") differs from ("a", "bc")
    return f"{name}-v{_FORMAT}-{digest.hexdigest()[:16]}"


def cached(key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored under ``key``, or build and store them.

    A file that is damaged is built anew. Where the folder cannot be written, the arrays are
    built every time and a warning says so. Two processes may build at once: each writes a file
    of its own and renames it, so that nobody ever reads half a file.

    Parameters
    ----------
    key : str
        From :func:`key`.
    build : callable
        Returns arrays by name; called only if the file is missing or damaged.
    """
    try:
        path = _folder() / f"{key}.npz"
    except RuntimeError as error:  # no home directory
        logger.warning("no cache for %s: %s; set FEDSPARSE_CACHE to a folder", key, error)
        return build()
    stored = _read(path)
    if stored is not None:
        return stored
    arrays = build()
    _write(path, arrays)
    return arrays


def _folder() -> Path:
    return Path(os.environ.get("FEDSPARSE_CACHE") or "~/.cache/fedsparse").expanduser()


def _read(path: Path) -> Arrays | None:
    try:
        # Opened here, because np.load leaves a damaged file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGED as error:
        logger.warning("cache file %s cannot be read (%s): building it anew", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            # Uncompressed: reading is several times faster, and the files are small.
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("cache folder %s cannot be written: %s", path.parent, error)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
