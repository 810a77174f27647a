"""Which channels stay: the best by importance, and the pruned ones a client takes back."""

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from strategies.errors import ShapeError
from task.channels import Bools, ChannelMap

__all__ = ["jaccard", "nested", "reactivate", "tied", "top_channels"]


def top_channels(
    importance: Tensor,
    cmap: ChannelMap,
    keep: float,
    *,
    scope: str = "layer",
    minimum: float = 0.05,
    whole: Collection[str] = (),
) -> Bools:
    """Choose the most important channels, an exact number of them.

    ``scope="layer"``: the best ``max(least_g, round(keep * W_g))`` of every group.
    ``scope="global"``: the best ``least_g`` of every group, then by rank of ``F / mean_g(F)`` over
    all groups until ``round(keep * C)`` channels are chosen. ``least_g = max(1, ceil(minimum *
    W_g))``. Ties go to the lower index, so every side agrees. The choice is nested in ``keep`` and
    does not change with the scale of ``importance``.

    Parameters
    ----------
    importance : (C,) tensor, >= 0
        A channel vector, for instance the federation's Fisher information.
    keep : float in (0, 1]
        Fraction of channels to keep.
    scope : {"layer", "global"}
        Where channels compete. A literal global cut can empty a layer, because Fisher information
        differs twentyfold between layers: hence the mean and the reserve.
    minimum : float in [0, 1]
        Fraction of each group that stays in any case; at least one channel, two where several
        layers write the group.
    whole : collection of str
        Groups that keep all their channels.

    Returns
    -------
    (C,) bool array
        The mask; ``cmap.kept(mask)`` gives it per group.

    Raises
    ------
    ShapeError
        Wrong shape, negative importance, unknown scope, ``keep`` out of range.
    """
    if not 0 < keep <= 1:
        raise ShapeError(f"keep={keep} is not in (0, 1]; 1.0 keeps all channels")
    measured = _parts(importance, cmap, unmeasured=True)
    parts = {name: np.nan_to_num(part) for name, part in measured.items()}
    least = _least(cmap, minimum, whole)
    if scope == "layer":
        count = {n: max(least[n], round(keep * len(part))) for n, part in parts.items()}
        return np.concatenate([_best(part, count[name]) for name, part in parts.items()])
    if scope == "global":
        return _global(parts, least, keep)
    raise ShapeError(f"scope={scope!r} is unknown; choose 'layer' or 'global'")


def nested(
    importance: Tensor | None, mask: Bools, cmap: ChannelMap, most: Mapping[str, int]
) -> Bools:
    """Choose the best of the channels in ``mask``, at most ``most[g]`` of each group.

    Parameters
    ----------
    importance : (C,) tensor, >= 0, or None
        NaN = not measured, chosen last; ties, and all channels with None, go by lower index.
    mask : (C,) bool array
        The channels to choose from.
    most : mapping of group to int

    Returns
    -------
    (C,) bool array
        A subset of ``mask``, itself where ``most`` allows; nested in ``most``.

    Raises
    ------
    ShapeError
        Wrong shape or negative importance.
    """
    known = torch.zeros(cmap.size) if importance is None else importance
    inside = _parts(torch.as_tensor(mask), cmap)
    chosen = []
    for name, part in _parts(known, cmap, unmeasured=True).items():
        here = inside[name].astype(bool)
        score = np.where(here, np.nan_to_num(part, nan=-1.0), -np.inf)
        chosen.append(_best(score, min(most[name], int(here.sum()))))
    return np.concatenate(chosen)


def tied(cmap: ChannelMap) -> set[str]:
    """Return the groups that several layers write: streams of residual blocks, attention heads."""
    written = [
        index
        for axes in cmap.axes.values()
        for axis in axes
        if axis is not None and axis.role == "out"
        for index in np.unique(axis.group[axis.group >= 0]).tolist()
    ]
    return {name for index, name in enumerate(cmap.groups) if written.count(index) > 1}


def _least(cmap: ChannelMap, minimum: float, whole: Collection[str]) -> dict[str, int]:
    several = tied(cmap)
    least = {}
    for name, width in cmap.groups.items():
        fewest = min(width, 2 if name in several else 1)
        least[name] = width if name in whole else max(fewest, math.ceil(minimum * width))
    return least


