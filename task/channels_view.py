"""A channel map as text: what is tied together, what stays whole and why."""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from task.channels import ChannelMap, State

__all__ = ["describe"]

NAMES = 2  # layers of a group that are written out before the rest is counted
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def describe(cmap: ChannelMap, state: State) -> str:
    """Print a channel map for people.

    Parameters
    ----------
    cmap : ChannelMap
    state : tensor name -> tensor of the network the map was made from

    Returns
    -------
    str
        A row per group with its width, the layers that write it, those that read it and its
        share: the percentage of parameters that would go if the whole group went. A weight
        between two groups counts for both, so shares add up to more than 100. Then what is
        pinned and why, then totals.
    """
    sizes = {name: t.numel() for name, t in state.items() if name.split(".")[-1] not in BUFFERS}
    total = max(1, sum(sizes.values()))
    shares = {name: 100 * _parameters(cmap, state, sizes, name) / total for name in cmap.groups}
    rows = [["group", "width", "written by", "read by", "share"]]
    for name, width in cmap.groups.items():
        writers, readers = _layers(cmap, name, ("out", "depthwise")), _layers(cmap, name, ("in",))
        label = name if cmap.exact[name] else f"{name} (inexact)"
        rows.append([label, str(width), writers, readers, f"{shares[name]:.1f} %"])
    lines = list(_aligned(rows, right=(1, 4)))
    if cmap.pinned:
        lines += ["", "stays whole:"]
        lines += [f"  {line}" for line in _aligned([[k, why] for k, why in cmap.pinned.items()])]
    fixed = sum(size for name, size in sizes.items() if not any(cmap.axes[name]))
    lines += ["", f"{len(cmap.groups)} groups, {cmap.size} channels, {total:,} parameters"]
    lines[-1] += f", of which {fixed:,} ({100 * fixed / total:.1f} %) in tensors without channels"
    return "\n".join(lines)


def _parameters(cmap: ChannelMap, state: State, sizes: dict[str, int], group: str) -> int:
    """Count parameters with a coordinate in the group."""
    number, count = list(cmap.groups).index(group), 0
    for name, size in sizes.items():
        outside = [
            length if axis is None else int(np.count_nonzero(axis.group != number))
            for axis, length in zip(cmap.axes[name], state[name].shape, strict=True)
        ]
        count += size - prod(outside)
    return count


def _layers(cmap: ChannelMap, group: str, roles: tuple[str, ...]) -> str:
    """Name the layers that have the group in one of these roles."""
    number = list(cmap.groups).index(group)
    names = [
        tensor.removesuffix(".weight")
        for tensor, axes in cmap.axes.items()
        for axis in axes
        if axis is not None and axis.role in roles and (axis.group == number).any()
    ]
    rest = f" +{len(names) - NAMES}" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + rest


def _aligned(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> Iterator[str]:
    """Pad cells so that columns line up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
