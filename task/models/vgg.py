"""VGG with batch normalisation and a single linear layer, for small images.

Very Deep Convolutional Networks for Large-Scale Image Recognition. Simonyan, Zisserman. ICLR 2015.
https://arxiv.org/abs/1409.1556
"""

from collections import OrderedDict

from torch import nn

from task.models.shapes import image_shape

__all__ = ["vgg11"]

# Channels of each convolution, one row between two poolings.
_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build VGG-11 with batch normalisation (9.23M parameters for 10 classes).

    Parameters
    ----------
    shape : (channels, height, width)
        Shape of one image, 32 x 32 pixels or more (five poolings).
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        If ``shape`` is not that of a large enough image.
    """
    inputs, _, _ = image_shape("vgg11", shape, least=32)
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for outputs in stage:
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(1),
            classifier=nn.Linear(512, classes),
        )
    )
