"""Squared gradients of single samples with respect to filters, the weights that write a channel."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from strategies.ops.gradients import Pruning
from task.channels import ChannelMap

__all__ = ["filter_squares"]

CHUNK = 2**24  # entries of per-sample gradients held at a time: 64 MiB in float32

Call = tuple[Tensor, Tensor]  # input and output of a layer


def filter_squares(
    model: nn.Module, cmap: ChannelMap, x: Tensor, y: Tensor, pruning: Pruning
) -> Tensor:
    """Return ``||dL_x / dW_j||^2 / |W_j|`` of every sample and channel, behind open gates.

    ``W_j`` are the weights that write channel j in all layers of its group, without bias and
    normalisation. Convolutions and linear layers give all samples in one backward pass, from
    their inputs and the gradients of their outputs; only layers of another kind, or used twice,
    take one pass per sample.

    The gradient of a pruned channel's filter is proportional to its gate. Divided by the gate it
    is, exactly, the filter's gradient behind an open gate in the pruned network.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    x, y : (N, *shape) tensor, (N,) int64 tensor

    Returns
    -------
    (N, C) tensor
    """
    filters = _filters(model, cmap)
    with _recording([f.layer for f in filters]) as calls:
        loss = cross_entropy(pruning.run(model, x, pruning.values), y, reduction="sum")
    fast = [f for f in filters if f.measurable(calls[f.layer], len(x))]
    slow = [f for f in filters if f not in fast]
    gate = cmap.join(pruning.values)
    squares = gate.new_zeros(len(x), cmap.size + 1)
    outputs = [calls[f.layer][0][1] for f in fast]
    for f, d in zip(fast, torch.autograd.grad(loss, outputs) if fast else (), strict=True):
        squares.index_add_(1, f.place, _RULES[type(f.layer)](f.layer, calls[f.layer][0][0], d))
    if slow:
        for row in range(len(x)):
            one = slice(row, row + 1)
            loss = cross_entropy(pruning.run(model, x[one], pruning.values), y[one])
            grads = torch.autograd.grad(loss, [f.weight for f in slow], materialize_grads=True)
            for f, grad in zip(slow, grads, strict=True):
                others = [axis for axis in range(grad.dim()) if axis != f.axis]
                squares[row].index_add_(0, f.place, grad.square().sum(others))
    return squares[:, :-1] / (_block_sizes(filters, cmap, gate) * gate.square())


def _block_sizes(filters: Sequence["_Filter"], cmap: ChannelMap, gate: Tensor) -> Tensor:
    """Return how many weights write each channel; columns of pruned channels do not count."""
    mask = (gate == 1).cpu().numpy()
    entries = gate.new_zeros(cmap.size + 1)
    for f in filters:
        sizes = [
            length if index is None or axis == f.axis else len(index)
            for axis, (index, length) in enumerate(
                zip(cmap.stay(f.name, mask), f.weight.shape, strict=True)
            )
        ]
        each = prod(sizes) / sizes[f.axis]
        entries.index_add_(0, f.place, entries.new_full(f.place.shape, each))
    return entries[:-1].clamp_min(1)


@dataclass(frozen=True, eq=False)
class _Filter:
    """A weight that writes channels along ``axis``; ``place`` finds them in a channel vector."""

    name: str
    layer: nn.Module
    weight: Tensor
    axis: int
    place: Tensor  # (n,) int64
    shared: bool

    def measurable(self, calls: Sequence[Call], samples: int) -> bool:
        """Say whether the layer's rule gives the gradient of each sample."""
        return (
            type(self.layer) in _RULES
            and len(calls) == 1
            and len(calls[0][0]) == samples
            and self.axis == 0
            and not self.shared
            and getattr(self.layer, "padding_mode", "zeros") == "zeros"
            and not isinstance(getattr(self.layer, "padding", 0), str)
        )


def _filters(model: nn.Module, cmap: ChannelMap) -> list[_Filter]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for parameter in parameters.values())
    found = []
    for name, axes in cmap.axes.items():
        for axis, (what, place) in enumerate(zip(axes, cmap.positions[name], strict=True)):
            writes = what is not None and what.role in ("out", "depthwise")
            if place is None or not writes or name not in parameters:
                continue
            weight = parameters[name]
            layer = model.get_submodule(name.rpartition(".")[0])
            here = torch.from_numpy(place).to(weight.device)
            found.append(_Filter(name, layer, weight, axis, here, uses[id(weight)] > 1))
    return found


@contextmanager
def _recording(layers: Sequence[nn.Module]) -> Iterator[Mapping[nn.Module, list[Call]]]:
    calls: defaultdict[nn.Module, list[Call]] = defaultdict(list)

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Also where everything so far is frozen, the gradient of the output is wanted.
        calls[layer].append((args[0].detach(), output.requires_grad_()))
        return output.clone()  # what follows may change it in place, for instance ReLU

    with ExitStack() as hooks:
        for layer in dict.fromkeys(layers):
            if type(layer) in _RULES:
                hooks.callback(layer.register_forward_hook(hook).remove)
        yield calls


def _convolution(layer: nn.Module, u: Tensor, d: Tensor) -> Tensor:
    """Return the (N, out) squared gradient norms from input and gradient of the output."""
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    if isinstance(layer, nn.Conv1d):  # an image of height 1
        u, d = u.unsqueeze(2), d.unsqueeze(2)
    kernel, dilation, stride = (
        _pair(size, 1) for size in (layer.kernel_size, layer.dilation, layer.stride)
    )
    padding = _pair(layer.padding, 0)
    groups, pixels = layer.groups, d[0, 0].numel()

    def rows(part: slice) -> Tensor:
        columns = unfold(u[part], kernel, dilation, padding, stride)  # (n, in * k, pixels)
        columns = columns.reshape(len(columns), groups, -1, pixels)
        slopes = d[part].reshape(len(columns), groups, -1, pixels)
        return _row_norms(slopes, columns).flatten(1)

    each = max(layer.weight.numel(), layer.weight[0].numel() * groups * pixels)
    return _in_chunks(rows, len(u), each)


def _pair(size: Any, first: int) -> tuple[int, ...]:
    return (first, *size) if len(size) == 1 else tuple(size)


def _linear(layer: nn.Module, u: Tensor, d: Tensor) -> Tensor:
    """Return the (N, out) squared gradient norms from input and gradient of the output."""
    assert isinstance(layer, nn.Linear)
    if u.dim() == 2:  # an outer product: its rows need not be formed
        return d.square() * u.square().sum(1, keepdim=True)

    def rows(part: slice) -> Tensor:
        return _row_norms(d[part].flatten(1, -2).mT, u[part].flatten(1, -2).mT)

    return _in_chunks(rows, len(u), layer.weight.numel())


def _row_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared norms of the rows of ``a @ b^T``: (..., n, p) and (..., m, p) to (..., n).

    The rows are gradients of filters. With few pixels p, as in late layers, they need not be
    formed: ``||a_i b^T||^2 = a_i (b^T b) a_i^T`` is p / n of the work.
    """
    if a.shape[-1] < a.shape[-2]:
        return ((a @ (b.mT @ b)) * a).sum(-1).clamp_min(0)
    rows: Tensor = a @ b.mT
    return rows.square().sum(-1)


def _in_chunks(rows: Callable[[slice], Tensor], count: int, each: int) -> Tensor:
    step = max(1, CHUNK // each)
    return torch.cat([rows(slice(start, start + step)) for start in range(0, count, step)])


_RULES: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
}
