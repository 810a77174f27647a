"""The proof of a channel map: slice random halves of its groups and compare with gates at zero."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from task.channels import FIXED, Axis, ChannelMap, GatePoint, Ints
from task.errors import DataError, did_you_mean
from task.gates import gated
from task.skeleton import copy_around
from task.submodel import slice_module
from task.tracing.op import tensors_in

__all__ = ["prove", "without"]

TOLERANCE = 1e-5


def prove(model: nn.Module, cmap: ChannelMap, inputs: tuple[Tensor, ...]) -> ChannelMap:
    """Pin every group for which the sliced network differs from the gated one.

    Inexact groups differ by nature; of them only those are pinned that cannot be sliced at all.

    Parameters
    ----------
    model : nn.Module
        Left as it is; a copy with random normalisation statistics is run.
    cmap : ChannelMap
        The claim.
    inputs : tuple of tensors
        What to run it on.

    Returns
    -------
    ChannelMap
        What is left of the claim.
    """
    twin = _scrambled(model, cmap)
    for kind in (True, False):
        while groups := [name for name, exact in cmap.exact.items() if exact is kind]:
            problem = _problem(twin, cmap, inputs, groups)
            if not problem:
                break
            guilty = _bisect(twin, cmap, inputs, groups) or dict.fromkeys(groups, problem)
            cmap = without(cmap, guilty)
    return cmap


def _scrambled(model: nn.Module, cmap: ChannelMap) -> nn.Module:
    """Copy that shares large weights, with norms, biases and zero weights made visible."""
    memo: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        roles = {axis.role for axis in cmap.axes.get(name, ()) if axis is not None}
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        new = tensor.detach()
        if roles & {"norm", "bias"}:
            new = new + 0.2 + 0.3 * torch.rand_like(new)
        elif new.numel() and not new.flatten()[0] and not new.any():  # the first look is cheap
            new = 0.1 * torch.randn_like(new)
        memo[id(tensor)] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new.clone()
    return copy_around(model, memo)


def _bisect(
    model: nn.Module, cmap: ChannelMap, inputs: tuple[Tensor, ...], groups: list[str]
) -> dict[str, str]:
    """Find the groups that fail by themselves, with the reason."""
    problem = _problem(model, cmap, inputs, groups)
    if not problem:
        return {}
    if len(groups) == 1:
        return {groups[0]: problem}
    middle = len(groups) // 2
    first, second = groups[:middle], groups[middle:]
    return _bisect(model, cmap, inputs, first) | _bisect(model, cmap, inputs, second)


def _problem(
    model: nn.Module, cmap: ChannelMap, inputs: tuple[Tensor, ...], groups: Collection[str]
) -> str:
    """Say how slicing half of each group goes wrong, '' if it does not."""
    random = np.random.default_rng(0)
    kept, gates = {}, {}
    for name in groups:
        width = cmap.groups[name]
        half = width // 2 - (width // 2 + 1) % 2  # odd, so that views into halves are found out
        kept[name] = np.sort(random.permutation(width)[: max(1, half)])
        gates[name] = torch.zeros(width)
        gates[name][torch.from_numpy(kept[name])] = 1
    with gated(model, cmap, gates):
        expected = _run(model, inputs)
    try:
        found = _run(slice_module(model, cmap, kept), inputs)
    except Exception as error:  # whatever a network that cannot be cut may raise
        message = str(error).strip().split("\n")[0][:120]
        return f"cannot be sliced: the smaller network fails with {type(error).__name__}: {message}"
    if [t.shape for t in expected] != [t.shape for t in found]:
        return "cannot be sliced: the outputs of the smaller network have other shapes"
    exact = all(cmap.exact[name] for name in groups)
    return _difference(expected, found) if exact else ""


def _run(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    copies = (x.clone() for x in inputs)
    return [tensor.double() for tensor in tensors_in(model(*copies))]


def _difference(expected: list[Tensor], found: list[Tensor]) -> str:
    for a, b in zip(expected, found, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())  # infinities of a mask are no difference
        if not same.all():
            scale = a[a.isfinite()].abs().max() if a.isfinite().any() else a.new_tensor(0.0)
            if not bool((a - b)[~same].abs().max() <= TOLERANCE * scale):
                return "slicing it differs from setting its channels to zero"
    return ""


def without(cmap: ChannelMap, reasons: dict[str, str]) -> ChannelMap:
    """Move groups to `pinned`.

    Parameters
    ----------
    cmap : ChannelMap
    reasons : group -> why it has to stay whole

    Returns
    -------
    ChannelMap
        The other groups, numbered from 0 again.

    Raises
    ------
    DataError
        If a group is unknown.
    """
    for name in reasons:
        if name not in cmap.groups:
            near = did_you_mean(name, cmap.groups)
            raise DataError(f"pin: unknown group {name!r}{near}; known: {', '.join(cmap.groups)}")
    if not reasons:
        return cmap
    stay = np.array([name not in reasons for name in cmap.groups], np.bool_)
    number = np.append(np.where(stay, np.cumsum(stay) - 1, FIXED), FIXED).astype(np.int32)

    def renumber(group: NDArray[np.int32], channel: Ints) -> tuple[NDArray[np.int32], Ints]:
        new = number[group]
        return new, np.where(new == FIXED, 0, channel)

    def axis(old: Axis | None) -> Axis | None:
        new = None if old is None else Axis(*renumber(old.group, old.channel), old.role)
        return None if new is None or (new.group == FIXED).all() else new

    gates = (
        GatePoint(gate.module, gate.axis, *renumber(gate.group, gate.channel))
        for gate in cmap.gates
    )
    return ChannelMap(
        {name: width for name, width in cmap.groups.items() if name not in reasons},
        {name: tuple(axis(old) for old in axes) for name, axes in cmap.axes.items()},
        tuple(gate for gate in gates if (gate.group != FIXED).any()),
        {name: exact for name, exact in cmap.exact.items() if name not in reasons},
        {**cmap.pinned, **reasons},
    )
