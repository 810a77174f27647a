"""What the trace knows and writes down: labels of axes, equalities, pins, places for gates.

Every coordinate of every axis of every parameter and buffer gets its own integer, an *atom*. An
axis of an activation carries the atoms of whatever wrote it. Operations add equalities between
atoms; what is connected in the end is one channel. `None` stands for an axis of fixed size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOTHING", "Labels", "Ledger", "Site", "Value"]

Labels = NDArray[np.int64] | None
NOTHING: frozenset[int] = frozenset()
STAYS = 0  # the atom of coordinates that never go away, such as padded channels


@dataclass(frozen=True)
class Value:
    """What is known about one tensor of the run.

    Attributes
    ----------
    axes : labels of each axis
    data : True if it depends on the input of the network, False for parameters and constants
    gates : sites; the tensor is zero in every channel in which all of them are multiplied by zero
    """

    axes: tuple[Labels, ...]
    data: bool = True
    gates: frozenset[int] = NOTHING

    @property
    def labelled(self) -> bool:
        """True if an axis carries channels."""
        return any(axis is not None for axis in self.axes)


@dataclass
class Site:
    """A tensor of the run where a gate could sit, and the module output that shows it."""

    module: str
    axes: tuple[Labels, ...]
    cause: str = ""  # operation that does not keep zeros, '' for a writer or a normalisation
    output: tuple[Labels, ...] | None = None
    required: bool = False
    hidden: bool = False  # read before any module returned it


@dataclass
class Ledger:
    """Everything one run of the network told."""

    state: dict[str, Value] = field(default_factory=dict)  # parameters and buffers
    owners: list[tuple[str, int]] = field(default_factory=list)  # tensor and axis of a run of atoms
    starts: list[int] = field(default_factory=list)  # its first atom
    size: int = 1
    ties: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    pins: list[tuple[NDArray[np.int64], str]] = field(default_factory=list)
    ends: list[NDArray[np.int64]] = field(default_factory=list)  # channels the network returns
    doubts: list[tuple[NDArray[np.int64], str]] = field(default_factory=list)
    roles: dict[tuple[str, int], str] = field(default_factory=dict)  # in execution order
    unknown: dict[str, set[str]] = field(default_factory=dict)  # operation -> tensors it pins
    idle: set[str] = field(default_factory=set)  # parameters and buffers that no operation took
    whole: dict[str, str] = field(default_factory=dict)  # module that cannot be cut -> why
    sites: list[Site] = field(default_factory=list)
    outputs: dict[str, list[tuple[Labels, ...]]] = field(default_factory=dict)  # per module call
    stack: list[str] = field(default_factory=list)  # modules being run

    def register(self, tensor: str, shape: Iterable[int]) -> Value:
        """Give every coordinate of a parameter or buffer its atoms."""
        axes = []
        for axis, length in enumerate(shape):
            self.owners.append((tensor, axis))
            self.starts.append(self.size)
            axes.append(np.arange(self.size, self.size + length))
            self.size += length
        self.state[tensor] = Value(tuple(axes), data=False)
        self.idle.add(tensor)
        return self.state[tensor]

    def tie(self, first: Labels, second: Labels, reason: str) -> None:
        """Two axes carry the same channels; an axis of fixed size pins the other."""
        if first is None or second is None or len(first) != len(second):
            self.pin(first, reason)
            self.pin(second, reason)
        elif first is not second:
            self.ties.append((first, second))

    def pin(self, labels: Labels, reason: str) -> None:
        """Keep these coordinates whole; an empty reason is not shown to the user."""
        if labels is not None:
            self.pins.append((labels, reason))

    def doubt(self, labels: Labels, reason: str) -> None:
        """Note that dropping these coordinates is not the same as setting them to zero."""
        if labels is not None:
            self.doubts.append((labels, reason))

    def atoms(self, place: int) -> NDArray[np.int64]:
        """Atoms of one axis of one parameter or buffer, by its number in `owners`."""
        end = self.starts[place + 1] if place + 1 < len(self.starts) else self.size
        return np.arange(self.starts[place], end)

    def role_of(self, labels: NDArray[np.int64]) -> str | None:
        """Return what the parameter that owns these atoms does with them."""
        return self.roles.get(self.owners[bisect_right(self.starts, int(labels[0])) - 1])

    def role(self, value: Value, axis: int, role: str) -> None:
        """Note what a parameter does with an axis; activations carry no roles."""
        labels = value.axes[axis]
        if value.data or labels is None or len(labels) == 0:
            return
        owner = bisect_right(self.starts, int(labels[0])) - 1
        if owner >= 0:
            self.roles.setdefault(self.owners[owner], role)

    def tensors(self, labels: Labels) -> set[str]:
        """Names of the parameters and buffers that own these atoms."""
        if labels is None or not self.starts:
            return set()
        owners = np.unique(np.searchsorted(self.starts, labels[labels != STAYS], side="right"))
        return {self.owners[owner - 1][0] for owner in owners}

    def site(self, axes: tuple[Labels, ...], cause: str = "") -> frozenset[int]:
        """Open a new place for a gate, inside the module that is being run."""
        self.sites.append(Site(self.stack[-1] if self.stack else "", axes, cause))
        return frozenset({len(self.sites) - 1})

    def read(self, value: Value, axis: int) -> None:
        """Note that a layer reads the channels on `axis`: gates must have been applied by now."""
        if value.axes[axis] is None:
            return
        for number in value.gates:
            site = self.sites[number]
            site.required = True
            site.hidden |= site.output is None

    def leave(self, module: str, value: Value) -> None:
        """Note that a module returned `value`: sites opened in it and still visible are gates."""
        self.outputs.setdefault(module, []).append(value.axes)
        for number in value.gates:
            site = self.sites[number]
            if site.module == module and site.output is None:
                site.output = value.axes

    def clearest(self, values: Iterable[Value]) -> frozenset[int]:
        """Of factors of a product pick the one to gate: rather a layer than an activation."""
        candidates = [value.gates for value in values if value.gates]
        for gates in candidates:
            if not any(self.sites[number].cause for number in gates):
                return gates
        return candidates[0] if candidates else NOTHING
