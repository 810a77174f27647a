"""A 1-D convolutional network for series of sensor readings."""

from collections import OrderedDict

from torch import nn

from task.models.shapes import series_shape

__all__ = ["sensor"]


def sensor(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build three convolutions over time, averaged at the end (33,000 parameters).

    Parameters
    ----------
    shape : (channels, time)
        Shape of one series, 8 steps or more.
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        If ``shape`` is not that of a series.
    """
    channels, _ = series_shape("sensor", shape, least=8)
    return nn.Sequential(
        OrderedDict(
            _block(1, channels, 32)
            | _block(2, 32, 64)
            | _block(3, 64, 64)
            | {
                "pool": nn.AdaptiveAvgPool1d(1),
                "flatten": nn.Flatten(1),
                "classifier": nn.Linear(64, classes),
            }
        )
    )


def _block(number: int, inputs: int, outputs: int) -> dict[str, nn.Module]:
    return {
        f"conv{number}": nn.Conv1d(inputs, outputs, 5, stride=2, padding=2, bias=False),
        f"norm{number}": nn.BatchNorm1d(outputs),
        f"relu{number}": nn.ReLU(),
    }
