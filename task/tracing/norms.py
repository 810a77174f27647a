"""What runs over several coordinates: normalisations, softmax, sums and means."""

from __future__ import annotations

import numpy as np

from task.tracing.elementwise import elementwise
from task.tracing.labels import Value
from task.tracing.op import MEETS_FIXED, Op, Rule

__all__ = ["NORM_RULES"]


def batch_norm(op: Op) -> list[Value]:
    """Scale and shift each channel by itself."""
    x = op.value("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if op.has(name):
            op.ledger.role(op.value(name), 0, "norm")
            op.ledger.tie(op.value(name).axes[0], x.axes[1], MEETS_FIXED.format(op.name))
    return op.first(op.written(x.axes))


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
    return op.first(op.written(x.axes))


def layer_norm(op: Op) -> list[Value]:
    """Normalise over the last axes, so that a missing channel changes all others."""
    x = op.value("input")
    for k in range(1, len(op["normalized_shape"]) + 1):
        op.ledger.doubt(x.axes[-k], "a LayerNorm normalises over its channels")
        for name in ("weight", "bias"):
            if op.has(name):
                op.ledger.role(op.value(name), -k, "norm")
                op.ledger.tie(op.value(name).axes[-k], x.axes[-k], MEETS_FIXED.format(op.name))
    return op.first(op.written(x.axes))


def softmax(op: Op) -> Value:
    """Normalise along one axis."""
    x = op.value("self")
    op.ledger.doubt(x.axes[op["dim"]], "a softmax runs over its channels")
    return op.written(x.axes, op.name)


def reduce(op: Op) -> Value | list[Value]:
    """Sum or average over axes: a sum does not mind zeros, a mean over channels does."""
    if op.has("other"):
        return elementwise(op)
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


NORM_RULES: dict[str, Rule] = {
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), batch_norm),
    "_native_batch_norm_legit_no_training": batch_norm,
    "native_group_norm": group_norm,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), softmax),
    **dict.fromkeys(("sum", "mean", "linalg_vector_norm", "amax", "amin", "max", "min"), reduce),
    **dict.fromkeys(("var", "std", "logsumexp"), reduce),
}
