"""What a network costs: parameters, bytes and FLOPs, at the widths it really has.

FLOPs are 2 x multiply-adds of convolutions and matrix products. Normalisation, activations,
pooling, embedding look-ups and additions count zero, as in the tables of the pruning literature.
"""

import copy
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from task.channels import Axis, ChannelMap

__all__ = [
    "forward_flops",
    "mask_counted_parameters",
    "parameters",
    "state_bytes",
    "training_flops",
]


def parameters(module: nn.Module) -> int:
    """Return the number of trainable entries of ``module``; a shared tensor counts once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of the tensors of ``state``, without names or framing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def forward_flops(module: nn.Module, example: Tensor) -> int:
    """Return the FLOPs of one forward pass of one sample.

    Counted on a copy without storage, in evaluation mode: ``module``, its running statistics and
    the random state stay as they are, and a large network costs no more memory than a small one.

    Parameters
    ----------
    module : nn.Module
        The network, at any widths.
    example : (n, *shape) tensor, n >= 1
        Valid inputs; only shape and type of the first sample matter.

    Returns
    -------
    int, FLOPs

    Raises
    ------
    RuntimeError
        If the network looks at values (``if x.max() > 0``): its cost depends on the data.
    """
    network, sample = _without_storage(module, example)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(sample)
    return int(counter.get_total_flops())


def training_flops(module: nn.Module, example: Tensor) -> int:
    """Return the FLOPs of one forward and backward pass of one sample.

    About three forward passes; less, as the first layer needs no gradient of its input.

    Parameters
    ----------
    module : nn.Module
        The network, at any widths; frozen parameters need no gradient.
    example : (n, *shape) tensor, n >= 1
        Valid inputs; only shape and type of the first sample matter.

    Returns
    -------
    int, FLOPs
    """
    network, sample = _without_storage(module, example)
    counter = FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward_flops},
    )
    with torch.enable_grad(), counter:
        network(sample).sum().backward()
    return int(counter.get_total_flops())


def mask_counted_parameters(cmap: ChannelMap, module: nn.Module, keep: float) -> int:
    """Return the parameters that papers report when they multiply a mask instead of slicing.

        keep x prunable + fixed

    where an entry is prunable if any of its axes carries a channel of some group. Slicing removes
    channels on both the writing and the reading axis, so about keep^2 of the entries stay:
    ``parameters`` of the sliced network says what is stored, sent and computed; this number is for
    comparison with published tables.

    Parameters
    ----------
    cmap : ChannelMap
        The channels of ``module``.
    module : nn.Module
        The network at full width.
    keep : float, fraction
        Fraction of the channels that is kept, 0 to 1.

    Returns
    -------
    int, trainable entries
    """
    fixed = sum(
        prod(_fixed(axis, size) for axis, size in zip(cmap.axes[name], p.shape, strict=True))
        for name, p in module.named_parameters()
        if p.requires_grad
    )
    return round(keep * (parameters(module) - fixed)) + fixed


def _convolution_backward_flops(
    output: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    # torch 2.14 counts the weight gradient of a grouped convolution ``groups`` times over
    # (pytorch#183405). Each gradient takes as many multiply-adds as the convolution itself.
    transposed, (of_input, of_weight, _of_bias) = rest[4], rest[7]
    batch, _channels, *positions = inputs if transposed else output
    return 2 * (int(of_input) + int(of_weight)) * batch * prod(positions) * prod(weight)


def _fixed(axis: Axis | None, size: int) -> int:
    return size if axis is None else int((axis.group < 0).sum())


def _without_storage(module: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    tensors = (*module.parameters(), *module.buffers())
    # deepcopy takes what it finds in the memo: full tensors are never copied.
    memo = {id(tensor): _hollow(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo).eval(), example[:1].to("meta")


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
