"""Labels through operations that only move coordinates: view, permute, cat, split, pad, index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from task.trace_labels import STAYS, Labels, Ledger, Value
from task.trace_op import Op, Rule

__all__ = ["SHAPE_RULES"]


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
            unit, labels = _split(op.ledger, flat, shape, after.index(wish) if wish in after else -1)
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


def permute(op: Op) -> Value:
    """Reorder axes."""
    value = op.value("self")
    return replace(value, axes=tuple(value.axes[d] for d in op["dims"]))


def transpose(op: Op) -> Value:
    """Swap two axes; `t` swaps the only two."""
    value = op.value("self")
    axes = list(value.axes)
    if len(axes) > 1:
        a, b = op.get("dim0", 0), op.get("dim1", 1)
        axes[a], axes[b] = axes[b], axes[a]
    return replace(value, axes=tuple(axes))


def squeeze(op: Op) -> Value:
    """Drop axes of length one."""
    value, sizes = op.value("self"), op.shape("self")
    dims = op.get("dim", range(len(sizes)))
    chosen = {d % max(len(sizes), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    gone = {d for d in chosen if sizes and sizes[d] == 1}
    for d in gone:
        op.ledger.pin(value.axes[d], f"{op.name} removes the axis")
    return replace(value, axes=tuple(a for d, a in enumerate(value.axes) if d not in gone))


def unsqueeze(op: Op) -> Value:
    """Insert an axis of length one."""
    value = op.value("self")
    axes = list(value.axes)
    axes.insert(op["dim"] % (len(axes) + 1), None)
    return replace(value, axes=tuple(axes))


def expand(op: Op) -> Value:
    """Repeat axes of length one."""
    value, old, new = op.value("self"), op.shape("self"), op.outputs[0].shape
    lead = len(new) - len(old)
    axes: list[Labels] = [None] * lead
    for d, axis in enumerate(value.axes):
        same = old[d] == new[lead + d]
        axes.append(axis if same else None)
        if not same:
            op.ledger.pin(axis, f"{op.name} repeats the axis")
    return replace(value, axes=tuple(axes))


def repeat(op: Op) -> Value:
    """Tile axes: the channels come again."""
    value, times = op.value("self"), list(op["repeats"])
    lead = len(times) - len(value.axes)
    tiled = [
        axis if axis is None or n == 1 else np.tile(axis, n)
        for axis, n in zip(value.axes, times[lead:], strict=True)
    ]
    return replace(value, axes=(*[None] * lead, *tiled))


def take(op: Op) -> Value:
    """`select` one position or a `slice` of them: an axis cut at fixed places stays whole."""
    value = op.value("self")
    axes, d = list(value.axes), op["dim"] % len(value.axes)
    if op.name == "select" or op.outputs[0].shape[d] != op.shape("self")[d]:
        op.ledger.pin(axes[d], f"{op.name} takes fixed positions of it")
        axes[d] = None
    if op.name == "select":
        del axes[d]
    return replace(value, axes=tuple(axes))


def split(op: Op) -> list[Value]:
    """Cut an axis: equal pieces carry the same channels, as the two halves of a gated unit do."""
    value = op.value("self")
    d = op.get("dim", 0) % len(value.axes)
    labels = value.axes[d]
    lengths = [out.shape[d] for out in op.outputs]
    pieces: list[Labels] = [None] * len(lengths)
    if labels is not None and len(set(lengths)) == 1:
        cut = np.split(labels, len(lengths))
        for first, second in pairwise(cut):
            op.ledger.tie(first, second, "")
        pieces = list(cut)
    elif labels is not None:
        op.ledger.pin(labels, f"{op.name} cuts it into unequal pieces")
    return [
        replace(value, axes=(*value.axes[:d], piece, *value.axes[d + 1 :])) for piece in pieces
    ]


def unbind(op: Op) -> list[Value]:
    """Take an axis apart, position by position."""
    value = op.value("self")
    d = op.get("dim", 0) % len(value.axes)
    op.ledger.pin(value.axes[d], "unbind takes fixed positions of it")
    rest = replace(value, axes=(*value.axes[:d], *value.axes[d + 1 :]))
    return [rest] * len(op.outputs)


def cat(op: Op) -> Value:
    """Put channels of several tensors side by side; `stack` on a new axis."""
    tensors = [t for t in op["tensors"] if t.ndim == op["tensors"][0].ndim and t.numel()]
    values = [op.look(t) for t in tensors]
    d = op.get("dim", 0) % op.outputs[0].ndim
    axes = list(values[0].axes)
    for other in values[1:]:
        for k, axis in enumerate(other.axes):
            if (op.name == "stack" or k != d) and (axis is not None or axes[k] is not None):
                op.ledger.tie(axes[k], axis, f"{op.name} joins it to an axis of fixed size")
                axes[k] = None if axis is None else axes[k]
    if op.name == "stack":
        axes.insert(d, None)
    elif any(value.axes[d] is not None for value in values):
        pieces = [_or_fixed(v.axes[d], t.shape[d]) for v, t in zip(values, tensors, strict=True)]
        axes[d] = np.concatenate(pieces)
    gates = frozenset().union(*(value.gates for value in values))
    return Value(tuple(axes), any(value.data for value in values), gates)


def _or_fixed(labels: Labels, length: int) -> NDArray[np.int64]:
    return np.full(length, STAYS, np.int64) if labels is None else labels


def pad(op: Op) -> Value:
    """Add coordinates that never go away."""
    value = op.value("self")
    axes, widths = list(value.axes), list(op["pad"])
    for k, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        d = len(axes) - 1 - k
        labels = axes[d]
        if labels is None or before == after == 0:
            continue
        if min(before, after) < 0:
            op.ledger.pin(labels, "padding of negative width cuts it at fixed places")
            axes[d] = None
        else:
            axes[d] = np.concatenate([_or_fixed(None, before), labels, _or_fixed(None, after)])
    gates = value.gates if op.get("value", 0) == 0 else op.ledger.site(tuple(axes), op.name)
    return replace(value, axes=tuple(axes), gates=gates)


def index(op: Op) -> Value:
    """Pick positions by tensors of indices; channels cannot be picked."""
    value = op.value("self")
    indices = op["indices"] if op.name == "index" else [*[None] * op["dim"], op["index"]]
    picked = [d for d, rows in enumerate(indices) if rows is not None]
    rows = [indices[d] for d in picked]
    if picked != list(range(picked[0], picked[-1] + 1)) or any(r.dtype.itemsize < 4 for r in rows):
        return op.give_up()
    for d in picked:
        op.ledger.pin(value.axes[d], f"{op.name} takes fixed positions of it")
    fresh = [None] * max(r.ndim for r in rows)
    return replace(value, axes=(*value.axes[: picked[0]], *fresh, *value.axes[picked[-1] + 1 :]))


def flip(op: Op) -> Value:
    """Reverse or roll axes, which moves channels to fixed places."""
    value = op.value("self")
    axes = list(value.axes)
    for d in op["dims"]:
        op.ledger.pin(axes[d], f"{op.name} reorders it")
        axes[d] = None
    return replace(value, axes=tuple(axes))


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "unflatten"), view),
    "permute": permute,
    **dict.fromkeys(("transpose", "t", "swapaxes"), transpose),
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "expand": expand,
    "repeat": repeat,
    **dict.fromkeys(("select", "slice"), take),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "chunk"), split),
    "unsafe_split_with_sizes": split,
    "unbind": unbind,
    **dict.fromkeys(("cat", "stack"), cat),
    "constant_pad_nd": pad,
    **dict.fromkeys(("index", "index_select"), index),
    **dict.fromkeys(("flip", "roll"), flip),
}
