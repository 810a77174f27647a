"""The table of all rules, and what happens to an operation that is not in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from task.tracing.elementwise import elementwise
from task.tracing.labels import Value
from task.tracing.layers import LAYER_RULES
from task.tracing.norms import NORM_RULES
from task.tracing.op import Op, Rule
from task.tracing.shapes import SHAPE_RULES
from task.tracing.views import view

__all__ = ["RULES", "apply"]


def spatial(op: Op) -> list[Value]:
    """Pool or resize the last axes."""
    x = op.value("self") if "self" in op.named else op.value("input")
    count = next(n for n in (1, 2, 3) if f"{n}d" in op.name)
    for axis in x.axes[-count:]:
        op.ledger.pin(axis, f"{op.name} runs over it")
    value = replace(x, axes=(*x.axes[:-count], *[None] * count))
    return [value] * len(op.outputs)


def glu(op: Op) -> Value:
    """Multiply one half of the channels by a gate made of the other half."""
    x, d = op.value("self"), op.get("dim", -1)
    axes = list(x.axes)
    labels = axes[d]
    if labels is not None:
        axes[d], other = np.split(labels, 2)
        op.ledger.tie(axes[d], other, "")
    return replace(x, axes=tuple(axes))


def same(op: Op) -> list[Value]:
    """Keep labels: copies and what has the shape of its argument."""
    x = op.value("self") if "self" in op.named else op.value("input")
    if op.name.endswith("_like"):
        gates = frozenset() if op.name == "zeros_like" else op.ledger.site(x.axes, op.name)
        x = replace(x, gates=gates)
    return [x] * len(op.outputs)


POOLS = ("max_pool{}_with_indices", "avg_pool{}", "_adaptive_avg_pool{}", "adaptive_max_pool{}")
PADS = ("reflection_pad{}", "replication_pad{}")
RESIZES = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")

RULES: dict[str, Rule] = {
    **LAYER_RULES,
    **NORM_RULES,
    **SHAPE_RULES,
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "unflatten"), view),
    **{name.format(f"{n}d"): spatial for name in (*POOLS, *PADS) for n in (1, 2, 3)},
    **{f"upsample_{name}": spatial for name in RESIZES},
    "glu": glu,
    **dict.fromkeys(("_prelu_kernel", "hardswish", "masked_fill", "rsub"), elementwise),
    **dict.fromkeys(("clone", "detach", "alias", "contiguous", "lift_fresh", "_to_copy"), same),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "native_dropout"), same),
    **dict.fromkeys(("rand_like", "randn_like"), same),
}


def apply(op: Op) -> list[Value]:
    """Say what is known about the outputs of an operation.

    Raises
    ------
    Never: an operation without a rule pins what it touches.
    """
    values = op.values()
    if not any(value.labelled for value in values):
        data = any(value.data for value in values)
        return [op.plain(k, data) for k in range(len(op.outputs))]
    if not op.outputs:
        return []
    rule = RULES.get(op.name)
    if rule is None and torch.Tag.pointwise in op.func.tags and len(op.outputs) == 1:
        rule = elementwise
    try:
        found = rule(op) if rule else op.give_up()
    except (LookupError, TypeError, ValueError):  # a form of the call that the rule does not know
        found = op.give_up()
    values = found if isinstance(found, list) else [found] * len(op.outputs)
    if any(not _fits(value, out) for value, out in zip(values, op.outputs, strict=True)):
        op.give_up()
        return [op.plain(k) for k in range(len(op.outputs))]
    return values


def _fits(value: Value, out: Tensor) -> bool:
    """Tell whether the labels have the shape of the tensor."""
    lengths = (
        n if axis is None else len(axis) for axis, n in zip(value.axes, out.shape, strict=False)
    )
    return len(value.axes) == out.ndim and tuple(lengths) == tuple(out.shape)
