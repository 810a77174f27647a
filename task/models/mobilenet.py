"""MobileNetV2 with strides for small images.

MobileNetV2: Inverted Residuals and Linear Bottlenecks. Sandler, Howard, Zhu, Zhmoginov, Chen.
CVPR 2018. https://arxiv.org/abs/1801.04381
"""

from torch import nn

from task.models.shapes import image_shape

__all__ = ["mobilenetv2"]

# (expansion, channels, blocks, first stride) of table 2, where the stem and the second row have
# stride 2: here they have stride 1, so that 32 x 32 pixels end as 4 x 4 instead of one.
_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


def mobilenetv2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build MobileNetV2 at width 1 (2.24M parameters for 10 classes).

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
    channels, _, _ = image_shape("mobilenetv2", shape, least=8)
    from torchvision.models.mobilenetv2 import MobileNetV2

    network: nn.Module = MobileNetV2(classes, inverted_residual_setting=_STAGES, dropout=0.0)
    stem = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    network.get_submodule("features.0").register_module("0", stem)
    return network
