"""DenseNet-BC for small images: every layer reads the concatenation of all before it.

Densely Connected Convolutional Networks. Huang, Liu, van der Maaten, Weinberger. CVPR 2017.
https://arxiv.org/abs/1608.06993
"""

from torch import nn

from task.models.shapes import image_shape

__all__ = ["densenet"]


def densenet(
    shape: tuple[int, ...], classes: int, *, layers: tuple[int, ...] = (6, 6, 6), growth: int = 12
) -> nn.Module:
    """Build DenseNet-BC of depth 40 and growth 12 (0.18M parameters for 10 classes).

    Parameters
    ----------
    shape : (channels, height, width)
        Shape of one image, 8 x 8 pixels or more.
    classes : int
        Number of classes.
    layers : tuple of int
        Layers of each dense block; a block halves the resolution of the one before. (16, 16, 16)
        is the depth-100 network of the paper (0.77M).
    growth : int
        Channels that each layer adds.

    Raises
    ------
    DataError
        If ``shape`` is not that of an image.
    """
    channels, _, _ = image_shape("densenet", shape, least=8)
    from torchvision.models.densenet import DenseNet

    network: nn.Module = DenseNet(growth, layers, num_init_features=2 * growth, num_classes=classes)
    features = network.get_submodule("features")
    # The paper's networks for 32 x 32 pixels start with a plain 3 x 3 convolution.
    stem = nn.Conv2d(channels, 2 * growth, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight)
    features.register_module("conv0", stem)
    del features.norm0, features.relu0, features.pool0
    return network
