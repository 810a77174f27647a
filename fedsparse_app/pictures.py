"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["split_picture"]


def split_picture(partition: Mapping[str, Any]) -> Figure:
    """Draw who holds what: one bar per client, stacked by domain and by class.

    Parameters
    ----------
    partition : mapping
        ``partition.json`` of a run folder: ``domains``, ``classes`` and ``clients``; a domain
        that a client does not name counts zero.

    Returns
    -------
    Figure
        Two panels; needs no display. ``figure.savefig(path)`` writes it.
    """
    from matplotlib.figure import Figure

    clients = sorted(partition["clients"])
    held = [partition["clients"][client] for client in clients]
    domains = np.array([[row["domains"].get(n, 0) for n in partition["domains"]] for row in held])
    classes = np.array([row["classes"] for row in held])
    figure = Figure(figsize=(12, 1.6 + 0.22 * len(clients)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _stack(left, clients, domains, partition["domains"], "domain")
    _stack(right, clients, classes, partition["classes"], "class")
    left.invert_yaxis()  # the first client on top; the panels share the axis
    return figure


def _stack(
    axes: Axes, clients: Sequence[str], count: np.ndarray, names: Sequence[str], title: str
) -> None:
    """Draw horizontal bars: ``count`` is (clients, names) samples."""
    from matplotlib import colormaps

    few = len(names) <= 10
    for i, name in enumerate(names):
        colour = colormaps["tab10"](i) if few else colormaps["viridis"](i / (len(names) - 1))
        start = count[:, :i].sum(axis=1)
        axes.barh(range(len(clients)), count[:, i], left=start, label=name, color=colour)
    axes.set_yticks(range(len(clients)), clients)
    axes.set_xlabel("samples")
    axes.set_xlim(0, 1.03 * max(1, count.sum(axis=1).max()))
    # Outside, above: a legend inside would hide bars.
    axes.legend(
        title=title,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(len(names), 10),
        handlelength=1,
        columnspacing=1,
        fontsize="small",
    )
