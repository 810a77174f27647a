"""Multiply channels of a running network without touching its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from task.channels import FIXED, ChannelMap, GatePoint
from task.errors import DataError

__all__ = ["gated"]


@contextmanager
def gated(model: nn.Module, cmap: ChannelMap, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply every channel by its gate while the block runs.

    A gate acts at every place where its channel must be switched off (behind each normalisation,
    else behind the layer that writes it), so that a gate of zero is the network without the
    channel and the gradient of the one shared gate is the sum over these places. The block can be
    differentiated, twice as well.

    Parameters
    ----------
    model : nn.Module
        Its forward hooks are used, so call the modules, not their `forward`.
    cmap : ChannelMap of `model`
    gates : group -> (width,) or (n, width) tensor
        One gate per channel, or per sample and channel; a group not named is left alone.

    Raises
    ------
    DataError
        If a group is unknown or a gate has another width.
    """
    for name, gate in gates.items():
        if name not in cmap.groups:
            known = ", ".join(cmap.groups)
            raise DataError(f"gates: unknown group {name!r}; known groups are {known}")
        if gate.ndim not in (1, 2) or gate.shape[-1] != cmap.groups[name]:
            raise DataError(
                f"gates[{name!r}] has shape {tuple(gate.shape)}; give ({cmap.groups[name]},) "
                f"or (samples, {cmap.groups[name]})"
            )
    names = list(cmap.groups)
    with ExitStack() as hooks:
        for point in cmap.gates:
            here = [k for k in sorted({*point.group.tolist()}) if k != FIXED and names[k] in gates]
            if here:
                hook = _multiply(point, {k: gates[names[k]] for k in here})
                hooks.callback(model.get_submodule(point.module).register_forward_hook(hook).remove)
        yield


def _multiply(
    point: GatePoint, gates: Mapping[int, Tensor]
) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """Make the hook of one place."""
    index = _positions(point, gates)

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        parts = list(gates.values())
        samples = max((part.shape[0] for part in parts if part.ndim == 2), default=None)
        if samples is not None:
            parts = [part.expand(samples, -1) for part in parts]
        factor = parts[0]
        if index is not None:
            one = factor.new_ones((*factor.shape[:-1], 1))
            factor = torch.cat([*parts, one], dim=-1)[..., index.to(factor.device)]
        shape = [1] * output.ndim
        shape[point.axis] = factor.shape[-1]
        if samples is not None:
            shape[0] = samples
        return output * factor.reshape(shape)

    return hook


def _positions(point: GatePoint, gates: Mapping[int, Tensor]) -> Tensor | None:
    """Where each coordinate finds its factor in all gates and a one; None if in just that order."""
    index = torch.full((len(point.group),), sum(gate.shape[-1] for gate in gates.values()))
    start = 0
    for number, gate in gates.items():
        here = torch.from_numpy(point.group == number)
        index[here] = torch.from_numpy(point.channel)[here] + start
        start += gate.shape[-1]
    plain = len(gates) == 1 and torch.equal(index, torch.arange(start))
    return None if plain else index
