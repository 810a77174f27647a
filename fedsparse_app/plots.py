"""Pictures of a run as PNG files; needs matplotlib, no display."""

import io
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsparse_app.files import write_atomically
from fedsparse_app.run_folder import Run
from fedsparse_app.summary import personal_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["accuracy_picture", "channels_picture", "draw", "traffic_picture"]

DOTS_PER_INCH = 130


def draw(run: Run) -> list[Path]:
    """Draw every picture the run has numbers for into its folder.

    Returns
    -------
    list of Path
        The PNG files, replaced atomically; empty without matplotlib.
    """
    if find_spec("matplotlib") is None:
        return []
    pictures: dict[str, Callable[[Run], Figure | None]] = {
        "accuracy": accuracy_picture,
        "traffic": traffic_picture,
        "channels": channels_picture,
        "partition": _partition_picture,
    }
    drawn = {name: picture(run) for name, picture in pictures.items()}
    return [
        write_atomically(run.folder / f"{name}.png", _png(figure))
        for name, figure in drawn.items()
        if figure is not None
    ]


def accuracy_picture(run: Run) -> "Figure | None":
    """Draw the accuracy per domain, their mean and the personal mean over the rounds."""
    judged = [row for row in run.rounds if row["global"]]
    personal = personal_curve(run)
    if not judged and not personal:
        return None
    figure, axes = _figure("round", "accuracy (%)")
    rounds = [row["round"] for row in judged]
    for name in judged[-1]["global"]["accuracy"] if judged else ():
        values = [100 * row["global"]["accuracy"][name] for row in judged]
        axes.plot(rounds, values, marker=".", linewidth=1.2, label=name)
    if judged:
        values = [100 * row["global"]["avg"] for row in judged]
        axes.plot(rounds, values, color="black", linewidth=2.4, label="AVG")
    if personal:
        rounds, values = [p.round for p in personal], [100 * p.mean for p in personal]
        axes.plot(rounds, values, "--", color="black", linewidth=1.6, label="personal mean")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.locator_params("x", integer=True)
    return figure


def traffic_picture(run: Run) -> "Figure | None":
    """Draw the accuracy against the bytes that had crossed the network by then, both ways."""
    sent, total = {}, 0
    for row in run.rounds:
        total += (row.get("bytes_up") or 0) + (row.get("bytes_down") or 0)
        sent[row["round"]] = total / 1e6
    series = {
        "AVG": {row["round"]: row["global"]["avg"] for row in run.rounds if row["global"]},
        "personal mean": {point.round: point.mean for point in personal_curve(run)},
    }
    if not total or not any(series.values()):
        return None
    figure, axes = _figure("MB up and down so far, all clients", "accuracy (%)")
    for name, points in series.items():
        if points:
            values = [100 * value for value in points.values()]
            axes.plot([sent[number] for number in points], values, marker=".", label=name)
    axes.legend(frameon=False, loc="lower right")
    return figure


def channels_picture(run: Run) -> "Figure | None":
    """Draw the channels kept per group and, where the method tells, each domain's importance."""
    widths = [row["width"] for row in run.rounds if row.get("width")]
    if not widths:
        return None
    from matplotlib.figure import Figure

    shares = _importance(run)
    last, groups = widths[-1], list(widths[-1])
    figure = Figure(
        figsize=(max(7.0, 1.5 + 0.3 * len(groups)), 8.0 if shares else 4.5), layout="constrained"
    )
    panels = figure.subplots(2 if shares else 1, 1, squeeze=False)[:, 0]
    places = range(len(groups))
    widest = [max(width.get(group, 0) for width in widths) for group in groups]
    panels[0].bar(places, widest, color="0.85", label="widest in any round")
    panels[0].bar(
        places, [last[group] for group in groups], color="tab:blue", label="kept in the last round"
    )
    panels[0].set_ylabel("channels")
    panels[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    panels[0].set_xticks(places, groups, rotation=90, fontsize="small")
    if shares:
        _draw_importance(panels[1], shares, groups)
        panels[0].sharex(panels[1])
        panels[0].tick_params(labelbottom=False)
    return figure


def _draw_importance(axes: "Axes", shares: Mapping[str, Any], groups: list[str]) -> None:
    table = [[float(shares[name].get(group, 0.0)) for group in groups] for name in shares]
    image = axes.imshow(table, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_xticks(range(len(groups)), groups, rotation=90, fontsize="small")
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=50)
    bar.set_label("share of the domain's importance")


def _importance(run: Run) -> Mapping[str, Any]:
    """Return the latest share of importance per domain and group, {} where the method has none."""
    told = (row.get("strategy", {}).get("prototype_share") for row in reversed(run.rounds))
    shares: Mapping[str, Any] = next((shares for shares in told if shares), {})
    names = {str(index): name for index, name in enumerate(run.partition.get("domains", ()))}
    return {names.get(key, key): value for key, value in shares.items()}  # methods count domains


def _partition_picture(run: Run) -> "Figure | None":
    from fedsparse_app.pictures import split_picture

    return split_picture(run.partition) if run.partition.get("clients") else None


def _figure(x: str, y: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()
