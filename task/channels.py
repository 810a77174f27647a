"""Which channels of which tensors belong together: the plain data every other part is built on.

A *group* is a set of channels that can only be kept or dropped together across tensors: the
outputs of every convolution joined by a residual addition, the BatchNorm behind them, the input
columns of every layer that reads them. `ChannelMap` says, for every axis of every tensor of a
network, which coordinate belongs to which channel of which group. Nothing here looks at a
network: `task.trace` builds the map, `task.submodel` and `task.gates` use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from task.errors import DataError, did_you_mean
from task.segments import pack, unpack

__all__ = [
    "FIXED",
    "Axis",
    "Bools",
    "ChannelMap",
    "GatePoint",
    "Ints",
    "Kept",
    "State",
    "count_kept",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
State = dict[str, Tensor]
Kept = Mapping[str, Ints]

FIXED = -1  # group index of a coordinate that never goes away


def count_kept(kept: Kept) -> int:
    """Return the number of channels that are kept, over all groups."""
    return sum(map(len, kept.values()))


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of one tensor that carries channels.

    Attributes
    ----------
    group : (n,) int32 — index into the groups of the map, -1 for a coordinate that always stays
    channel : (n,) int64 — channel inside that group, 0 for a coordinate that always stays
    role : 'out' | 'in' | 'depthwise' | 'norm' | 'bias' — what the tensor does with the channels
    """

    group: NDArray[np.int32]
    channel: Ints
    role: str


