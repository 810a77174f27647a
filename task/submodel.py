"""Cut a network to the channels that are kept, and put a cut one back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from task.channels import ChannelMap, Ints, Kept, State
from task.errors import DataError
from task.skeleton import copy_around, correct

__all__ = ["block", "extract", "lengths", "scatter", "slice_module", "zero_masked"]

Coordinates = tuple[Ints | None, ...]


def extract(state: State, cmap: ChannelMap, kept: Kept) -> State:
    """Copy the entries of the kept channels out of a full state.

    Parameters
    ----------
    state : tensor name -> tensor of the full network
    cmap : ChannelMap
    kept : group -> (k,) sorted channel indices; a group not named stays whole

    Returns
    -------
    State
        The same names; every axis that carries channels is as long as what is kept of it.

    Raises
    ------
    DataError
        If `kept` does not fit the map, or a tensor is unknown to it.
    """
    mask = cmap.mask(kept)
    return {name: _cut(tensor, cmap.stay(name, mask)) for name, tensor in state.items()}


def _cut(tensor: Tensor, coordinates: Coordinates) -> Tensor:
    """Select along every axis; always a copy that owns its memory."""
    cut = tensor.detach()
    for axis, index in enumerate(coordinates):
        if index is not None and len(index) < cut.shape[axis]:
            cut = cut.index_select(axis, torch.from_numpy(index).to(cut.device))
    return cut.clone() if cut.data_ptr() == tensor.data_ptr() else cut


def scatter(sub: State, cmap: ChannelMap, kept: Kept, into: State) -> None:
    """Write the entries of a cut state to their places in a full one, in place.

    Parameters
    ----------
    sub : tensor name -> tensor of the cut network
    cmap : ChannelMap of the full network
    kept : group -> (k,) what `sub` was cut to
    into : tensor name -> tensor of the full network; entries that `sub` lacks stay as they are

    Raises
    ------
    DataError
        If a tensor has another shape than `kept` gives it.
    """
    mask = cmap.mask(kept)
    for name, tensor in sub.items():
        coordinates = cmap.stay(name, mask)
        if name not in into:
            raise DataError(f"{name} is not in the state to write into; give the full state")
        target = into[name].detach()
        shape = lengths(target.shape, coordinates)
        if tuple(tensor.shape) != shape:
            raise DataError(
                f"{name} has shape {tuple(tensor.shape)}; cut to these channels it must be "
                f"{shape}: give scatter the kept channels the submodel was made with"
            )
        target[block(target.shape, coordinates, target.device)] = tensor.detach().to(target)


def lengths(shape: Sequence[int], coordinates: Coordinates) -> tuple[int, ...]:
    """Return the shape of a tensor cut to ``coordinates``, one per axis, None = the whole axis."""
    sizes = zip(coordinates, shape, strict=True)
    return tuple(n if index is None else len(index) for index, n in sizes)


def block(
    shape: Sequence[int], coordinates: Coordinates, device: torch.device | None = None
) -> Any:
    """Return the index of a block of entries of a tensor of ``shape``; ``...`` if it is all of it.

    Axes in front of the last one that is cut are all spelt out: index arrays must be neighbours,
    else indexing moves their axes to the front.
    """
    cut = [d for d, index in enumerate(coordinates) if index is not None]
    if not cut:
        return ...
    depth = cut[-1] + 1
    rows = []
    for d in range(depth):
        index = coordinates[d]
        row = torch.arange(shape[d]) if index is None else torch.from_numpy(index)
        rows.append(row.to(device).reshape(-1, *[1] * (depth - 1 - d)))
    return tuple(rows)


def zero_masked(state: State, cmap: ChannelMap, kept: Kept) -> State:
    """Keep all shapes and set what belongs to dropped channels to zero.

    Weights, biases, gamma and beta of a dropped channel become zero, and so do the columns of its
    readers: a convolution set to zero in front of a BatchNorm would still give
    beta - gamma * mean / sigma. Running statistics stay, since a variance of zero is no variance.

    Parameters
    ----------
    state : tensor name -> tensor of the full network
    cmap : ChannelMap
    kept : group -> (k,) channels that keep their values

    Returns
    -------
    State
        New tensors of the same shapes.
    """
    mask = cmap.mask(kept)
    zeroed = {}
    for name, tensor in state.items():
        zeroed[name] = tensor.detach().clone()
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            continue
        for axis, index in enumerate(cmap.stay(name, mask)):
            if index is not None and len(index) < tensor.shape[axis]:
                gone = np.setdiff1d(np.arange(tensor.shape[axis]), index)
                zeroed[name].index_fill_(axis, torch.from_numpy(gone).to(tensor.device), 0)
    return zeroed


def slice_module(
    model: nn.Module, cmap: ChannelMap, kept: Kept, state: State | None = None
) -> nn.Module:
    """Build the physically smaller network.

    The modules are copied, their tensors cut on the way, so that no full tensor is ever copied;
    then attributes that repeat a shape (`in_channels`, `num_features`, …) are corrected.

    Parameters
    ----------
    model : nn.Module
        The full network; it is left as it is.
    cmap : ChannelMap of `model`
    kept : group -> (k,) channels to keep
    state : tensor name -> tensor, optional
        Values of the small network, in its shapes; without it they are cut out of `model`.

    Returns
    -------
    nn.Module
        The same class, in the same train or eval mode.

    Raises
    ------
    DataError
        If a tensor of `state` is missing or has another shape than `kept` gives it.
    """
    mask = cmap.mask(kept)
    memo: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in memo or not isinstance(tensor, Tensor):
            continue
        coordinates = cmap.stay(name, mask)
        if state is None:
            small = _cut(tensor, coordinates)
        else:
            small = _given(state, name, lengths(tensor.shape, coordinates)).to(tensor).clone()
        if isinstance(tensor, nn.Parameter):
            small = nn.Parameter(small, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = small
    sliced = copy_around(model, memo)
    alive = np.append(mask, True)
    widths = {g.module: int(alive[cmap.position(g.group, g.channel)].sum()) for g in cmap.gates}
    for (name, module), full in zip(sliced.named_modules(), model.modules(), strict=True):
        correct(module, full, widths.get(name))
    return sliced


def _given(state: State, name: str, shape: tuple[int, ...]) -> Tensor:
    found = tuple(state[name].shape) if name in state else "nothing"
    if found != shape:
        raise DataError(
            f"state[{name!r}] has shape {found}; a network cut to these channels needs {shape}: "
            "give a state that was extracted with the same kept channels"
        )
    return state[name].detach()
