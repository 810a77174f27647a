"""Transport plans between the channels of two networks of different widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.errors import ShapeError
from task.channels import Ints

__all__ = ["Plan", "transpose"]

Floats = NDArray[np.float64]
Share = float | Floats


@dataclass(frozen=True, eq=False)
class Plan:
    """A coupling of n source channels with m target channels, as the list of its positive entries.

    Two normalisations of the same plan move a network. A target channel *averages* its sources, so
    what it writes is moved with ``out``, whose columns sum to 1; its readers need the *sum* of what
    its sources handed on, so their inputs are moved with ``into``, whose rows sum to 1.

    Attributes
    ----------
    source, target : (p,) int64 — the channels of each entry; every channel occurs at least once
    mass : (p,) float64 — positive, in any unit: whole numbers wherever the plan is a hard map
    shape : (n, m)
    """

    source: Ints
    target: Ints
    mass: Floats
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        sides = (("source", self.source), ("target", self.target))
        for (side, ends), width in zip(sides, self.shape, strict=True):
            lost = np.flatnonzero(np.bincount(ends, self.mass, width) <= 0)
            if len(lost):
                raise ShapeError(
                    f"plan {self.shape}: {side} channels {lost[:5].tolist()} have no mass; a plan "
                    "must couple every channel (sinkhorn: a larger reg converges faster)"
                )

    @property
    def coupling(self) -> Floats:
        """The plan as a matrix (n, m) of total mass 1."""
        return self._matrix(self.mass / self.mass.sum())

    @property
    def out(self) -> Floats:
        """(n, m), columns sum to 1: for what channels write."""
        return self._matrix(self._share(self.target))

    @property
    def into(self) -> Floats:
        """(n, m), rows sum to 1: for what channels are read into."""
        return self._matrix(self._share(self.source))

    def _share(self, ends: Ints) -> Floats:
        """Mass of each entry as a fraction of all mass at its end."""
        share: Floats = self.mass / np.bincount(ends, self.mass)[ends]
        return share

    def _matrix(self, values: Floats) -> Floats:
        matrix = np.zeros(self.shape)
        matrix[self.source, self.target] = values
        return matrix

    @cached_property
    def _slots(self) -> list[tuple[Ints, Share, Share]]:
        """The k-th source of every target, (m,), and its shares of `out` and `into`.

        A target with fewer sources has an arbitrary one of share 0; shares that are all the same
        are one number.
        """
        order = np.lexsort((self.source, self.target))
        target, counts = self.target[order], np.bincount(self.target)
        slot = np.arange(len(order)) - (np.cumsum(counts) - counts)[target]
        index = np.zeros((counts.max(), self.shape[1]), np.int64)
        out, into = np.zeros(index.shape), np.zeros(index.shape)
        index[slot, target] = self.source[order]
        out[slot, target] = self._share(self.target)[order]
        into[slot, target] = self._share(self.source)[order]
        return [(index[k], _compact(out[k]), _compact(into[k])) for k in range(len(index))]

    def move(self, tensor: Tensor, axis: int, *, into: bool) -> Tensor:
        """Move one axis of a tensor from the source's channels to the target's.

        ``y_b = sum_a T_ab x_a`` with ``T`` = `into` or `out`. A plan with few sources per target is
        applied by gathering: reading k slices is several times cheaper than a product.

        Parameters
        ----------
        tensor : (..., n, ...) floating point, on the CPU
        axis : int
        into : bool
            Whether the tensor reads these channels; otherwise it writes them.

        Returns
        -------
        (..., m, ...) tensor of the same type
        """
        # numpy gathers along an inner axis twice as fast as torch.
        x = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
        if len(self._slots) * self.shape[1] > 4 * max(self.shape):
            matrix = (self.into if into else self.out).astype(x.dtype)
            moved = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix, -1, axis)
            return torch.from_numpy(np.ascontiguousarray(moved)).to(tensor.dtype)
        total = np.zeros(0)
        for k, (index, *shares) in enumerate(self._slots):
            part, share = x.take(index, axis), shares[into]
            if isinstance(share, np.ndarray):
                part *= share.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1 - axis))
            elif share != 1:
                part *= share
            total = np.add(total, part, out=total) if k else part
        return torch.from_numpy(total).to(tensor.dtype)

    def reverse(self) -> Plan:
        """Return the same coupling from target to source."""
        return Plan(self.target, self.source, self.mass, (self.shape[1], self.shape[0]))


def _compact(shares: Floats) -> Share:
    return float(shares[0]) if (shares == shares[0]).all() else shares


def transpose(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Turn plans from a to b into plans from b to a."""
    return {name: plan.reverse() for name, plan in plans.items()}
