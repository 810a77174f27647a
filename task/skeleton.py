"""Copies of a network around other tensors, and the attributes that must follow their shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

__all__ = ["copy_around", "correct"]


def copy_around(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Copy modules and buffers, but put given tensors in place of their own.

    Parameters
    ----------
    model : nn.Module
        Left as it is.
    tensors : id of a parameter or buffer of `model` -> tensor to use instead of a copy

    Returns
    -------
    nn.Module
        Every hook and attribute is copied, no replaced tensor ever is.
    """
    memo: dict[int, Any] = dict(tensors)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, dict) and not value:  # a dozen empty ones per module take 2/3 of
                memo[id(value)] = copy.copy(value)  # the time of a deep copy
    return copy.deepcopy(model, memo)


def correct(module: nn.Module, full: nn.Module, width: int | None) -> None:
    """Set the attributes of a cut module by the shapes of its tensors.

    Parameters
    ----------
    module : nn.Module
        The cut module, its tensors already small.
    full : nn.Module
        The module it was made from.
    width : int or None
        Channels left in its output if gates sit there: norms without tensors have no other sign.
    """
    one: Any = module
    if isinstance(module, _ConvNd) and isinstance(full, _ConvNd):
        _correct_convolution(module, full)
    elif isinstance(module, nn.Linear):
        one.out_features, one.in_features = module.weight.shape
    elif isinstance(module, nn.Bilinear):
        one.out_features, one.in1_features, one.in2_features = module.weight.shape
    elif isinstance(module, _NormBase):
        tensor = module.weight if module.weight is not None else module.running_mean
        one.num_features = len(tensor) if tensor is not None else width or module.num_features
    elif isinstance(module, nn.GroupNorm):
        channels = len(module.weight) if module.affine else width or module.num_channels
        one.num_groups = max(1, module.num_groups * channels // module.num_channels)
        one.num_channels = channels
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        one.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        one.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        one.num_parameters = len(module.weight)


def _correct_convolution(module: _ConvNd, full: _ConvNd) -> None:
    """Depthwise layers lose groups, grouped ones only positions inside their groups."""
    rows, columns = module.weight.shape[:2]
    if isinstance(module, _ConvTransposeNd):
        module.in_channels, module.out_channels = rows, columns * module.groups
        return
    if full.groups > 1 and full.groups == full.in_channels:
        module.groups = full.groups * rows // full.out_channels
    module.in_channels, module.out_channels = columns * module.groups, rows
