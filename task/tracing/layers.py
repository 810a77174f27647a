"""Layers that read channels and write new ones: convolution, linear, embedding, attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from task.tracing.labels import Labels, Value
from task.tracing.op import MEETS_FIXED, Op, Rule

__all__ = ["LAYER_RULES"]


def convolution(op: Op) -> Value:
    """Read channels on axis 1 and write those of axis 0 of the weight."""
    x, weight = op.value("input"), op.value("weight")
    writes, reads = (1, 0) if op["transposed"] else (0, 1)
    groups = op["groups"]
    for kernel in weight.axes[2:]:
        op.ledger.pin(kernel, "")
    op.ledger.read(x, 1)
    if groups == 1:
        op.ledger.role(weight, writes, "out")
        op.ledger.role(weight, reads, "in")
        op.ledger.tie(weight.axes[reads], x.axes[1], MEETS_FIXED.format(op.name))
        out = weight.axes[writes]
    else:
        out = _grouped(op, x.axes[1], weight, groups)
    _bias(op, out)
    return op.written((x.axes[0], out, *[None] * (len(x.axes) - 2)))


def _grouped(op: Op, channels: Labels, weight: Value, groups: int) -> Labels:
    """Depthwise: an output lives and dies with its input. Grouped: with the same place elsewhere.

    A grouped layer keeps its number of groups, so every group must lose the same positions.
    """
    ledger, why = op.ledger, MEETS_FIXED.format(op.name)
    first, second = weight.axes[:2]
    if first is None or second is None:
        ledger.pin(channels, why)
        return first
    if len(second) == 1 and not op["transposed"]:
        ledger.pin(second, "")
        ledger.role(weight, 0, "depthwise")
        copies = len(first) // groups
        ledger.tie(first, None if channels is None else np.repeat(channels, copies), why)
        return first
    if op["transposed"]:
        ledger.pin(channels, why)
        ledger.pin(first, why)
        ledger.pin(second, why)
        return None
    ledger.role(weight, 0, "out")
    ledger.role(weight, 1, "in")
    ledger.tie(np.tile(second, groups), channels, why)
    ledger.ties.append((np.tile(first[: len(first) // groups], groups), first))
    return first


def _bias(op: Op, out: Labels, name: str = "bias") -> None:
    if op.has(name):
        bias = op.value(name)
        op.ledger.role(bias, -1, "bias")
        op.ledger.tie(bias.axes[-1], out, MEETS_FIXED.format(op.name))


def matmul(op: Op) -> Value:
    """Product of (…, n, k) and (…, k, m); with a bias if it is `addmm`."""
    names = ("self", "mat2") if op.name in ("mm", "bmm") else ("mat1", "mat2")
    names = ("batch1", "batch2") if op.name == "baddbmm" else names
    left, right = op.value(names[0]), op.value(names[1])
    value = _product(op, left, right)
    if op.name in ("addmm", "baddbmm"):
        _bias(op, value.axes[-1], "self")
    return value


def linear(op: Op) -> Value:
    """Multiply (…, k) by (m, k) transposed: a linear layer that was not taken apart."""
    weight = op.value("weight")
    value = _product(op, op.value("input"), replace(weight, axes=weight.axes[::-1]))
    _bias(op, value.axes[-1])
    return value


def _product(op: Op, left: Value, right: Value) -> Value:
    ledger, why = op.ledger, MEETS_FIXED.format(op.name)
    batch = left.axes[:-2] if left.data or not right.data else right.axes[:-2]
    for one, other in zip(left.axes[:-2], right.axes[:-2], strict=False):
        if one is not None or other is not None:
            ledger.tie(one, other, why)
    if left.axes[-1] is not None or right.axes[-2] is not None:
        ledger.tie(left.axes[-1], right.axes[-2], why)
    axes = (*batch, left.axes[-2], right.axes[-1])
    if left.data != right.data:
        written, summed = (-1, -2) if left.data else (-2, -1)
        weight, data = (right, left) if left.data else (left, right)
        ledger.role(weight, written, "out")
        ledger.role(weight, summed, "in")
        ledger.read(data, written)  # what is summed lies there in the other factor
        return op.written(axes)
    if left.axes[-1] is not None:
        gates = ledger.clearest((left, right))
        ledger.read(replace(left, gates=gates), -1)
    if any(axis is not None for axis in batch):
        return Value(axes, left.data, ledger.clearest((right, left)))
    rows = left.gates if left.axes[-2] is not None else frozenset()
    columns = right.gates if right.axes[-1] is not None else frozenset()
    return Value(axes, left.data, rows | columns)


def embedding(op: Op) -> Value | list[Value]:
    """Look up rows: axis 1 of the table is written, axis 0 is the vocabulary."""
    weight, indices = op.value("weight"), op.value("indices")
    op.ledger.role(weight, 1, "out")
    op.ledger.pin(weight.axes[0], "")
    if op.name == "embedding":
        return op.written((*indices.axes, weight.axes[1]))
    return op.first(op.written((None, weight.axes[1])))


def attention(op: Op) -> list[Value]:
    """Fused attention on (batch, heads, length, features): whole heads live and die together."""
    query, key, value = (op.value(name) for name in ("query", "key", "value"))
    for other in (key, value):
        for k in (0, 1):
            if query.axes[k] is not None or other.axes[k] is not None:
                op.ledger.tie(query.axes[k], other.axes[k], MEETS_FIXED.format(op.name))
    for part in (query, key):
        op.ledger.pin(part.axes[-1], "attention is scaled by the number of features of a head")
    out = Value((*query.axes[:3], value.axes[3]), True, value.gates)
    return op.first(out)


FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

LAYER_RULES: dict[str, Rule] = {
    "convolution": convolution,
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), matmul),
    "linear": linear,
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), embedding),
    **{f"_scaled_dot_product_{name}": attention for name in FUSED},
}
