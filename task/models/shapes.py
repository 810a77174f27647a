"""Which input shapes a network can take: the checks that every builder starts with."""

from task.errors import DataError

__all__ = ["image_shape", "series_shape", "token_shape"]


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Return ``shape`` as (channels, height, width).

    Parameters
    ----------
    model : str
        Name of the network, for the message.
    shape : tuple of int
        Shape of one input.
    least : int, pixels
        Smallest height and width that leave the last feature map at least one pixel.

    Raises
    ------
    DataError
        If ``shape`` is not that of an image of at least ``least`` x ``least`` pixels.
    """
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < least:
        raise _mismatch(
            model, shape, f"images (channels, height, width) of {least} x {least} pixels or more"
        )
    return shape[0], shape[1], shape[2]


def series_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int]:
    """Return ``shape`` as (channels, time).

    Parameters
    ----------
    model : str
        Name of the network, for the message.
    shape : tuple of int
        Shape of one input.
    least : int
        Smallest number of time steps.

    Raises
    ------
    DataError
        If ``shape`` is not that of a series of at least ``least`` steps.
    """
    if len(shape) != 2 or shape[0] < 1 or shape[1] < least:
        raise _mismatch(model, shape, f"series (channels, time) of {least} steps or more")
    return shape[0], shape[1]


def token_shape(model: str, shape: tuple[int, ...]) -> int:
    """Return the sequence length of ``shape``.

    Parameters
    ----------
    model : str
        Name of the network, for the message.
    shape : tuple of int
        Shape of one input.

    Raises
    ------
    DataError
        If ``shape`` is not (length,) with at least one token.
    """
    if len(shape) != 1 or shape[0] < 1:
        raise _mismatch(model, shape, "token ids (length,)")
    return shape[0]


def _mismatch(model: str, shape: tuple[int, ...], accepted: str) -> DataError:
    return DataError(
        f"model {model!r} cannot take inputs of shape {tuple(shape)}; it takes {accepted}. "
        "Choose a model for this kind of data, or another data set."
    )
