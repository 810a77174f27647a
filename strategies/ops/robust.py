"""Merging entry by entry: the weighted mean, or a median or trimmed mean no single client can move.

A median or trimmed mean does not weigh by samples: a client says how many it has, and a liar
would buy influence. An entry that one or two clients hold is their plain mean, for among so few
nobody is in the majority.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strategies.errors import ShapeError
from strategies.ops.average import average_overlap, check_same, weighted_mean
from strategies.ops.fisher import federate
from task.channels import ChannelMap, Kept, State
from task.submodel import scatter

__all__ = ["Merge", "middle"]


@dataclass(frozen=True)
class Merge:
    """How the values that clients sent for one entry become one.

    Parameters
    ----------
    kind : str
        ``mean`` (weighted), ``median`` or ``trimmed`` (mean without the extremes).
    trim : float in [0, 0.5)
        Fraction of the values that ``trimmed`` drops on each side, rounded down to whole ones.
    """

    kind: Literal["mean", "median", "trimmed"] = "mean"
    trim: float = 0.2

    def networks(self, states: Iterable[State], weights: Sequence[float]) -> State:
        """Merge networks of one shape; ``weights`` count for the mean alone.

        The mean takes them one by one; the others need them all in memory.

        Raises
        ------
        ShapeError
            As `weighted_mean`.
        """
        if self.kind == "mean":
            return weighted_mean(states, weights)
        held = list(states)
        if not held:
            raise ShapeError("there are no networks to average; keep the current one instead")
        for number, state in enumerate(held):
            check_same(number, state, held[0])
        return {name: self._middle(torch.stack([s[name] for s in held])) for name in held[0]}

    def overlapping(
        self,
        full: State,
        cmap: ChannelMap,
        subs: Sequence[tuple[State, Kept]],
        weights: Sequence[float],
    ) -> State:
        """Merge submodels over the clients that hold an entry; nobody's entry stays as it is.

        Raises
        ------
        ShapeError
            As `average_overlap`.
        """
        mean = average_overlap(full, cmap, subs, weights)  # it checks the submodels as well
        if self.kind == "mean":
            return mean
        return {name: self._spread(name, old, cmap, subs) for name, old in full.items()}

    def vectors(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Merge (C,) vectors over the clients that measured an entry; NaN = not measured.

        Raises
        ------
        ShapeError
            As `federate`.
        """
        mean = federate(vectors, weights)
        return mean if self.kind == "mean" else self._middle(torch.stack(list(vectors)))

    def _spread(
        self, name: str, old: Tensor, cmap: ChannelMap, subs: Sequence[tuple[State, Kept]]
    ) -> Tensor:
        if not old.is_floating_point():
            whole = [sub[name] for sub, _ in subs if sub[name].shape == old.shape]
            return self._middle(torch.stack(whole or [old]))
        # One tensor of all clients at a time: a stack of whole networks may not fit.
        rows = torch.full((len(subs), *old.shape), torch.nan, dtype=old.dtype)
        for row, (sub, kept) in zip(rows, subs, strict=True):
            scatter({name: sub[name]}, cmap, kept, {name: row})
        merged = self._middle(rows)
        return torch.where(merged.isnan(), old, merged)

    def _middle(self, rows: Tensor) -> Tensor:
        return middle(rows, None if self.kind == "median" else self.trim)


def middle(rows: Tensor, trim: float | None) -> Tensor:
    """Return the mean of the middle values of every column; NaN = no value.

    Parameters
    ----------
    rows : (n, ...) tensor
        One row per client.
    trim : float in [0, 0.5), or None
        Fraction of a column's values dropped on each side, rounded down; None = the median.

    Returns
    -------
    (...) tensor
        Of the same dtype. NaN where no row has a value. Integers are the lower median, whatever
        ``trim``: a mean of counters means nothing.

    Raises
    ------
    ShapeError
        ``trim`` is out of range.
    """
    if trim is not None and not 0 <= trim < 0.5:
        raise ShapeError(f"trim = {trim}: must be in [0, 0.5), or nothing is left to average")
    ordered = rows.sort(dim=0).values  # NaN last
    if not rows.is_floating_point():
        return ordered[(len(rows) - 1) // 2].clone()
    sizes = range(len(rows) + 1)
    drops = [max(0, n - 1) // 2 if trim is None else int(trim * n) for n in sizes]
    count = (~rows.isnan()).sum(0)
    low = torch.tensor(drops, device=rows.device)[count]
    place = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    inside = (place >= low) & (place < count - low)
    total = torch.where(inside, ordered, 0.0).sum(0, dtype=torch.float64)
    return (total / inside.sum(0)).to(rows.dtype)  # 0 / 0 = NaN: no value at all
