"""Data sets by name; one file each, one line in the table."""

import functools
from collections.abc import Callable

from task.data import digits
from task.data.dataset import DataSet, Samples
from task.errors import DataError, did_you_mean

__all__ = ["DATASETS", "DataSet", "Samples", "load"]

DATASETS: dict[str, Callable[[], DataSet]] = {
    "digits": digits.load,
}


# Workers of a simulation answer many messages. Samples are never changed in place.
@functools.cache
def load(name: str) -> DataSet:
    """Return a data set of the table; the same object when asked again in this process.

    Raises
    ------
    DataError
        If the table has no such name.
    """
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise DataError(f"unknown data set {name!r}{hint}; known: {', '.join(DATASETS)}")
    return DATASETS[name]()
