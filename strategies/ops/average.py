"""Weighted means of whole networks and of networks that hold different channels."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strategies.errors import ShapeError
from task.channels import Bools, ChannelMap, Ints, Kept, State
from task.submodel import block, lengths

__all__ = ["average_overlap", "check_same", "coverage", "mix", "weighted_mean"]

Cut = tuple[Ints | None, ...]


def weighted_mean(states: Iterable[State], weights: Sequence[float]) -> State:
    """Average networks of one shape: ``sum_i (w_i / sum w) * s_i``.

    Parameters
    ----------
    states : iterable of State
        Same tensors and shapes in each; the sum runs in their order and needs one at a time.
    weights : sequence of float
        One per state, ``>= 0``, usually sample counts.

    Returns
    -------
    State
        New tensors in the dtypes of the first state. Integer tensors (BatchNorm's
        ``num_batches_tracked``) are the largest of all: a mean of counters means nothing.

    Raises
    ------
    ShapeError
        No states, unusable weights, or a tensor that is missing or differs in shape.
    """
    shares, number = _shares(weights), -1
    total: State = {}
    dtypes: dict[str, torch.dtype] = {}
    for number, state in enumerate(states):
        if number == len(shares):
            break
        if not total:
            dtypes = {name: tensor.dtype for name, tensor in state.items()}
            total = {n: torch.zeros_like(t, dtype=_sum_dtype(t)) for n, t in state.items()}
        check_same(number, state, total)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                total[name].add_(tensor.to(total[name].dtype), alpha=shares[number])
            else:
                torch.maximum(total[name], tensor, out=total[name])
    if number + 1 != len(shares):
        raise ShapeError(f"{len(shares)} weights, but not as many networks; give one each")
    return {name: tensor.to(dtypes[name]) for name, tensor in total.items()}


def average_overlap(
    full: State,
    cmap: ChannelMap,
    subs: Sequence[tuple[State, Kept]],
    weights: Sequence[float],
) -> State:
    """Average submodels entry by entry over the clients that hold the entry (HeteroFL).

    ``full[e] <- sum_{i holds e} w_i * sub_i[e] / sum_{i holds e} w_i``; an entry that nobody holds
    stays as it is. When everybody holds everything the result is that of `weighted_mean`, bit for
    bit.

    Parameters
    ----------
    full : State
        The whole network; left untouched.
    subs : sequence of (State, Kept)
        Sliced networks and the channels they were cut to.
    weights : sequence of float
        One per submodel, ``>= 0``.

    Returns
    -------
    State
        New tensors, shapes and dtypes of ``full``.

    Raises
    ------
    ShapeError
        No submodels, unusable weights, or a sliced tensor without the shape of its cut.
    """
    shares = _shares(weights)
    if len(shares) != len(subs):
        raise ShapeError(f"{len(shares)} weights, but {len(subs)} networks; give one each")
    masks = [cmap.mask(kept) for _, kept in subs]
    merged: State = {}
    for name, old in full.items():
        sub_tensors = [_sliced(sub, name) for sub, _ in subs]
        cuts = [_cut(cmap, name, old.shape, mask) for mask in masks]
        for number, (tensor, cut) in enumerate(zip(sub_tensors, cuts, strict=True)):
            _check_cut(name, number, tensor, old, cut)
        if old.is_floating_point():
            merged[name] = _overlap(old, sub_tensors, cuts, shares)
        else:
            merged[name] = largest([t for t in sub_tensors if t.shape == old.shape] or [old])
    return merged


def mix(new: State, old: State, alpha: float) -> State:
    """Return ``alpha * new + (1 - alpha) * old``; counters are the new ones."""
    return {
        name: torch.lerp(old[name], tensor, alpha) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest of ``tensors`` entry by entry."""
    return functools.reduce(torch.maximum, tensors).clone()


def _cut(cmap: ChannelMap, name: str, shape: Sequence[int], mask: Bools) -> Cut:
    index = cmap.stay(name, mask)
    # An axis that stays whole is None: a client of full width then needs no gather.
    return tuple(None if i is None or len(i) == n else i for i, n in zip(index, shape, strict=True))


def _overlap(
    old: Tensor, subs: Sequence[Tensor], cuts: Sequence[Cut], shares: list[float]
) -> Tensor:
    sliced = [any(cut[axis] is not None for cut in cuts) for axis in range(old.dim())]
    total = torch.zeros_like(old, dtype=_sum_dtype(old))
    # Who holds an entry depends on its channel axes only, so the kernel axes are not stored; and
    # double precision lets the shares of a full house sum to exactly one after rounding.
    held = torch.zeros(
        [n if cut else 1 for n, cut in zip(old.shape, sliced, strict=True)], dtype=torch.float64
    )
    for sub, cut, share in zip(subs, cuts, shares, strict=True):
        where = block(old.shape, cut)
        if where is ...:
            total.add_(sub.to(total.dtype), alpha=share)
            held += share
        else:  # indices are unique, so plain += is right, and several times faster than index_put_
            total[where] += sub.to(total.dtype) * share
            held[block(held.shape, cut)] += share
    mean = total / held.to(total.dtype)
    return torch.where(held > 0, mean, old.to(total.dtype)).to(old.dtype)


