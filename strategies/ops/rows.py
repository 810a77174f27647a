"""Channels as rows: the coordinates of each channel on an axis, moved and compared."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.errors import ShapeError
from strategies.ops.plans import Plan
from task.channels import FIXED, Axis, ChannelMap, Ints, State

__all__ = [
    "distances",
    "distinct_rows",
    "groups_of",
    "hand_on",
    "move_axis",
    "norm_tensors",
    "rows_of",
    "sketch",
    "writers_of",
]

WEIGHTS, VECTORS = ("out", "depthwise"), ("norm", "bias")
STATISTICS = ("running_mean", "running_var")
THIN = 16  # coordinates


def groups_of(axis: Axis) -> list[int]:
    """Return the groups that have channels on an axis, by number."""
    low, high = int(axis.group.min()), int(axis.group.max())
    found = [low] if low == high else np.unique(axis.group).tolist()
    return [number for number in found if number != FIXED]


def writers_of(cmap: ChannelMap, *, vectors: bool = True) -> list[list[tuple[str, int]]]:
    """Per group, the tensors and axes whose rows tell its channels apart."""
    writers: list[list[tuple[str, int]]] = [[] for _ in cmap.groups]
    roles = WEIGHTS + VECTORS if vectors else WEIGHTS
    for name, axes in cmap.axes.items():
        for d, axis in enumerate(axes):
            if axis and axis.role in roles and not name.endswith(STATISTICS):
                for number in groups_of(axis):
                    writers[number].append((name, d))
    return writers


def rows_of(tensor: Tensor, axis: int, cmap: ChannelMap, name: str, number: int) -> Tensor:
    """Return everything a tensor holds of each channel of a group.

    Parameters
    ----------
    tensor : (..., n, ...) floating point
    axis : int
        Which of its axes carries the channels, as ``cmap`` says of the tensor ``name``.
    number : int
        Which group.

    Returns
    -------
    (W, d) tensor
        In single precision at least.
    """
    x = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    carried = cmap.axes[name][axis]
    if carried is None:
        raise ShapeError(f"{name}: axis {axis} carries no channels")
    if _plain(carried):
        return x.movedim(axis, 0).flatten(1) if x.ndim > 1 else x[:, None]
    here = _blocks(carried)[number]
    x = x.index_select(axis, torch.from_numpy(here.ravel()))
    return x.movedim(axis, 0).reshape(len(here), -1)


def distinct_rows(state: State, cmap: ChannelMap) -> dict[str, int]:
    """Count the different channels of each group: narrow networks fill a wide one with copies.

    Parameters
    ----------
    state : mapping of tensor name to tensor
    cmap : ChannelMap

    Returns
    -------
    dict of str to int
        Group -> number of different rows over all that writes it; its width if none is a copy.
    """
    counts = {}
    for number, (name, writers) in enumerate(zip(cmap.groups, writers_of(cmap), strict=True)):
        parts = [rows_of(state[tensor], d, cmap, tensor, number) for tensor, d in writers]
        table = torch.cat(parts, 1) + 0.0  # -0.0 becomes 0.0
        counts[name] = len({row.tobytes() for row in table.numpy()})
    return counts


def move_axis(
    tensor: Tensor, axis: int, source: Axis, target: Axis, plans: Mapping[int, Plan]
) -> Tensor:
    """Move the channels on one axis along the plans of their groups.

    An axis may hold a channel several times (flattened pixels, the features of a head): its k-th
    coordinate in the source moves to its k-th in the target. Coordinates without a channel stay.

    Parameters
    ----------
    tensor : (..., n, ...) floating point
    axis : int
    source, target : Axis
        What the axis carries before and after.
    plans : mapping of group number to Plan

    Returns
    -------
    (..., m, ...) tensor

    Raises
    ------
    ShapeError
        The two axes do not carry the same groups in the same way.
    """
    into = source.role == "in"
    if _plain(source) and _plain(target):
        return plans[int(source.group[0])].move(tensor, axis, into=into)
    before, after = _blocks(source), _blocks(target)
    if [(k, v.shape[1]) for k, v in before.items()] != [(k, v.shape[1]) for k, v in after.items()]:
        raise ShapeError("an axis repeats its channels otherwise in the source than in the target")
    moved = tensor.new_empty(*tensor.shape[:axis], len(target.group), *tensor.shape[axis + 1 :])
    for number, here in before.items():
        part = tensor.index_select(axis, torch.from_numpy(here.ravel()))
        part = part.reshape(*tensor.shape[:axis], *here.shape, *tensor.shape[axis + 1 :])
        if number != FIXED:
            part = plans[number].move(part, axis, into=into)
        there = torch.from_numpy(after[number].ravel())
        moved.index_copy_(axis, there, part.flatten(axis, axis + 1))
    return moved


def hand_on(importance: Tensor, cmap: ChannelMap, plans: Mapping[str, Plan]) -> Tensor:
    """Move the importance of a source's channels to the target's: none of it is lost.

    Parameters
    ----------
    importance : (C_source,) tensor
    cmap : ChannelMap
        Of the source.
    plans : mapping of group to Plan

    Returns
    -------
    (C_target,) tensor
    """
    parts = cmap.split(importance)
    return torch.cat([plans[name].move(parts[name], 0, into=True) for name in cmap.groups])


def norm_tensors(channels: ChannelMap) -> frozenset[str]:
    """Return the tensors of norms: affine parts, statistics, counters."""
    layer = {name: name.rpartition(".")[0] for name in channels.axes}
    norms = {
        layer[name]
        for name, axes in channels.axes.items()
        if any(axis is not None and axis.role == "norm" for axis in axes)
    }
    return frozenset(name for name in channels.axes if layer[name] in norms)


def _plain(axis: Axis) -> bool:
    """Tell whether an axis is one group in order, each channel once.

    A group is on an axis with all its channels, so a second one would begin at 0 again, and what
    stays has channel 0 too.
    """
    n = len(axis.channel)
    return bool(
        axis.channel[-1] == n - 1
        and axis.group[0] != FIXED
        and (axis.channel == np.arange(n)).all()
    )


def _blocks(axis: Axis) -> dict[int, Ints]:
    """Group number -> (W, r) coordinates of its channels; what stays is one channel of its own."""
    blocks = {}
    for number in np.unique(axis.group).tolist():
        places = np.flatnonzero(axis.group == number)
        channel = axis.channel[places]
        times = np.bincount(channel)
        if (times != times[0]).any():
            raise ShapeError("an axis holds some channels of a group more often than others")
        blocks[number] = places[np.argsort(channel, kind="stable")].reshape(len(times), -1)
    return blocks


def distances(
    pairs: Sequence[tuple[Tensor, Tensor]], shape: tuple[int, int], *, squared: bool
) -> NDArray[np.float64]:
    """Compare rows that are given in parts: ``C_ab = sum over parts of |s_a - t_b|^2``.

    In Gram form, one product per part that is added in place; rounding may leave a little where
    rows are equal, never less than 0.

    Parameters
    ----------
    pairs : sequence of ((n, d) tensor, (m, d) tensor)
        The rows of source and target, any number of parts.
    shape : (n, m)
    squared : bool
        Otherwise the root of the sum.

    Returns
    -------
    (n, m) float64 array
    """
    thin = [pair for pair in pairs if pair[0].shape[1] <= THIN]
    joined = [pair for pair in pairs if pair[0].shape[1] > THIN]
    if thin:  # a product costs less than its call
        joined.append((torch.cat([s for s, _ in thin], 1), torch.cat([t for _, t in thin], 1)))
    cost = torch.zeros(shape, dtype=joined[0][0].dtype if joined else torch.float32)
    for s, t in joined:
        t = t.to(s.dtype)
        cost += torch.linalg.vector_norm(s, dim=1).square()[:, None]
        cost += torch.linalg.vector_norm(t, dim=1).square()
        cost.addmm_(s, t.T, alpha=-2)
    cost.clamp_min_(0)
    found: NDArray[np.float64] = (cost if squared else cost.sqrt_()).double().numpy()
    return found


def sketch(rows: Tensor, size: int, name: str) -> Tensor:
    """Project rows to a few coordinates so that distances between them stay, in expectation.

    Every coordinate is added to one of ``size`` sums with a random sign, in one pass over the data;
    the relative standard deviation of a squared distance is about ``sqrt(2 / size)``. Sketches of
    parts add up to the sketch of the whole row.

    Parameters
    ----------
    rows : (n, d) tensor
    size : int
    name : str
        Draws the projection: the same for both networks, another one for another tensor.

    Returns
    -------
    (n, size) tensor

    References
    ----------
    Charikar, Chen, Farach-Colton, Finding frequent items in data streams, 2002; Clarkson and
    Woodruff, Low rank approximation and regression in input sparsity time, 2013.
    """
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sums = torch.randint(size, rows.shape[1:], generator=source)
    signs = torch.randint(2, rows.shape[1:], generator=source, dtype=rows.dtype) * 2 - 1
    return rows.new_zeros(len(rows), size).index_add_(1, sums, rows * signs)
