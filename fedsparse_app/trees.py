"""An embedded data set as folders of images: one folder per client, one for the server."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedsparse_app.config import Config
from fedsparse_app.shares import TEST
from task.data.dataset import DataSet, Samples
from task.data.partition import counts, partition
from task.errors import DataError

__all__ = ["commands", "write_trees"]


def write_trees(out: Path, data: DataSet, config: Config) -> dict[str, dict[str, int]]:
    """Write the images of every client, and the server's test set, all or nothing.

    A file is ``<client>/<domain>/<class>/<row>.png``, its row that of the image in the data set.

    Parameters
    ----------
    out : Path
        A folder that is not there yet, or empty.
    data : DataSet
        Of images.
    config : Config
        Its ``partition`` and ``federation.clients`` say who gets what.

    Returns
    -------
    dict of str to dict of str to int
        Images per domain of every folder written.

    Raises
    ------
    DataError
        ``out`` holds something, the data are no images, or cannot be split like that.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: is there and not empty; give a new folder")
    if {"'", '"', "\\"} & set(str(out)):
        raise DataError(f"{out}: the options to use cannot be typed with quotes; take another name")
    clients = config.federation.clients
    parts = partition(data.train, config.partition, clients)
    digits = max(3, len(str(clients - 1)))
    trees = {f"client-{i:0{digits}d}": (data.train, part) for i, part in enumerate(parts)}
    trees[TEST] = data.test, np.arange(len(data.test))
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        for name, (samples, rows) in trees.items():
            _write(draft / name, data, samples, rows)
        os.replace(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    names = data.domains, data.classes
    return {name: counts(*tree, *names)["domains"] for name, tree in trees.items()}


def commands(out: Path, data: DataSet, trees: Iterable[str]) -> str:
    """Return what to type to run on the ``trees`` in ``out``, in simulation and on devices."""
    names = [name for name in trees if name != TEST]
    channels, side, _ = data.shape
    options = {
        "data.name": "folder",
        "data.classes": ",".join(data.classes),
        "data.domains": ",".join(data.domains),
        "data.size": side,
        "data.channels": channels,
        "data.test-dir": str(out / TEST),
        "federation.clients": len(names),
    }
    typed = " ".join(f"{key}={value!r}" for key, value in options.items())
    own = "\n".join(
        f'  flower-supernode ... --node-config \'data-dir="{out / name}" client-id="{name}"\''
        for name in names
    )
    return (
        f"in simulation:\n  flwr run . --stream -c \"{typed} data.dir='{out}'\"\n"
        f"on devices, one of these on each, and the run:\n{own}\n"
        f'  flwr run . <superlink> --stream -c "{typed}"'
    )


def _write(root: Path, data: DataSet, samples: Samples, rows: np.ndarray) -> None:
    from PIL import Image

    for row in rows.tolist():
        domain, label = data.domains[int(samples.domain[row])], data.classes[int(samples.y[row])]
        folder = root / domain / label
        folder.mkdir(parents=True, exist_ok=True)
        pixels = samples.x[row].permute(1, 2, 0).numpy()
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(
            folder / f"{row:04d}.png"
        )
