"""Data set ``folder``: images in a folder of their owner, who alone has them.

    <root>/<domain>/<class>/image
    <root>/<class>/image           one domain: the only one agreed on, or the one named as <root>

What all sides must know of folders that they cannot see is an :class:`Agreement`.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from task.data import cache
from task.data.dataset import DataSet, Samples
from task.errors import DataError

__all__ = ["NAME", "Agreement", "Pictures", "data_set", "folders", "read"]

NAME = "folder"

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# What Pillow may try, whatever a file is called: formats that run no program of their own.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


@dataclass(frozen=True)
class Agreement:
    """What a federation has agreed on about its images.

    Parameters
    ----------
    classes, domains : tuple of str
        Names in index order, no name in both.
    channels, side : int
        3 (colour) or 1 (grey); pixels of height and width.
    """

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    channels: int
    side: int


@dataclass(frozen=True)
class Pictures:
    """What a folder holds.

    Parameters
    ----------
    samples : Samples
        Those that can be read, sorted by path.
    skipped : tuple of str
        The other files, each with the reason.
    """

    samples: Samples
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    path: str  # within the root
    domain: int
    label: int
    stamp: tuple[int, int]  # size and time of change


def data_set(agreement: Agreement) -> DataSet:
    """Return the data set as it is known without seeing any folder: names and shape, no sample."""
    side = agreement.side
    label = torch.zeros(0, dtype=torch.int64)
    none = Samples(torch.zeros(0, agreement.channels, side, side, dtype=torch.uint8), label, label)
    return DataSet(NAME, agreement.domains, agreement.classes, train=none, test=none)


def folders(path: Path) -> list[Path]:
    """Return the folders in ``path``, links to folders included, hidden ones not, by name.

    Raises
    ------
    DataError
        ``path`` is no folder, or may not be read.
    """
    try:
        found = [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return sorted(entry for entry in found if not entry.name.startswith("."))


def read(root: Path, agreement: Agreement) -> Pictures:
    """Read the images under ``root``; files that cannot be read are skipped and told.

    The middle square of each image is scaled to ``side``; one that has that size keeps its pixels.
    They are decoded once: later calls, and later processes, take them from :mod:`task.data.cache`
    until a file is added, removed or changed.

    Raises
    ------
    DataError
        A folder is there that is no class and no domain of the agreement, a class folder holds
        no image that can be read, or there is no class folder.
    """
    files = tuple(_tree(root, agreement))
    shape = (agreement.channels, agreement.side)
    listing = "\0".join(f"{file.path}\0{file.stamp}" for file in files)
    text = cache.source("folder")
    key = cache.key(NAME, str(root), listing, str(shape), cache.versions("pillow", "numpy"), text)
    stored = _decoded(key, root, tuple(file.path for file in files), shape)
    skipped = tuple(str(reason) for reason in stored["skipped"])
    readable = [files[row] for row in stored["rows"]]
    _require_every_class(root, files, readable, skipped)
    label, domain = ([getattr(f, of) for f in readable] for of in ("label", "domain"))
    x = torch.from_numpy(stored["x"])
    return Pictures(Samples(x, torch.tensor(label), torch.tensor(domain)), skipped)


def _tree(root: Path, agreement: Agreement) -> Iterator[_File]:
    """Yield every image, sorted by path."""
    for domain, branch in _domains(root, agreement):
        classes = folders(branch)
        if not classes:
            raise DataError(f"{branch}: domain {branch.name!r} holds no class folder; remove it")
        for folder in classes:
            if folder.name not in agreement.classes:
                raise _unknown(folder, "class", agreement.classes)
            paths = sorted(_images(folder))
            if not paths:
                raise DataError(f"{folder}: class {folder.name!r} holds no image; remove it")
            for path in paths:
                name = path.relative_to(root).as_posix()
                yield _File(name, domain, agreement.classes.index(folder.name), _stamp(path))


def _domains(root: Path, agreement: Agreement) -> list[tuple[int, Path]]:
    """Return (domain, folder that holds its classes) of everything under ``root``."""
    found = folders(root)
    if not found:
        raise DataError(f"{root}: no folders; wanted are <domain>/<class>/image or <class>/image")
    classes = [folder for folder in found if folder.name in agreement.classes]
    if not classes:
        for folder in found:
            if folder.name not in agreement.domains:
                raise _unknown(folder, "domain", (*agreement.domains, *agreement.classes))
        return [(agreement.domains.index(folder.name), folder) for folder in found]
    if len(agreement.domains) == 1:
        return [(0, root)]
    if root.name in agreement.domains:
        return [(agreement.domains.index(root.name), root)]
    raise DataError(
        f"{root}: holds class folders ({classes[0].name}), and no name says of which domain; put "
        f"them into a folder of that name, one of {', '.join(agreement.domains)}"
    )


def _unknown(folder: Path, what: str, known: Sequence[str]) -> DataError:
    return DataError(
        f"{folder}: {folder.name!r} is no {what} of this federation; known: {', '.join(known)}"
    )


def _images(folder: Path) -> Iterator[Path]:
    """Yield images at any depth; links to files count, links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}")

    for place, inner, names in os.walk(folder, onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield Path(place, name)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:  # a link to nothing: skipped when it is opened
        return -1, -1
    return about.st_size, about.st_mtime_ns


@functools.lru_cache(maxsize=128)
def _decoded(
    key: str, root: Path, paths: tuple[str, ...], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    return cache.cached(key, lambda: _decode(root, paths, *shape))


def _decode(root: Path, paths: tuple[str, ...], channels: int, side: int) -> dict[str, np.ndarray]:
    """Return ``x`` (n, channels, side, side) uint8, the ``rows`` of ``paths`` read, ``skipped``."""
    x = np.empty((len(paths), channels, side, side), dtype=np.uint8)
    rows, skipped = list[int](), list[str]()
    for row, path in enumerate(paths):
        try:
            x[len(rows)] = _picture(root / path, channels, side)
            rows.append(row)
        except Exception as error:  # what damaged bytes do to a decoder can be any error
            skipped.append(f"{path} ({type(error).__name__}: {error})")
    index = np.array(rows, dtype=np.int64)
    return {"x": x[: len(rows)], "rows": index, "skipped": np.array(skipped, dtype=str)}


def _picture(path: Path, channels: int, side: int) -> np.ndarray:
    from PIL import Image, ImageOps

    with Image.open(path, formats=FORMATS) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "F":
            raise ValueError("floating-point pixels have no agreed range")
        if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB")
        square = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    return np.asarray(square).reshape(side, side, channels).transpose(2, 0, 1)


def _require_every_class(
    root: Path, files: Sequence[_File], readable: Sequence[_File], skipped: Sequence[str]
) -> None:
    left = Counter((file.domain, file.label) for file in readable)
    for file in files:
        if not left[file.domain, file.label]:
            folder = (root / file.path).parent
            raise DataError(
                f"{folder}: class {folder.name!r} holds no image that can be read; "
                f"{len(skipped)} files were skipped, the first: {skipped[0]}"
            )
