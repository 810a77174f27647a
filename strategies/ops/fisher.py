"""Fisher information per channel: how much the task loss depends on it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from strategies.errors import ShapeError
from strategies.ops.filters import filter_squares
from strategies.ops.gradients import (
    Pruning,
    evaluating,
    first_parameter,
    gate_gradients,
    prune,
    unpruned,
)
from task.channels import ChannelMap
from task.data.dataset import Samples

__all__ = ["cap_per_domain", "federate", "gate_fisher", "pool", "renew", "weight_fisher"]


def cap_per_domain(samples: Samples, most: int, draw: torch.Generator) -> Samples:
    """Return at most ``most`` samples of each domain, drawn without replacement."""
    own = [samples.rows(k) for k in samples.counts()]
    drawn = [rows[torch.randperm(len(rows), generator=draw)[:most]] for rows in own]
    return samples.take(torch.cat(drawn).numpy())


def gate_fisher(
    model: nn.Module,
    cmap: ChannelMap,
    samples: Samples,
    *,
    closed: Mapping[str, Tensor] | None = None,
    batch: int = 64,
) -> dict[int, Tensor]:
    """Measure the Fisher information of every channel's gate, per domain.

    ``F_j^(k) = mean over x of domain k of (dL_x / dm_j)^2`` at ``m = 1``, where ``m_j`` multiplies
    channel j behind its normalisation. One backward pass per batch serves all channels and domains,
    because each sample has its own row of gates. (Squaring the gradient of the batch mean instead
    would shrink F like 1/N and change the ranking.)

    Parameters
    ----------
    model : nn.Module
        Left as it was: weights, gradients, BatchNorm statistics, training mode, random state.
    samples : Samples
        Labelled; the empirical Fisher takes the true labels.
    closed : mapping of group to (W,) bool tensor, optional
        Channels that are pruned although ``model`` holds their weights. They get the one-sided
        derivative in the pruned network, all others the value they have in the pruned network.
    batch : int
        Samples per pass.

    Returns
    -------
    dict of int to (C,) float tensor
        Domain index -> Fisher information, on the CPU, for the domains that have samples.

    Raises
    ------
    ShapeError
        ``closed`` names an unknown group or has the wrong width.

    References
    ----------
    Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018; Liu et al.,
    Group Fisher Pruning, ICML 2021 (tied channels: the square of the summed gradients).
    """

    def squares(x: Tensor, y: Tensor, pruning: Pruning) -> Tensor:
        return gate_gradients(model, x, y, pruning).square()

    return _per_domain(squares, model, cmap, samples, closed, batch)


def weight_fisher(
    model: nn.Module,
    cmap: ChannelMap,
    samples: Samples,
    *,
    closed: Mapping[str, Tensor] | None = None,
    batch: int = 64,
) -> dict[int, Tensor]:
    """Measure the Fisher information of every channel's filter, per domain.

    ``F_j^(k) = mean over x of domain k of ||dL_x / dW_j||^2 / |W_j|``, where ``W_j`` are the
    weights that write channel j. The division by their number lets groups compare; wide layers
    would win by size otherwise.

    Parameters, returns and raises are those of `gate_fisher`. A ``closed`` channel gets the value
    of its filter behind an open gate in the pruned network.
    """

    def squares(x: Tensor, y: Tensor, pruning: Pruning) -> Tensor:
        return filter_squares(model, cmap, x, y, pruning)

    return _per_domain(squares, model, cmap, samples, closed, batch)


def _per_domain(
    squares: Callable[[Tensor, Tensor, Pruning], Tensor],
    model: nn.Module,
    cmap: ChannelMap,
    samples: Samples,
    closed: Mapping[str, Tensor] | None,
    batch: int,
) -> dict[int, Tensor]:
    """Average per-sample rows by domain, summed in double precision on the CPU."""
    device = first_parameter(model).device
    sums: dict[int, Tensor] = {}
    counts = samples.domain.cpu().bincount().tolist()
    with evaluating(model):
        pruning = unpruned(model, cmap)
        for start in range(0, len(samples), batch):
            rows = slice(start, start + batch)
            x, y = samples.inputs(rows).to(device), samples.y[rows].to(device)
            if closed and start == 0:
                pruning = prune(model, cmap, closed, x)
            found = squares(x, y, pruning).detach().cpu().double()
            domain = samples.domain[rows].cpu()
            for k in sorted({*domain.tolist()}):
                sums[k] = sums.get(k, torch.zeros(cmap.size).double()) + found[domain == k].sum(0)
    return {k: (sums[k] / counts[k]).float() for k in sorted(sums)}


def pool(per_domain: Mapping[int, Tensor], counts: Mapping[int, int]) -> Tensor:
    """Merge one client's domains: ``F = sum_k alpha_k F^(k)``, ``alpha_k = n_k / sum n``.

    Parameters
    ----------
    per_domain : mapping of domain to (C,) tensor
    counts : mapping of domain to int
        Samples of each domain.

    Returns
    -------
    (C,) tensor

    Raises
    ------
    ShapeError
        No domain, or a domain without a positive count.
    """
    missing = [k for k in per_domain if counts.get(k, 0) <= 0]
    if missing or not per_domain:
        raise ShapeError(
            f"domains {missing or 'none'}: counts are {dict(counts)}; every domain that was "
            "measured needs a positive sample count"
        )
    domains = sorted(per_domain)
    return federate([per_domain[k] for k in domains], [counts[k] for k in domains])


def federate(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Merge clients: ``F_j = sum_i n_i F_ij / sum_i n_i`` over the clients that measured channel j.

    Parameters
    ----------
    vectors : sequence of (C,) tensors
        NaN = not measured by this client.
    weights : sequence of float
        One per vector, ``>= 0``, usually sample counts.

    Returns
    -------
    (C,) tensor
        NaN where nobody measured.

    Raises
    ------
    ShapeError
        No vectors, different lengths, or not one weight per vector.
    """
    if not vectors or len(vectors) != len(weights) or len({v.shape for v in vectors}) != 1:
        raise ShapeError(
            f"{[tuple(v.shape) for v in vectors]} with {len(weights)} weights cannot be merged; "
            "pass at least one vector, all of one length, and one weight for each"
        )
    total = torch.zeros(vectors[0].shape, dtype=torch.float64)
    held = torch.zeros_like(total)
    for vector, weight in zip(vectors, weights, strict=True):
        measured = ~vector.isnan()
        total += vector.nan_to_num().double() * weight
        held += measured * weight
    return (total / held).to(vectors[0].dtype)  # 0 / 0 = NaN: nobody measured


