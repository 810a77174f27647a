"""What a network costs: parameters, bytes and FLOPs, at the widths it really has.

FLOPs are 2 x multiply-adds of convolutions and matrix products. Normalisation, activations,
pooling, embedding look-ups and additions count zero, as in the tables of the pruning literature.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from task.channels import Axis, ChannelMap
from task.modes import evaluation_mode

__all__ = ["activation_bytes", "flops", "mask_counted_parameters", "parameters", "state_bytes"]


def parameters(module: nn.Module) -> int:
    """Return the number of trainable entries of ``module``; a shared tensor counts once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of the tensors of ``state``, without names or framing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def flops(module: nn.Module, example: Tensor) -> tuple[int, int]:
    """Return the FLOPs of one sample: forward pass alone, forward and backward pass.

    Training takes about three forward passes; less, as the first layer needs no gradient of its
    input. Counted while one real sample passes in evaluation mode, which is several times faster
    than tracing without storage; the module, its running statistics and gradients and the random
    state stay as they are.

    Parameters
    ----------
    module : nn.Module
        The network, at any widths; frozen parameters need no gradient.
    example : (n, *shape) tensor, n >= 1
        Valid inputs on the device of the module; only the first sample is used.

    Returns
    -------
    (int, int), FLOPs
    """
    counter = FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward_flops},
    )
    learned = [p for p in module.parameters() if p.requires_grad]
    with evaluation_mode(module), torch.enable_grad(), counter:
        output = module(example[:1])
        forward = int(counter.get_total_flops())
        if learned and output.requires_grad:
            torch.autograd.grad(output.sum(), learned, allow_unused=True)
        return forward, int(counter.get_total_flops())


def activation_bytes(module: nn.Module, example: Tensor) -> int:
    """Return the bytes that the backward pass of one sample needs from its forward pass.

    What autograd saves, each storage once, the network's own tensors left out. Counted in
    evaluation mode; dropout saves its mask in addition.

    Parameters
    ----------
    module, example
        As for `flops`.

    Returns
    -------
    int, bytes
    """
    own = {t.untyped_storage().data_ptr() for t in module.state_dict(keep_vars=True).values()}
    saved: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with evaluation_mode(module), torch.enable_grad(), hooks:
        output = module(example[:1].clone())
        del output
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)


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