@dataclass(frozen=True, eq=False)
class GatePoint:
    """A module output on which channels can be multiplied by a gate.

    Attributes
    ----------
    module : qualified name of the module
    axis : axis of its output that carries the channels, never 0, which is the batch
    group, channel : (n,) — as in `Axis`
    """

    module: str
    axis: int
    group: NDArray[np.int32]
    channel: Ints


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """The channel groups of a network and where each tensor carries them.

    Attributes
    ----------
    groups : group name -> width; named after the first parameter that writes it, in execution order
    axes : tensor name -> one entry per axis, None where the whole axis is fixed
    gates : every place where a channel must be multiplied to be switched off
    exact : group name -> True if dropping channels equals setting them to zero
    pinned : tensor, module or operation that could not become a group -> why
    """

    groups: dict[str, int]
    axes: dict[str, tuple[Axis | None, ...]]
    gates: tuple[GatePoint, ...]
    exact: dict[str, bool]
    pinned: dict[str, str]

    @cached_property
    def size(self) -> int:
        """Length C of a channel vector: the widths of all groups together."""
        return sum(self.groups.values())

    @cached_property
    def offsets(self) -> Ints:
        """Start of each group in a channel vector, (groups + 1,)."""
        return np.cumsum([0, *self.groups.values()], dtype=np.int64)

    @cached_property
    def positions(self) -> dict[str, tuple[Ints | None, ...]]:
        """Tensor -> per axis (n,) place in a channel vector; C for a coordinate that stays."""
        return {
            name: tuple(
                None if axis is None else self.position(axis.group, axis.channel) for axis in axes
            )
            for name, axes in self.axes.items()
        }

    def position(self, group: NDArray[np.int32], channel: Ints) -> Ints:
        """Place of each (group, channel) pair in a channel vector, C where the group is -1."""
        return np.where(group == FIXED, self.size, self.offsets[group] + channel)

    def full(self) -> dict[str, Ints]:
        """Every channel of every group."""
        return self.prefix(1.0)

    def prefix(self, keep: float) -> dict[str, Ints]:
        """Return the first max(1, round(keep * width)) channels of every group."""
        return {
            name: np.arange(max(1, round(keep * width)), dtype=np.int64)
            for name, width in self.groups.items()
        }

    def check(self, kept: Kept) -> None:
        """Raise DataError unless each entry is a sorted, non-empty subset of a known group."""
        for name, channels in kept.items():
            if name not in self.groups:
                near = did_you_mean(name, self.groups)
                known = ", ".join(self.groups)
                raise DataError(f"kept: unknown group {name!r}{near}; known: {known}")
            problem = _problem(np.asarray(channels), self.groups[name])
            if problem:
                raise DataError(
                    f"kept[{name!r}] {problem}; give sorted, distinct channel indices "
                    f"between 0 and {self.groups[name] - 1}, at least one"
                )

    def mask(self, kept: Kept) -> Bools:
        """Turn kept indices into a channel vector of bool, (C,); a group not named stays whole."""
        self.check(kept)
        mask = np.zeros(self.size, dtype=np.bool_)
        for start, (name, width) in zip(self.offsets[:-1], self.groups.items(), strict=True):
            if name in kept:
                mask[start + np.asarray(kept[name])] = True
            else:
                mask[start : start + width] = True
        return mask

    def kept(self, mask: Bools) -> dict[str, Ints]:
        """Turn a channel vector of bool, (C,), into kept indices per group."""
        if mask.shape != (self.size,):
            raise DataError(f"mask has shape {mask.shape}; a channel vector has ({self.size},)")
        parts = np.split(mask, self.offsets[1:-1]) if self.groups else []
        return {name: np.flatnonzero(part) for name, part in zip(self.groups, parts, strict=True)}

    def index(self, tensor: str, kept: Kept) -> tuple[Ints | None, ...]:
        """Coordinates of `tensor` that stay, per axis; None where the whole axis stays."""
        return self.stay(tensor, self.mask(kept))

    def stay(self, tensor: str, mask: Bools) -> tuple[Ints | None, ...]:
        """Coordinates of `tensor` that stay under a mask (C,), as `index` for many tensors."""
        if tensor not in self.positions:
            raise DataError(
                f"tensor {tensor!r} is not in the channel map; it knows {len(self.axes)} tensors "
                f"such as {next(iter(self.axes), None)!r}: was it traced from another network?"
            )
        alive = np.append(mask, True)
        return tuple(
            None if place is None else np.flatnonzero(alive[place])
            for place in self.positions[tensor]
        )

    def restrict(self, kept: Kept) -> ChannelMap:
        """Return the map of the network sliced to `kept`, channels numbered from 0 again."""
        mask = self.mask(kept)
        groups = {name: len(channels) for name, channels in self.kept(mask).items()}
        starts = np.cumsum([0, *groups.values()], dtype=np.int64)
        rank = np.append(np.cumsum(mask) - 1, 0)

        def renumber(
            group: NDArray[np.int32], channel: Ints
        ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
            place = self.position(group, channel)
            stay = np.append(mask, True)[place]
            group, place = group[stay], place[stay]
            return group, np.where(group == FIXED, 0, rank[place] - starts[group])

        axes = {
            name: tuple(
                None if axis is None else Axis(*renumber(axis.group, axis.channel), axis.role)
                for axis in rows
            )
            for name, rows in self.axes.items()
        }
        gates = tuple(
            GatePoint(gate.module, gate.axis, *renumber(gate.group, gate.channel))
            for gate in self.gates
        )
        return ChannelMap(groups, axes, gates, dict(self.exact), dict(self.pinned))

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut a channel vector (..., C) into one tensor (..., width) per group."""
        if vector.shape[-1:] != (self.size,):
            raise DataError(
                f"channel vector has shape {tuple(vector.shape)}; its last axis must be {self.size}"
            )
        parts = torch.split(vector, list(self.groups.values()), dim=-1)
        return dict(zip(self.groups, parts, strict=True))

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Put one tensor (..., width) per group together as a channel vector (..., C)."""
        missing = [name for name in self.groups if name not in parts]
        if missing:
            raise DataError(f"join: no values for {missing}; give one tensor for every group")
        return torch.cat([parts[name] for name in self.groups], dim=-1)

    def to_json(self) -> str:
        """Write the map as JSON, coordinates as segments [group, start, length, repeat]."""
        axes = {
            name: [
                axis and {"role": axis.role, "segments": pack(axis.group, axis.channel)}
                for axis in rows
            ]
            for name, rows in self.axes.items()
        }
        gates = [
            {"module": g.module, "axis": g.axis, "segments": pack(g.group, g.channel)}
            for g in self.gates
        ]
        return json.dumps(
            {
                "groups": self.groups,
                "axes": axes,
                "gates": gates,
                "exact": self.exact,
                "pinned": self.pinned,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ChannelMap:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        axes = {
            name: tuple(row and Axis(*unpack(row["segments"]), row["role"]) for row in rows)
            for name, rows in data["axes"].items()
        }
        gates = tuple(
            GatePoint(gate["module"], gate["axis"], *unpack(gate["segments"]))
            for gate in data["gates"]
        )
        return cls(data["groups"], axes, gates, data["exact"], data["pinned"])


def _problem(channels: NDArray[Any], width: int) -> str:
    """Say what is wrong with the kept indices of one group, '' if nothing."""
    if channels.ndim != 1 or channels.dtype.kind not in "iu":
        return f"has shape {channels.shape} and type {channels.dtype}"
    if len(channels) == 0:
        return "is empty"
    if channels.min() < 0 or channels.max() >= width:
        return f"reaches from {channels.min()} to {channels.max()}, out of range"
    if (np.diff(channels) <= 0).any():
        return "is not sorted or holds a channel twice"
    return ""
