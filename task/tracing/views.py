"""Labels through views: merging axes repeats channels, cutting one finds or ties them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from task.tracing.labels import Labels, Ledger, Value
from task.tracing.op import Op

__all__ = ["view"]


def view(op: Op) -> Value:
    """Merge and split axes; a flattened axis repeats the label of its channel."""
    value, new = op.value("self"), tuple(op.outputs[0].shape)
    sizes = op.get("size", op.get("shape", ()))
    wish = list(sizes).index(-1) if -1 in sizes else -1
    axes: list[Labels] = [None] * len(new)
    old = op.shape("self")
    for before, after in _blocks(old, new):
        if len(before) == len(after) == 1:
            axes[after[0]] = value.axes[before[0]]
            continue
        flat = _merge(op.ledger, [value.axes[i] for i in before], [old[i] for i in before])
        if flat is not None and after:
            shape = [new[i] for i in after]
            unit, labels = _split(
                op.ledger, flat, shape, after.index(wish) if wish in after else -1
            )
            axes[after[unit]] = labels
    return replace(value, axes=tuple(axes))


def _blocks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the shortest runs of old and new axes that hold equally many coordinates."""
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [*range(i, min(i + 1, len(old)))], [*range(j, min(j + 1, len(new)))]
        while (p := prod(old[k] for k in before)) != (q := prod(new[k] for k in after)):
            if p < q:
                before.append(before[-1] + 1 if before else i)
            else:
                after.append(after[-1] + 1 if after else j)
        i, j = i + len(before), j + len(after)
        yield before, after


def _merge(ledger: Ledger, axes: list[Labels], sizes: list[int]) -> Labels:
    """Labels of several axes seen as one; two axes with channels in one axis cannot be cut."""
    with_channels = [k for k, axis in enumerate(axes) if axis is not None and sizes[k] > 1]
    with_channels = with_channels or [k for k, axis in enumerate(axes) if axis is not None][:1]
    if len(with_channels) > 1:
        for k in with_channels:
            ledger.pin(axes[k], "two axes with channels are flattened into one")
        return None
    if not with_channels:
        return None
    k = with_channels[0]
    labels = axes[k]
    assert labels is not None
    return np.tile(np.repeat(labels, prod(sizes[k + 1 :])), prod(sizes[:k]))


def _split(
    ledger: Ledger, flat: NDArray[np.int64], shape: list[int], wish: int
) -> tuple[int, NDArray[np.int64]]:
    """Cut one axis into several and say which of them carries the channels.

    An axis along which labels do not repeat is the channel axis of a flattened tensor. Otherwise
    coordinates must be tied: to the axis written as -1 in the call, else to the last but one, so
    that of (heads, features) whole heads are kept.
    """
    grid = flat.reshape(shape)
    real = [k for k, length in enumerate(shape) if length > 1] or [0]
    rows = {k: np.moveaxis(grid, k, 0).reshape(shape[k], -1) for k in real}
    for k in real:
        if (rows[k] == rows[k][:, :1]).all():
            return k, np.ascontiguousarray(rows[k][:, 0])
    unit = wish if wish in real else real[-2]
    first = np.ascontiguousarray(rows[unit][:, 0])
    ledger.ties.append((np.repeat(first, rows[unit].shape[1]), rows[unit].reshape(-1)))
    return unit, first
