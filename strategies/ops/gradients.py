"""Gradients of single samples with respect to channels, all samples of a batch in one pass.

A channel is represented by a gate that multiplies it behind its normalisation (`task.gates`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.errors import ShapeError
from task.channels import FIXED, ChannelMap, GatePoint
from task.gates import gated
from task.modes import evaluation_mode

__all__ = ["Pruning", "evaluating", "first_parameter", "gate_gradients", "prune", "unpruned"]

CLOSED = 2.0**-20
"""Gate of a pruned channel whose weights are present.

At exactly 0 autograd takes the derivative of ReLU to be 0, and the channel would seem to have no
influence however much it matters. Any positive value gives the one-sided derivative at 0+; this one
changes what the other channels see by a millionth, and floating point loses no digits by it.
"""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, without autocast; restore all of it afterwards.

    Inside, BatchNorm works on copies of its statistics, so that a graph built here stays valid when
    a later training step updates them in place.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    statistics = [(m, name, b) for m in norms for name, b in m.named_buffers(recurse=False)]
    try:
        for norm, name, buffer in statistics:
            setattr(norm, name, buffer.clone())
        device = first_parameter(model).device.type
        with evaluation_mode(model), torch.autocast(device, enabled=False):
            yield
    finally:
        for norm, name, buffer in statistics:
            setattr(norm, name, buffer)


def first_parameter(model: nn.Module) -> Tensor:
    """Return a parameter that tells device and dtype of the network."""
    return next(model.parameters())


@dataclass(frozen=True)
class Pruning:
    """How a network that holds the weights of pruned channels runs as if it did not.

    Parameters
    ----------
    values : mapping of group to (W,) tensor
        The gates: 1, or `CLOSED` for a pruned channel.
    inner, outer : ChannelMap
        Two parts of the places where gates act. A channel in front of a depthwise layer passes one
        gate before and one behind it. Only the outer one is closed: with both closed the depthwise
        layer would see nothing, and the derivative would be that of its bias.
    """

    values: Mapping[str, Tensor]
    inner: ChannelMap
    outer: ChannelMap

    def run(self, model: nn.Module, x: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """Return the logits under ``gates``, which equal ``values`` but may need gradients."""
        # What comes from in front of a closed gate arrives times its value: undone by the division.
        inner = {name: gate / self.values[name] for name, gate in gates.items()}
        with gated(model, self.inner, inner), gated(model, self.outer, gates):
            logits: Tensor = model(x)
        return logits


def unpruned(model: nn.Module, cmap: ChannelMap) -> Pruning:
    """Return the pruning that closes nothing.

    Gates are float32 at least: gradients of well classified samples vanish in half precision.
    """
    like = first_parameter(model)
    dtype = torch.promote_types(like.dtype, torch.float32)
    ones = {
        n: torch.ones(width, device=like.device, dtype=dtype) for n, width in cmap.groups.items()
    }
    return Pruning(ones, replace(cmap, gates=()), cmap)


def prune(model: nn.Module, cmap: ChannelMap, closed: Mapping[str, Tensor], x: Tensor) -> Pruning:
    """Work out where pruned channels have to be closed.

    Parameters
    ----------
    closed : mapping of group to (W,) bool tensor
        The pruned channels; groups not named are whole.
    x : (N, *shape) tensor
        A few inputs, on which the outcome is checked.

    Returns
    -------
    Pruning

    Raises
    ------
    ShapeError
        ``closed`` names an unknown group or has the wrong width.
    """
    everywhere = unpruned(model, cmap)
    for name, shut in closed.items():
        if shut.shape != (cmap.groups.get(name, -1),):
            raise ShapeError(
                f"closed[{name!r}]: shape {tuple(shut.shape)}; the groups and their widths are "
                f"{cmap.groups}"
            )
        everywhere.values[name][shut.to(everywhere.values[name].device)] = CLOSED
    behind = Pruning(everywhere.values, *_split_chains(cmap))
    # Where the input of a depthwise layer is read elsewhere too, every gate has to be closed.
    with torch.no_grad():
        found, wanted = (way.run(model, x, way.values) for way in (behind, everywhere))
    return behind if torch.allclose(found, wanted, rtol=1e-3, atol=1e-4) else everywhere


def _split_chains(cmap: ChannelMap) -> tuple[ChannelMap, ChannelMap]:
    """Part the gates of groups with a depthwise layer: all but the last one, and the rest."""
    depthwise = [
        axis.group
        for axes in cmap.axes.values()
        for axis in axes
        if axis is not None and axis.role == "depthwise"
    ]
    last = np.full(len(cmap.groups), -1)
    for place, point in enumerate(cmap.gates):
        last[point.group[point.group != FIXED]] = place
    chained = np.isin(np.arange(len(last)), np.concatenate([*depthwise, [FIXED]]))
    last[~chained] = -1
    inner: list[GatePoint] = []
    outer: list[GatePoint] = []
    for place, point in enumerate(cmap.gates):
        before = np.append(place < last, False)[point.group]
        inner.append(replace(point, group=np.where(before, point.group, FIXED)))
        outer.append(replace(point, group=np.where(before, FIXED, point.group)))
    return replace(cmap, gates=tuple(inner)), replace(cmap, gates=tuple(outer))


def gate_gradients(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    pruning: Pruning,
    *,
    create_graph: bool = False,
) -> Tensor:
    """Return the gradient of each sample's cross-entropy with respect to the channels' gates.

    Every sample has its own row of gates, and in eval mode samples do not see each other: one
    backward pass gives exactly what one pass per sample would give.

    Parameters
    ----------
    x, y : (N, *shape) tensor, (N,) int64 tensor
    pruning : Pruning
        Where the gates are and how far they are open.
    create_graph : bool
        Whether the result can be differentiated with respect to the weights.

    Returns
    -------
    (N, C) tensor
    """
    gates = {
        name: value.repeat(len(x), 1).requires_grad_() for name, value in pruning.values.items()
    }
    # The sum keeps each sample's own gradient; the mean would divide all of them by N.
    loss = cross_entropy(pruning.run(model, x, gates), y, reduction="sum")
    return torch.cat(
        torch.autograd.grad(loss, list(gates.values()), create_graph=create_graph), dim=1
    )
