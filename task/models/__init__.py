"""The networks that can be trained, by name.

A new one is a file with a function ``(shape, classes) -> nn.Module`` and a line in ``MODELS``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from task.errors import DataError, did_you_mean
from task.models.cnn import cnn
from task.models.densenet import densenet
from task.models.mobilenet import mobilenetv2
from task.models.resnet import resnet10, resnet18
from task.models.sensor import sensor
from task.models.text import PADDING, VOCABULARY, text
from task.models.transformer import transformer
from task.models.vgg import vgg11

__all__ = ["MODELS", "build", "example"]

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": cnn,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "vgg11": vgg11,
    "mobilenetv2": mobilenetv2,
    "densenet": densenet,
    "sensor": sensor,
    "text": text,
    "transformer": transformer,
}


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a freshly initialised network.

    Parameters
    ----------
    name : str
        Key in ``MODELS``.
    shape : tuple of int
        Shape of one input: (channels, height, width), (channels, time) or (length,).
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        If the name is unknown, the network cannot take ``shape``, or there is no class.
    """
    builder = _builder(name)
    if classes < 1:
        raise DataError(f"model {name!r} was asked for {classes} classes; give 1 or more.")
    return builder(shape, classes)


def example(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a batch of two valid inputs, the same at every call.

    Parameters
    ----------
    name : str
        Key in ``MODELS``.
    shape : tuple of int
        Shape of one input. Images and series give normal float32 noise; a shape of rank 1 means
        token ids, of which the second sequence ends in padding.

    Returns
    -------
    (2, *shape) tensor

    Raises
    ------
    DataError
        If the name is unknown.
    """
    _builder(name)
    source = torch.Generator().manual_seed(0)
    if len(shape) > 1:
        return torch.randn(2, *shape, generator=source)
    tokens = torch.randint(PADDING + 1, VOCABULARY, (2, *shape), generator=source)
    tokens[1, (shape[0] + 1) // 2 :] = PADDING
    return tokens


def _builder(name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    if name in MODELS:
        return MODELS[name]
    near = did_you_mean(name, MODELS, cutoff=0.0)
    raise DataError(f"model {name!r}: unknown{near} Known: {', '.join(MODELS)}.")
