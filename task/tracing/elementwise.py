"""Operations that compute every output from the inputs at the same place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from task.tracing.labels import Labels, Value
from task.tracing.op import MEETS_FIXED, Op

__all__ = ["elementwise"]


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