def renew(
    previous: Tensor | None, measured: Tensor, cmap: ChannelMap, kappa: float = 0.0
) -> Tensor:
    """Bring importance up to date with a measurement that may miss channels (NaN).

    Measured channels get ``kappa * previous + (1 - kappa) * measured``. A channel that was not
    measured keeps its last value times its group's drift, ``mean(new) / mean(previous)`` over the
    group's channels that were measured now and known before: raw Fisher information falls tenfold
    during training, and a stale value left as it is would outrank every fresh one. A channel that
    was never measured stays NaN.

    Parameters
    ----------
    previous : (C,) tensor or None
        The result of the last call; NaN = never measured.
    measured : (C,) tensor, >= 0
        NaN = not measured this time. Without any NaN this is the paper's formula.
    kappa : float in [0, 1)
        Inertia; 0 is the paper.

    Returns
    -------
    (C,) tensor
        NaN = never measured.

    Raises
    ------
    ShapeError
        The vectors do not have the network's number of channels.
    """
    before = torch.full_like(measured, torch.nan) if previous is None else previous
    for what, vector in (("previous", before), ("measured", measured)):
        if vector.shape != (cmap.size,):
            raise ShapeError(
                f"{what}: shape {tuple(vector.shape)}, the network has {cmap.size} channels"
            )
    now, known = ~measured.isnan(), ~before.isnan()
    mixed = torch.where(known, kappa * before + (1 - kappa) * measured, measured)
    both = cmap.split(now & known)
    drift = {
        name: _drift(part[both[name]], old[both[name]])
        for (name, part), old in zip(
            cmap.split(mixed).items(), cmap.split(before).values(), strict=True
        )
    }
    stale = cmap.join({name: old * drift[name] for name, old in cmap.split(before).items()})
    return torch.where(now, mixed, stale)


def _drift(new: Tensor, old: Tensor) -> float:
    scale = float(old.double().sum())
    return float(new.double().sum()) / scale if scale > 0 else 1.0