def _global(parts: dict[str, np.ndarray], least: dict[str, int], keep: float) -> Bools:
    reserved = np.concatenate([_best(part, least[name]) for name, part in parts.items()])
    score = np.concatenate([part / (part.mean() or 1.0) for part in parts.values()])
    score[reserved] = np.inf
    return _best(score, max(int(reserved.sum()), round(keep * len(score))))


def _best(values: np.ndarray, count: int) -> Bools:
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def reactivate(
    fisher: Tensor,
    mask: Bools,
    cmap: ChannelMap,
    *,
    phi: float,
    mode: str = "relative",
    budget: float = 0.1,
) -> Bools:
    """Choose the pruned channels that matter to one client: ``R_j = 1[F_j > theta] * (1 - M_j)``.

    ``theta`` per group g is ``phi * mean of F over the shared channels of g`` (``"relative"``), the
    ``phi``-quantile of the same (``"quantile"``) or ``phi`` itself (``"absolute"``, the paper's
    wording; raw Fisher information falls tenfold during training, which makes it hard to set).

    Parameters
    ----------
    fisher : (C,) tensor
        The client's own importance; NaN = not measured, never taken back.
    mask : (C,) bool array
        The shared channels.
    phi : float >= 0
        Threshold: a larger one gives a subset; ``inf`` gives nothing. At most 1 for ``"quantile"``.
    budget : float in [0, 1]
        At most this fraction of each group's width is taken back, the largest values first.

    Returns
    -------
    (C,) bool array
        The private channels; disjoint from ``mask``.

    Raises
    ------
    ShapeError
        Wrong shape, negative importance, unknown mode, ``phi`` or ``budget`` out of range.
    """
    highest = 1.0 if mode == "quantile" else math.inf
    if not (0 <= phi <= highest or phi == math.inf):
        raise ShapeError(f"phi={phi} is not in [0, {highest}], nor inf, which takes nothing back")
    if not 0 <= budget <= 1:
        raise ShapeError(f"budget={budget} is not a fraction of a group's width in [0, 1]")
    parts = _parts(fisher, cmap, unmeasured=True)
    shared = _parts(torch.as_tensor(mask), cmap)
    chosen = []
    for name, part in parts.items():
        inside = shared[name].astype(bool)
        theta = _threshold(part[inside & ~np.isnan(part)], phi, mode)
        # -inf sorts last and passes no threshold: shared and unmeasured channels cannot be chosen.
        outside = np.where(inside | np.isnan(part), -np.inf, part)
        most = math.floor(budget * len(part) + 1e-9)  # 0.29 * 100 is 28.999...
        chosen.append(_best(outside, most) & (outside > theta))
    return np.concatenate(chosen)


def _threshold(shared: np.ndarray, phi: float, mode: str) -> float:
    if mode not in ("relative", "quantile", "absolute"):
        raise ShapeError(f"mode={mode!r} is unknown; choose 'relative', 'quantile' or 'absolute'")
    if phi == math.inf:
        return math.inf  # not phi * mean: the mean may be 0
    if mode == "absolute":
        return phi
    if len(shared) == 0:
        return math.inf  # nothing measured to compare with
    return phi * float(shared.mean()) if mode == "relative" else float(np.quantile(shared, phi))


def jaccard(a: Bools, b: Bools) -> float:
    """Return the overlap of two masks, ``|a and b| / |a or b|``; 1.0 for two empty ones.

    Parameters
    ----------
    a, b : (C,) bool arrays

    Raises
    ------
    ShapeError
        The masks differ in length.
    """
    if a.shape != b.shape:
        raise ShapeError(f"masks of {a.shape} and {b.shape} channels belong to different networks")
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0


def _parts(vector: Tensor, cmap: ChannelMap, *, unmeasured: bool = False) -> dict[str, np.ndarray]:
    if vector.shape != (cmap.size,):
        raise ShapeError(
            f"a channel vector of shape {tuple(vector.shape)} was given, the network has "
            f"{cmap.size} channels; pass the map that the vector was measured with"
        )
    parts = {
        name: part.detach().double().cpu().numpy() for name, part in cmap.split(vector).items()
    }
    for name, part in parts.items():
        if (part < 0).any() or (np.isnan(part).any() and not unmeasured):
            raise ShapeError(
                f"{name}: importance must be >= 0 and measured, found {part.min()}; "
                "renew() fills in what was not measured"
            )
    return parts
