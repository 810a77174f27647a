"""The error of this layer."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["DataError", "did_you_mean"]


class DataError(ValueError):
    """A model, data set or partition that was asked for cannot be had."""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``", did you mean 'x'?"`` for the nearest known name, nothing where none is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean {near[0]!r}?" if near else ""