def coverage(
    cmap: ChannelMap, shapes: Mapping[str, Sequence[int]], kept_list: Sequence[Kept]
) -> dict[int, int]:
    """Count the entries of a network that 0, 1, ..., n clients hold.

    Parameters
    ----------
    shapes : mapping of tensor name to shape
        Which tensors of the whole network to count, usually its parameters.
    kept_list : sequence of Kept
        The channels of each of the n clients.

    Returns
    -------
    dict of int to int
        Number of clients -> entries, all n + 1 keys present; the values sum to the network's size.
    """
    masks = np.array([cmap.mask(kept) for kept in kept_list]).reshape(-1, cmap.size)
    # Clients of one width often hold the very same channels: look at those once.
    masks, clients = np.unique(masks, axis=0, return_counts=True)
    entries = np.zeros(len(kept_list) + 1)
    for name, shape in shapes.items():
        cuts = [_cut(cmap, name, shape, mask) for mask in masks]
        entries += _tensor_coverage(shape, cuts, clients.astype(np.float32), len(entries))
    return dict(enumerate(entries.astype(np.int64).tolist()))


def _tensor_coverage(
    shape: Sequence[int], cuts: Sequence[Cut], clients: np.ndarray, bins: int
) -> np.ndarray:
    left, left_size = np.ones((1, len(cuts)), dtype=bool), np.ones(1)
    right, right_size = left, left_size
    for axis, length in enumerate(shape):
        if all(cut[axis] is None for cut in cuts):
            left_size = left_size * length
            continue
        # Fold what came before into one list of patterns (a no-op for the first two channel axes).
        left, left_size = _combine(left, left_size, right, right_size)
        right, right_size = _patterns(length, [cut[axis] for cut in cuts])
    # Clients that hold entry (a, b) hold row a and column b: a product, counted by one GEMM.
    count = (left * clients) @ right.T.astype(np.float32)
    size = np.outer(left_size, right_size)
    return np.bincount(count.ravel().astype(np.int64), weights=size.ravel(), minlength=bins)


def _patterns(length: int, indices: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of "which client holds this coordinate", and their numbers."""
    held = np.zeros((length, len(indices)), dtype=bool)
    for client, index in enumerate(indices):
        held[slice(None) if index is None else index, client] = True
    packed, size = np.unique(np.packbits(held, axis=1), axis=0, return_counts=True)
    return np.unpackbits(packed, axis=1, count=len(indices)).astype(bool), size.astype(np.float64)


def _combine(
    a: np.ndarray, a_size: np.ndarray, b: np.ndarray, b_size: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    both = (a[:, None] & b[None]).reshape(-1, a.shape[1])
    return both, np.outer(a_size, b_size).ravel()


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _shares(weights: Sequence[float]) -> list[float]:
    if not weights:
        raise ShapeError("there are no networks to average; keep the current one instead")
    bad = [w for w in weights if not (math.isfinite(w) and w >= 0)]
    total = math.fsum(weights) if not bad else 0.0
    if bad or total <= 0:
        raise ShapeError(
            f"weights {list(weights)} cannot form a mean; they must be finite, >= 0, not all 0"
        )
    return [w / total for w in weights]


def check_same(number: int, state: State, first: State) -> None:
    """Refuse a network, ``number`` in its row, that is not of the tensors and shapes of ``first``.

    Raises
    ------
    ShapeError
        A tensor is missing or differs in shape.
    """
    if odd := set(first) ^ set(state):
        raise ShapeError(f"network {number}: {sorted(odd)} exists in it or in network 0 only")
    for name, tensor in first.items():
        if state[name].shape != tensor.shape:
            raise ShapeError(
                f"network {number}, {name}: shape {tuple(state[name].shape)}, network 0 has "
                f"{tuple(tensor.shape)}; networks of different widths need average_overlap"
            )


def _sliced(sub: State, name: str) -> Tensor:
    if name not in sub:
        raise ShapeError(f"{name}: missing in a submodel; send every tensor of the network")
    return sub[name]


def _check_cut(name: str, number: int, sub: Tensor, old: Tensor, cut: Cut) -> None:
    want = lengths(old.shape, cut)
    if tuple(sub.shape) != want:
        raise ShapeError(
            f"submodel {number}, {name}: shape {tuple(sub.shape)}, its kept channels give {want} "
            f"of {tuple(old.shape)}; extract it with the same channels that are passed here"
        )
