"""ResNet with the stem for small images.

Deep Residual Learning for Image Recognition. He, Zhang, Ren, Sun. CVPR 2016.
https://arxiv.org/abs/1512.03385
"""

from torch import nn

from task.models.shapes import image_shape

__all__ = ["resnet10", "resnet18"]


def resnet10(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build ResNet-10, one basic block a stage (4.90M parameters for 10 classes).

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
    return _resnet("resnet10", 1, shape, classes)


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build ResNet-18, two basic blocks a stage (11.17M parameters for 10 classes).

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
    return _resnet("resnet18", 2, shape, classes)


def _resnet(name: str, blocks: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = image_shape(name, shape, least=8)
    from torchvision.models.resnet import BasicBlock, ResNet

    network: nn.Module = ResNet(BasicBlock, [blocks] * 4, num_classes=classes)
    # The 7 x 7 stride-2 stem and its pooling would leave one pixel of a 32 x 32 image.
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network
