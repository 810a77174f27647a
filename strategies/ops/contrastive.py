"""Signatures of domains, their prototypes, and the loss that keeps domains apart (FEDFIP, DSR)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from strategies.errors import ShapeError
from strategies.ops.gradients import evaluating, gate_gradients, unpruned
from task.channels import Bools, ChannelMap
from task.gates import gated

__all__ = ["contrastive_loss", "move_prototypes", "reproject", "signature", "structural_loss"]

Prototypes = Mapping[int, Tensor]


def signature(
    fisher: Tensor,
    mask: Bools | Tensor,
    cmap: ChannelMap,
    *,
    norm: str = "global",
    eps: float = 1e-30,
) -> Tensor:
    """Turn Fisher information into a point of the simplex: ``V_j = F_j M_j / sum_j F_j M_j``.

    Parameters
    ----------
    fisher : (C,) tensor, >= 0
        Differentiated through; its scale does not matter. Values outside ``mask`` may be NaN.
    mask : (C,) bool
        The shared channels.
    norm : {"global", "layer"}
        ``"layer"`` gives every group the same mass; in the paper's ``"global"`` form a few early
        layers have most of it.
    eps : float
        Smallest sum that is divided by. Not added: a well trained network's Fisher information is
        1e-12 and less, and V must still sum to 1.

    Returns
    -------
    (C,) tensor
        Sums to 1, or is all 0 if no shared channel has information.

    Raises
    ------
    ShapeError
        Lengths differ or ``norm`` is unknown.
    """
    inside = torch.as_tensor(mask, device=fisher.device)
    if not fisher.shape == inside.shape == (cmap.size,):
        raise ShapeError(
            f"fisher {tuple(fisher.shape)} and mask {tuple(inside.shape)} must both have the "
            f"network's {cmap.size} channels"
        )
    shared = torch.where(inside, fisher, torch.zeros_like(fisher))
    if norm == "layer":
        parts = cmap.split(shared)
        shared = cmap.join({name: _simplex(part, eps) for name, part in parts.items()})
    elif norm != "global":
        raise ShapeError(f"norm={norm!r} is unknown; choose 'global' or 'layer'")
    return _simplex(shared, eps)


def _simplex(values: Tensor, eps: float) -> Tensor:
    return values / values.sum().clamp_min(eps)


def move_prototypes(
    prototypes: Prototypes, uploads: Iterable[Mapping[int, tuple[Tensor, int]]], mu: float
) -> dict[int, Tensor]:
    """Move every domain's prototype towards this round's signatures.

    ``p~ = sum_i n_i V_i / sum_i n_i`` over the clients that hold the domain, then
    ``p <- mu * p + (1 - mu) * p~``; a domain seen for the first time gets ``p~``, one that nobody
    saw this round keeps its prototype.

    Parameters
    ----------
    prototypes : mapping of domain to (C,) tensor
    uploads : iterable of mappings of domain to ((C,) tensor, int)
        Per client, in a fixed order: signature and number of samples.
    mu : float in [0, 1]
        Inertia: 0 takes the current mean, 1 freezes.

    Returns
    -------
    dict of int to (C,) tensor
        In order of the domains.

    Raises
    ------
    ShapeError
        ``mu`` is out of range.
    """
    if not 0 <= mu <= 1:
        raise ShapeError(f"mu={mu} is not in [0, 1]; 0 follows the current round, 1 freezes")
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for upload in uploads:
        for k, (v, n) in upload.items():
            sums[k] = sums.get(k, torch.zeros_like(v)) + n * v
            counts[k] = counts.get(k, 0) + n
    moved = dict(prototypes)
    for k, total in sums.items():
        if counts[k] > 0:
            mean = total / counts[k]
            moved[k] = mu * prototypes[k] + (1 - mu) * mean if k in prototypes else mean
    return dict(sorted(moved.items()))


def reproject(prototypes: Prototypes, mask: Bools | Tensor) -> dict[int, Tensor]:
    """Put prototypes back on the simplex of a new mask: ``p <- p M / sum(p M)``.

    Without it mass stays on channels that no longer exist. A prototype that has no mass on the new
    mask becomes uniform over it.

    Parameters
    ----------
    prototypes : mapping of domain to (C,) tensor
    mask : (C,) bool

    Returns
    -------
    dict of int to (C,) tensor
    """
    projected = {}
    for k, p in prototypes.items():
        inside = torch.as_tensor(mask, device=p.device).to(p.dtype)
        left = p * inside
        projected[k] = _simplex(left if left.sum() > 0 else inside, 1e-30)
    return projected


def contrastive_loss(v: Tensor, prototypes: Prototypes, domain: int, tau: float = 1.0) -> Tensor:
    """Compare a signature with all prototypes: ``-log softmax_k(cos(v, p^(k)) / tau)[domain]``.

    At ``tau = 1`` (the paper) it lies in ``[log(1 + (K-1)/e), log(1 + (K-1)e)]``, because cosines
    on the simplex are not negative.

    Parameters
    ----------
    v : (C,) tensor
        Signature of one domain; differentiated through.
    prototypes : mapping of domain to (C,) tensor
        The K prototypes there are.
    domain : int
        The domain of ``v``.
    tau : float > 0
        Temperature; a smaller one gives larger gradients.

    Returns
    -------
    () tensor
        0 when there is nothing to compare: fewer than two prototypes, or none of this domain.

    Raises
    ------
    ShapeError
        ``tau`` is not positive.
    """
    if not tau > 0:
        raise ShapeError(f"tau={tau} must be positive; 1.0 is the paper's softmax")
    if not _comparable(prototypes, domain):
        return v.new_zeros(())
    known = sorted(prototypes)
    others = torch.stack([prototypes[k].to(v) for k in known])
    similarity = cosine_similarity(v.unsqueeze(0), others, dim=1) / tau
    return -torch.log_softmax(similarity, dim=0)[known.index(domain)]


def _comparable(prototypes: Prototypes, domain: int) -> bool:
    return len(prototypes) > 1 and domain in prototypes


def structural_loss(
    model: nn.Module,
    cmap: ChannelMap,
    x: Tensor,
    y: Tensor,
    domain: int,
    prototypes: Prototypes,
    mask: Bools | Tensor,
    *,
    tau: float = 1.0,
    mode: str = "double",
    norm: str = "global",
    change: float = 1.0,
) -> Tensor | None:
    """Return L_con of a batch of one domain as a scalar to add to the loss of a training step.

    The signature is made of squared gradients, so its gradient is a second derivative. ``"double"``
    differentiates twice, exact almost everywhere. ``"gate-fd"`` uses
    ``grad_w L_con = grad_w <v, grad_m L_sum>`` with ``v_xj = 2 c_j g_xj / N`` and
    ``c_j = dL_con / dF_j`` held constant, and reads the product off a central difference on the
    gates, ``(L_sum(1 + s v) - L_sum(1 - s v)) / (2 s)``: cheaper, no second-order autograd. (A
    detached signature would be a constant without gradient, a silent no-op.)

    Parameters
    ----------
    model : nn.Module
        Evaluated with BatchNorm's running statistics, since batch statistics couple the samples;
        statistics and modes are left as they were.
    x, y : (N, *shape) and (N,) tensors
        Samples of ``domain`` only; 16 or more for a usable signature.
    prototypes : mapping of domain to (C,) tensor
    mask : (C,) bool
        The shared channels: private ones have no part in the signature.
    mode : {"double", "gate-fd", "none"}
    tau, norm
        See `contrastive_loss` and `signature`.
    change : float
        Largest change of a gate in ``"gate-fd"``. Not small: near a kink of ReLU the quotient of a
        small step explodes.

    Returns
    -------
    () tensor or None
        L_con, with its gradient with respect to the weights; None = nothing to add: ``"none"``,
        too few prototypes, or a batch without any gradient.

    Raises
    ------
    ShapeError
        ``mode`` is unknown, or an argument does not fit the network.
    """
    if mode not in ("double", "gate-fd", "none"):
        raise ShapeError(f"mode={mode!r} is unknown; choose 'double', 'gate-fd' or 'none'")
    if mode == "none" or not _comparable(prototypes, domain):
        return None
    with evaluating(model):
        whole = unpruned(model, cmap)
        g = gate_gradients(model, x, y, whole, create_graph=mode == "double")
        fisher = g.square().mean(0).requires_grad_()
        v = signature(fisher, mask, cmap, norm=norm)
        if v.sum() < 0.5:  # all gradients vanish, so there is no signature
            return None
        loss = contrastive_loss(v, prototypes, domain, tau)
        if mode == "double":
            return loss
        (c,) = torch.autograd.grad(loss, fisher)
        return loss.detach() + _along_gates(model, cmap, x, y, 2 * c * g / len(x), change)


def _along_gates(
    model: nn.Module, cmap: ChannelMap, x: Tensor, y: Tensor, v: Tensor, change: float
) -> Tensor:
    """Return a scalar of value 0 and gradient ``grad_w <v, grad_m L_sum>``."""
    largest = v.abs().max().clamp_min(torch.finfo(v.dtype).tiny)
    step = change / largest * v
    with gated(model, cmap, cmap.split(torch.cat([1 + step, 1 - step]))):
        logits = model(torch.cat([x, x]))  # both ends in one pass
    ahead, behind = cross_entropy(logits, torch.cat([y, y]), reduction="none").view(2, -1).sum(1)
    slope: Tensor = (ahead - behind) * (largest / (2 * change))
    return slope - slope.detach()
