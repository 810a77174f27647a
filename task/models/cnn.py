"""A small convolutional network that trains in seconds on one CPU core: the default model."""

from collections import OrderedDict
from math import ceil

from torch import nn

from task.models.shapes import image_shape

__all__ = ["cnn"]


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build three convolutions of stride 2 and one hidden layer (89,946 parameters at 32 x 32 x 3).

    Strides take the place of pooling: on a CPU one max-pool costs as much as the convolution
    before it. The hidden layer reads the last map whole, so it grows with the image.

    Parameters
    ----------
    shape : (channels, height, width)
        Shape of one image, 8 x 8 pixels or more.
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        If ``shape`` is not that of an image.
    """
    channels, height, width = image_shape("cnn", shape, least=8)
    pixels = ceil(height / 8) * ceil(width / 8)
    return nn.Sequential(
        OrderedDict(
            _block(1, channels, 16)
            | _block(2, 16, 32)
            | _block(3, 32, 64)
            | {
                "flatten": nn.Flatten(1),
                "hidden": nn.Linear(64 * pixels, 64),
                "relu4": nn.ReLU(),
                "classifier": nn.Linear(64, classes),
            }
        )
    )


def _block(number: int, inputs: int, outputs: int) -> dict[str, nn.Module]:
    return {
        f"conv{number}": nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        f"norm{number}": nn.BatchNorm2d(outputs),
        f"relu{number}": nn.ReLU(),
    }
