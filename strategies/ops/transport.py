"""Move a network into the channels of another one of a different width, by optimal transport.

Every channel group gets one plan. Groups are taken in the order in which they are first written;
the cost of a group compares all rows that write its channels, after their inputs have been moved
along the plans found before. A residual group is written again by layers that read inner groups,
which read the residual group itself: those writers are left out in the first sweep and seen in
further ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.errors import ShapeError
from strategies.ops.plans import Plan, transpose
from strategies.ops.rows import (
    distances,
    distinct_rows,
    groups_of,
    move_axis,
    rows_of,
    sketch,
    writers_of,
)
from strategies.ops.solvers import solve
from task.channels import ChannelMap, State
from task.options import Interval, check_options

__all__ = ["TransportOptions", "align", "apply", "distinct_rows", "plan_groups", "transpose"]

FLOOR = 1e-3  # least importance relative to the mean: a source without mass would be lost


@dataclass(frozen=True)
class TransportOptions:
    """How plans are found.

    Attributes
    ----------
    solver : 'balanced', 'emd' (the paper's; it mixes channels where no width divides the other),
        'cover' or 'sinkhorn', see `strategies.ops.solvers`
    squared : compare rows by the squared Euclidean distance, not by the distance
    sweeps : passes over the groups
    bn_in_cost : let biases and the affine part of norms count as coordinates of a row
    reg : regularisation of 'sinkhorn' relative to the mean cost
    importance : what the importance of the source's channels is for: nothing; a factor on their
        cost; or their mass, for the solvers that can split channels
    sketch : compare random projections of rows to this many coordinates; 0 compares the rows
    """

    solver: Literal["balanced", "emd", "cover", "sinkhorn"] = "balanced"
    squared: bool = True
    sweeps: Annotated[int, Interval(1)] = 1
    bn_in_cost: bool = True
    reg: Annotated[float, Interval(0, open_low=True)] = 0.01
    importance: Literal["none", "cost", "marginals"] = "none"
    sketch: Annotated[int, Interval(0)] = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.importance == "marginals" and self.solver in ("balanced", "cover"):
            raise ValueError(
                f"importance = 'marginals': solver {self.solver!r} makes hard maps, in which every "
                "channel has the same mass; use solver emd or sinkhorn, or importance = 'cost'"
            )


DEFAULT = TransportOptions()


def plan_groups(
    source: State,
    target: State,
    source_map: ChannelMap,
    target_map: ChannelMap,
    options: TransportOptions = DEFAULT,
    importance: Tensor | None = None,
) -> dict[str, Plan]:
    """Find the plan of every channel group.

    ``C_ab = sum over tensors w that write the group of |(w_source T_in)[a] - w_target[b]|^2``,
    where ``T_in`` is the plan of the channels that w reads.

    Parameters
    ----------
    source, target : mapping of tensor name to tensor
        Networks of one architecture in different widths, on the CPU.
    source_map, target_map : ChannelMap
        Their maps, both restrictions of one dense map.
    options : TransportOptions
    importance : (C,) tensor, >= 0, optional
        Of the source's channels; needed if the options use it.

    Returns
    -------
    dict of str to Plan
        Group -> plan of shape (source's width, target's width).

    Raises
    ------
    ShapeError
        Networks and maps that do not belong together, weights that are not finite, or importance
        that is missing, not finite or negative.

    References
    ----------
    Singh and Jaggi, Model fusion via optimal transport, NeurIPS 2020 (equal widths, no groups).
    """
    alignment = _Alignment(source, source_map, target_map)
    alignment.plan(target, options, importance)
    return alignment.plans


def align(
    source: State,
    target: State,
    source_map: ChannelMap,
    target_map: ChannelMap,
    options: TransportOptions = DEFAULT,
    importance: Tensor | None = None,
) -> State:
    """Express a network in the widths and the order of channels of another one.

    The same as `apply` of `plan_groups`, which has the same parameters, but weights whose inputs
    were moved to find the plans are not moved a second time.

    Returns
    -------
    State
        The values of ``source`` in the shapes of ``target``.
    """
    alignment = _Alignment(source, source_map, target_map)
    alignment.plan(target, options, importance)
    return alignment.finish()


def apply(
    state: State, source_map: ChannelMap, plans: Mapping[str, Plan], target_map: ChannelMap
) -> State:
    """Move a network along known plans.

    Merged channels: outputs, biases, norms with their running statistics and depthwise weights
    become means, inputs become sums. Split channels: the former are copied, inputs are divided.
    Axes without channels and whole-number tensors stay.

    Parameters
    ----------
    state : mapping of tensor name to tensor
    source_map, target_map : ChannelMap
        Of ``state`` and of the result.
    plans : mapping of group to Plan
        One for every group.

    Returns
    -------
    State
        New tensors in the target's shapes.

    Raises
    ------
    ShapeError
        A plan is missing or does not fit the widths of the maps.
    """
    alignment = _Alignment(state, source_map, target_map)
    for name, width in source_map.groups.items():
        shape, found = (width, target_map.groups[name]), plans[name].shape if name in plans else ()
        if shape != found:
            raise ShapeError(
                f"group {name!r}: found {found or 'no plan'}, needs a plan of shape {shape}; "
                "pass the plans that were made for these two maps"
            )
    alignment.found.update(enumerate(plans[name] for name in source_map.groups))
    return alignment.finish()


class _Alignment:
    """A network on its way: the plans found so far, and its weights with their inputs moved."""

    def __init__(self, source: State, source_map: ChannelMap, target_map: ChannelMap) -> None:
        if list(source_map.groups) != list(target_map.groups):
            odd = sorted({*source_map.groups} ^ {*target_map.groups})
            raise ShapeError(f"the maps differ in groups {odd}; pass restrictions of one dense map")
        _check(source, source_map, "source")
        self.source, self.source_map, self.target_map = source, source_map, target_map
        self.found: dict[int, Plan] = {}
        self.half: dict[str, Tensor] = {}

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each group by name."""
        return {name: self.found[number] for number, name in enumerate(self.source_map.groups)}

    def plan(self, target: State, options: TransportOptions, importance: Tensor | None) -> None:
        """Solve the groups in order, as many times as there are sweeps."""
        _check(target, self.target_map, "target")
        weights = _weights(importance, self.source_map, options)
        writers = writers_of(self.target_map, vectors=options.bn_in_cost)
        for sweep in range(options.sweeps):
            for number, name in enumerate(self.source_map.groups):
                pairs = self.pairs(number, writers[number], target, options.sketch)
                shape = (self.source_map.groups[name], self.target_map.groups[name])
                cost = distances(pairs, shape, squared=options.squared)
                if not np.isfinite(cost).all():
                    raise ShapeError(f"group {name!r}: its weights are not finite; leave it out")
                if options.importance == "cost":
                    cost *= weights[name][:, None]
                supply = weights[name] if options.importance == "marginals" else None
                self.found[number] = solve(cost, options.solver, supply, options.reg)
                if sweep:  # in the first one, nothing that reads this group has been moved yet
                    self.half.clear()

    def pairs(
        self, number: int, writers: list[tuple[str, int]], target: State, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the rows that write a group in both networks, where their inputs have plans."""
        pairs = []
        for name, d in writers:
            if self.reads(name) <= self.found.keys():
                mine = rows_of(self.moved(name), d, self.source_map, name, number)
                theirs = rows_of(target[name], d, self.target_map, name, number)
                if size:
                    mine, theirs = sketch(mine, size, name), sketch(theirs, size, name)
                pairs.append((mine, theirs))
        if size and pairs:  # the sketches of parts add up to the sketch of the whole row
            mine, theirs = (torch.stack(side).sum(0) for side in zip(*pairs, strict=True))
            return [(mine, theirs)]
        return pairs

    def reads(self, name: str) -> set[int]:
        """Return the groups among the inputs of a tensor."""
        axes = [axis for axis in self.source_map.axes[name] if axis and axis.role == "in"]
        return {number for axis in axes for number in groups_of(axis)}

    def moved(self, name: str) -> Tensor:
        """Return a tensor of the source with its inputs, but not its outputs, moved."""
        if name not in self.half:
            self.half[name] = self.move(self.source[name].detach(), name, inputs=True)
        return self.half[name]

    def move(self, tensor: Tensor, name: str, *, inputs: bool) -> Tensor:
        """Move the input axes of a tensor or all others."""
        pairs = zip(self.source_map.axes[name], self.target_map.axes[name], strict=True)
        for d, (before, after) in enumerate(pairs):
            if before is not None and after is not None and (before.role == "in") == inputs:
                tensor = move_axis(tensor, d, before, after, self.found)
        return tensor

    def finish(self) -> State:
        """Move all that has not been moved yet."""
        result = {}
        for name, tensor in self.source.items():
            moved = self.move(self.moved(name), name, inputs=False)
            result[name] = moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved
        return result


def _check(state: State, cmap: ChannelMap, whose: str) -> None:
    """Refuse a network that is not the one of the map."""
    odd = sorted(state.keys() ^ cmap.axes.keys())
    if odd:
        raise ShapeError(
            f"{whose}: {odd[:3]} are in the network or in its map only; pass its own map"
        )
    for name, axes in cmap.axes.items():
        shape = state[name].shape
        if any(axis and len(axis.group) != n for n, axis in zip(shape, axes, strict=True)):
            want = [len(a.group) if a else n for n, a in zip(shape, axes, strict=True)]
            raise ShapeError(
                f"{whose}: {name} has shape {tuple(shape)}, its map says {tuple(want)}; restrict "
                "the dense map to the channels that this network was cut to"
            )


def _weights(
    importance: Tensor | None, cmap: ChannelMap, options: TransportOptions
) -> dict[str, NDArray[np.float64]]:
    """Return the importance of the source's channels relative to the mean of their group."""
    if options.importance == "none":
        return {}
    if importance is None or importance.shape != (cmap.size,):
        found = "nothing" if importance is None else f"shape {tuple(importance.shape)}"
        raise ShapeError(f"importance: found {found}, the source has {cmap.size} channels")
    if not importance.isfinite().all() or (importance < 0).any():
        raise ShapeError("importance must be finite and >= 0; fill in what was not measured")
    parts = {name: part.double().numpy() for name, part in cmap.split(importance.detach()).items()}
    return {
        name: np.maximum(part / part.mean(), FLOOR) if part.any() else np.ones(len(part))
        for name, part in parts.items()
    }
