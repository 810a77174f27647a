"""One operation seen by the trace: its arguments by name, what is known about them, its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from task.tracing.labels import Labels, Ledger, Value

__all__ = ["MEETS_FIXED", "Op", "Rule", "tensors_in"]

MEETS_FIXED = "meets an axis of fixed size in {}"


def tensors_in(thing: object) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts and dataclasses."""
    if isinstance(thing, Tensor):
        yield thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield from tensors_in(vars(thing))
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value)


class Op:
    """A call of an ATen operator.

    Parameters
    ----------
    func : the operator
    args, kwargs : what it was called with
    known : id of a tensor -> what is known about it
    ledger : where rules write
    """

    def __init__(
        self,
        func: torch._ops.OpOverload[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: dict[int, Value],
        ledger: Ledger,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = func._schema.name.removeprefix("aten::")
        if self.name.endswith("_") and not self.name.endswith("__"):
            self.name = self.name[:-1]  # relu_ is relu
        self.outputs: list[Tensor] = []
        self.shapes = {id(tensor): tuple(tensor.shape) for tensor in tensors_in([args, kwargs])}
        self.known, self.ledger = known, ledger
        self.strides = args[0].stride() if self.name == "as_strided" else ()
        names = [argument.name for argument in func._schema.arguments]
        self.named = {**dict(zip(names, args, strict=False)), **kwargs}

    def run(self) -> Any:
        """Call the operator and remember its outputs."""
        result = self.func(*self.args, **self.kwargs)
        self.outputs = list(tensors_in(result))
        return result

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Argument by its name in the schema, or what to take if it was not given."""
        value = self.named.get(name)
        return default if value is None else value

    def look(self, tensor: Tensor) -> Value:
        """Return what is known about a tensor; a constant has axes of fixed size."""
        return self.known.get(id(tensor)) or Value((None,) * tensor.ndim, data=False)

    def value(self, name: str) -> Value:
        """Return what is known about a tensor argument."""
        return self.look(self.named[name])

    def has(self, name: str) -> bool:
        """Tell whether a tensor was given for this argument."""
        return isinstance(self.named.get(name), Tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor argument before the operation, which may work in place."""
        return self.shapes[id(self.named[name])]

    def tensors(self) -> list[Tensor]:
        """Every tensor argument."""
        return list(tensors_in([self.args, self.kwargs]))

    def values(self) -> list[Value]:
        """Return what is known about every tensor argument."""
        return [self.look(tensor) for tensor in self.tensors()]

    def plain(self, number: int = 0, data: bool = True) -> Value:
        """Output `number` without channels."""
        return Value((None,) * self.outputs[number].ndim, data)

    def first(self, value: Value) -> list[Value]:
        """Give the first output its value; the others are statistics without channels."""
        return [value, *(self.plain(k) for k in range(1, len(self.outputs)))]

    def give_up(self) -> Value:
        """Pin whatever the operation touches and remember which tensors those are."""
        touched = self.ledger.unknown.setdefault(str(self.func), set())
        for value in self.values():
            for axis in value.axes:
                touched |= self.ledger.tensors(axis)
                self.ledger.pin(axis, f"operation {self.func} is unknown to the trace")
        return self.plain()

    def written(self, axes: tuple[Labels, ...], cause: str = "") -> Value:
        """Describe an output that is not zero where its inputs are: a new place for a gate."""
        return Value(axes, True, self.ledger.site(axes, cause))


Rule = Callable[[Op], Value | list[Value]]
