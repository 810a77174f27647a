"""Fisher information per channel: how much the task loss depends on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.errors import ShapeError
from task.channels import ChannelMap
from task.data.dataset import Samples
from task.gates import gated

__all__ = [
    "evaluating",
    "federate",
    "gate_fisher",
    "gate_gradients",
    "open_gates",
    "pool",
    "renew",
    "weight_fisher",
]

CLOSED = 2.0**-20
"""Gate of a pruned channel whose weights are present.

At exactly 0 autograd takes the derivative of ReLU to be 0 and the channel would get no Fisher
information however much it matters. Any positive value gives the one-sided derivative at 0+; this
one changes the other channels' input by a millionth, and floating point loses no digits by it.
"""


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
    channel j behind its normalisation. One backward pass per batch serves all channels and domains:
    each sample has its own row of gates, and in eval mode samples do not see each other. (Squaring
    the gradient of the batch mean instead would shrink F like 1/N and change the ranking.)

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
    sums = _DomainSums()
    with evaluating(model):
        for index in torch.arange(len(samples)).split(batch):
            rows = samples.take(index.numpy()).to(_first(model).device)
            gates = open_gates(model, cmap, len(index), closed)
            g = gate_gradients(model, cmap, rows.inputs(slice(None)), rows.y, gates)
            sums.add(g.detach().square(), rows.domain)
    return sums.means()


def gate_gradients(
    model: nn.Module,
    cmap: ChannelMap,
    x: Tensor,
    y: Tensor,
    gates: Mapping[str, Tensor],
    *,
    create_graph: bool = False,
) -> Tensor:
    """Return the gradient of each sample's cross-entropy with respect to its own row of gates.

    Parameters
    ----------
    x : (N, *shape) tensor
    y : (N,) int64 tensor
    gates : mapping of group to (N, W) tensor
        All groups, each requiring gradients.
    create_graph : bool
        Whether the result can be differentiated with respect to the weights.

    Returns
    -------
    (N, C) tensor
    """
    with gated(model, cmap, gates):
        logits = model(x)
    # The sum keeps each sample's own gradient; the mean would divide all of them by N.
    loss = cross_entropy(logits, y, reduction="sum")
    grads = torch.autograd.grad(
        loss, [gates[name] for name in cmap.groups], create_graph=create_graph
    )
    return torch.cat(grads, dim=1)


def open_gates(
    model: nn.Module, cmap: ChannelMap, count: int, closed: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return ``count`` rows of gates that require gradients: 1, or nearly 0 where ``closed``.

    They are float32 at least: gradients of well classified samples vanish in half precision.
    """
    like = _first(model)
    closed = closed or {}
    for name, shut in closed.items():
        if shut.shape != (cmap.groups.get(name, -1),):
            raise ShapeError(
                f"closed[{name!r}]: shape {tuple(shut.shape)}; the groups and their widths are "
                f"{cmap.groups}"
            )
    gates = {}
    for name, width in cmap.groups.items():
        gate = torch.ones(
            count, width, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
        )
        if name in closed:
            gate[:, closed[name].to(like.device)] = CLOSED
        gates[name] = gate.requires_grad_()
    return gates


def weight_fisher(
    model: nn.Module,
    cmap: ChannelMap,
    samples: Samples,
    *,
    closed: Mapping[str, Tensor] | None = None,
    batch: int = 64,
) -> dict[int, Tensor]:
    """Measure the Fisher information of every channel's filter, per domain.

    ``F_j^(k) = mean over x of domain k of ||dL_x / dW_j||^2 / |W_j|``, where ``W_j`` are the weights
    that write channel j (all layers of its group, without bias and normalisation). The division
    by their number lets groups compare; wide layers would win by size otherwise.

    The gradient of a ``closed`` channel's filter vanishes with its gate; divided by the gate it is
    the filter's gradient behind an open gate in the pruned network, exactly.

    Parameters, returns and raises are those of `gate_fisher`.
    """


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, without autocast; restore all of it afterwards.

    Inside, BatchNorm works on copies of its statistics, so that a graph built here stays valid when
    a later training step updates them in place.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer)
        for module in modes
        for name, buffer in module.named_buffers(recurse=False)
        if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    try:
        model.eval()
        for module, name, buffer in buffers:
            setattr(module, name, buffer.clone())
        with torch.autocast(_first(model).device.type, enabled=False):
            yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for module, training in modes.items():
            module.training = training


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
    was never measured gets 0: it ranks last until somebody measures it.

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
        Without NaN.

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
    return torch.where(now, mixed, stale).nan_to_num(nan=0.0)


def _drift(new: Tensor, old: Tensor) -> float:
    scale = float(old.double().sum())
    return float(new.double().sum()) / scale if scale > 0 else 1.0


class _DomainSums:
    """Sums of per-sample rows by domain, in double precision on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, rows: Tensor, domain: Tensor) -> None:
        for k in domain.unique().tolist():
            part = rows[domain == k].cpu().double().sum(0)
            self._sums[k] = self._sums.get(k, 0) + part
            self._counts[k] = self._counts.get(k, 0) + int((domain == k).sum())

    def means(self) -> dict[int, Tensor]:
        return {k: (self._sums[k] / self._counts[k]).float() for k in sorted(self._sums)}


def _first(model: nn.Module) -> Tensor:
    return next(model.parameters())
