"""What operators that compute do with channels: layers, norms, sums, attention, elementwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from task.trace_labels import Labels, Ledger, Value
from task.trace_op import Op, Rule
from task.trace_shapes import SHAPE_RULES

__all__ = ["RULES", "apply"]

MEETS_FIXED = "meets an axis of fixed size in {}"


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
    """A linear layer that was not taken apart: (…, k) times (m, k) transposed."""
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
        data, weight, inner = (left, right, -1) if left.data else (right, left, -2)
        ledger.role(weight, inner, "out")  # the axis that is not summed: -1 of right, -2 of left
        ledger.role(weight, -3 - inner, "in")
        ledger.read(data, inner)
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
    bag = op.written((None, weight.axes[1]))
    return [bag, *(op.plain(k) for k in range(1, len(op.outputs)))]


def batch_norm(op: Op) -> list[Value]:
    """Scale and shift each channel by itself."""
    x = op.value("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if op.has(name):
            op.ledger.role(op.value(name), 0, "norm")
            op.ledger.tie(op.value(name).axes[0], x.axes[1], MEETS_FIXED.format(op.name))
    return _with_statistics(op, op.written(x.axes))


def group_norm(op: Op) -> list[Value]:
    """Normalise groups of channels: only whole groups can go, and one group not at all."""
    x, channels = op.value("input"), op.value("input").axes[1]
    groups = op["group"]
    for name in ("weight", "bias"):
        if op.has(name):
            op.ledger.role(op.value(name), 0, "norm")
            op.ledger.tie(op.value(name).axes[0], channels, MEETS_FIXED.format(op.name))
    if channels is not None and groups == 1:
        op.ledger.doubt(channels, "a GroupNorm with one group normalises over its channels")
    elif channels is not None:
        first = channels.reshape(groups, -1)[:, 0]
        op.ledger.ties.append((np.repeat(first, len(channels) // groups), channels))
    return _with_statistics(op, op.written(x.axes))


def layer_norm(op: Op) -> list[Value]:
    """Normalise over the last axes, so that a missing channel changes all others."""
    x = op.value("input")
    for k in range(1, len(op["normalized_shape"]) + 1):
        op.ledger.doubt(x.axes[-k], "a LayerNorm normalises over its channels")
        for name in ("weight", "bias"):
            if op.has(name):
                op.ledger.role(op.value(name), -k, "norm")
                op.ledger.tie(op.value(name).axes[-k], x.axes[-k], MEETS_FIXED.format(op.name))
    return _with_statistics(op, op.written(x.axes))


def _with_statistics(op: Op, value: Value) -> list[Value]:
    return [value, *(op.plain(k) for k in range(1, len(op.outputs)))]


def softmax(op: Op) -> Value:
    """Normalise along one axis."""
    x = op.value("self")
    op.ledger.doubt(x.axes[op["dim"]], "a softmax runs over its channels")
    return op.written(x.axes, op.name)


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
    return _with_statistics(op, out)


def reduce(op: Op) -> Value | list[Value]:
    """Sum or average over axes: a sum does not mind zeros, a mean over channels does."""
    x = op.value("self")
    dims = op.get("dim", [])
    dims = [dims] if isinstance(dims, int) else list(dims)
    gone = {d % max(len(x.axes), 1) for d in dims or range(len(x.axes))}
    for d in gone:
        if op.name in ("sum", "linalg_vector_norm"):
            op.ledger.read(x, d)
        else:
            op.ledger.doubt(x.axes[d], f"a {op.name} runs over its channels")
    axes = [None if d in gone else axis for d, axis in enumerate(x.axes)]
    if not op.get("keepdim", False):
        axes = [axis for d, axis in enumerate(axes) if d not in gone]
    gates = op.ledger.site(tuple(axes), op.name) if op.name == "logsumexp" else x.gates
    return [Value(tuple(axes), x.data, gates)] * len(op.outputs)


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


def elementwise(op: Op) -> Value:
    """Every output from the inputs at the same place: their channels are the same."""
    rank = op.outputs[0].ndim
    axes: list[Labels] = [None] * rank
    tensors = op.tensors()
    for k in range(1, rank + 1):
        length = op.outputs[0].shape[-k]
        rows = [(op.look(t).axes[-k], t.shape[-k]) for t in tensors if t.ndim >= k]
        for labels, size in rows:
            if size != length:
                op.ledger.pin(labels, f"is broadcast in {op.name}")
        full = [labels for labels, size in rows if size == length]
        if any(labels is not None for labels in full):
            for labels in full[1:]:
                op.ledger.tie(full[0], labels, MEETS_FIXED.format(op.name))
            axes[-k] = None if any(labels is None for labels in full) else full[0]
    data = any(value.data for value in op.values())
    if data:
        for value in op.values():
            for k in range(len(value.axes)):
                op.ledger.role(value, k, "bias" if op.name in ("add", "sub") else "norm")
    return Value(tuple(axes), data, _gates_after(op, tuple(axes)) if data else frozenset())


def _gates_after(op: Op, axes: tuple[Labels, ...]) -> frozenset[int]:
    """Sites that silence the result of an elementwise operation; a new one if zero is not kept."""
    values = [value for value in op.values() if value.data and value.labelled]
    if not values:
        return frozenset()
    if op.name == "mul":
        return op.ledger.clearest(values)
    if op.name == "div" and op.value("self") in values:
        return op.value("self").gates
    if _keeps_zero(op):
        return frozenset().union(*(value.gates for value in values))
    return op.ledger.site(axes, op.name)


def _keeps_zero(op: Op) -> bool:
    """Run the operation with zeros for activations and ones for anything else."""

    def probe(thing: Any) -> Any:
        if isinstance(thing, list | tuple):
            return [probe(item) for item in thing]
        if not isinstance(thing, Tensor):
            return thing
        value = op.look(thing)
        if value.data and value.labelled:
            return torch.zeros_like(thing)
        return torch.ones_like(thing) if thing.is_floating_point() else thing.clone()

    kwargs = {key: probe(thing) for key, thing in op.kwargs.items()}
    return not bool(op.func(*probe(list(op.args)), **kwargs).any())


ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
POOLS = ("max_pool{}_with_indices", "avg_pool{}", "_adaptive_avg_pool{}", "adaptive_max_pool{}")
PADS = ("reflection_pad{}", "replication_pad{}")
RESIZES = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")

RULES: dict[str, Rule] = {
    **SHAPE_RULES,
    "convolution": convolution,
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), matmul),
    "linear": linear,
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), embedding),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), batch_norm),
    "_native_batch_norm_legit_no_training": batch_norm,
    "native_group_norm": group_norm,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), softmax),
    **{f"_scaled_dot_product_{name}": attention for name in ATTENTION},
    **dict.fromkeys(("sum", "mean", "linalg_vector_norm", "amax", "amin", "max", "min"), reduce),
    **dict.fromkeys(("var", "std", "logsumexp"), reduce),
    **{name.format(f"{n}d"): spatial for name in (*POOLS, *PADS) for n in (1, 2, 3)},
    **{f"upsample_{name}": spatial for name in RESIZES},
    "glu": glu,
    **dict.fromkeys(("clone", "detach", "alias", "contiguous", "lift_fresh", "_to_copy"), same),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "native_dropout"), same),
    **dict.fromkeys(("rand_like", "randn_like"), same),
}


def apply(op: Op) -> Sequence[Value]:
    """What is known about the outputs of an operation.

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
    found = rule(op) if rule else op.give_up()
    return found if isinstance(found, list) else [found] * len(op.outputs)
