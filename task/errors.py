"""The error of this layer."""

__all__ = ["DataError"]


class DataError(ValueError):
    """A model, data set or partition that was asked for cannot be had."""
