"""Operations that only move coordinates: permute, cat, split, pad, index."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from task.tracing.labels import STAYS, Labels, Value
from task.tracing.op import Op, Rule

__all__ = ["SHAPE_RULES"]


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
    return [replace(value, axes=(*value.axes[:d], piece, *value.axes[d + 1 :])) for piece in pieces]


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
    if any(value.labelled and not value.data for value in values):
        gates = op.ledger.site(tuple(axes), op.name)  # a learned token is not silenced by a gate
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


def restride(op: Op) -> Value:
    """Keep labels if only axes of length one are laid out anew, as pooling of NHWC images does."""
    sizes, strides = op.shape("self"), op["stride"]
    same = list(op["size"]) == list(sizes) and all(
        n == 1 or a == b for n, a, b in zip(sizes, op.strides, strides, strict=True)
    )
    return op.value("self") if same and not op.get("storage_offset", 0) else op.give_up()


def flip(op: Op) -> Value:
    """Reverse or roll axes, which moves channels to fixed places."""
    value = op.value("self")
    axes = list(value.axes)
    for d in op["dims"]:
        op.ledger.pin(axes[d], f"{op.name} reorders it")
        axes[d] = None
    return replace(value, axes=tuple(axes))


SHAPE_RULES: dict[str, Rule] = {
    "permute": permute,
    **dict.fromkeys(("transpose", "t", "swapaxes"), transpose),
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "expand": expand,
    "repeat": repeat,
    "as_strided": restride,
    **dict.fromkeys(("select", "slice"), take),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "chunk"), split),
    "unsafe_split_with_sizes": split,
    "unbind": unbind,
    **dict.fromkeys(("cat", "stack"), cat),
    "constant_pad_nd": pad,
    **dict.fromkeys(("index", "index_select"), index),
    **dict.fromkeys(("flip", "roll"), flip),
}
