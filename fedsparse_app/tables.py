"""Numbers of runs as text, and side by side as tables for the terminal."""

from collections.abc import Sequence
from typing import Literal

from rich.table import Table

from fedsparse_app.run_folder import Run
from fedsparse_app.summary import mean_and_spread, recipes, summarise

__all__ = ["NARROWEST", "QUANTITIES", "comparison_table", "runs_table", "written"]

# column on the terminal ('' is none), row in report.md, where the number is, how it is written
QUANTITIES = (
    ("rounds", "rounds", "rounds", "count"),
    ("AVG\nlast", "AVG, last (%)", "avg_last", "percent"),
    ("AVG\nbest", "AVG, best (%)", "avg_best", "percent"),
    ("STD\nlast", "STD, last (points)", "std_last", "percent"),
    ("", "STD, best (points)", "std_best", "percent"),
    ("pers.\nlast", "personal mean, last (%)", "personal_last", "percent"),
    ("pers.\nbest", "personal mean, best (%)", "personal_best", "percent"),
    ("pers.\nmin", "personal minimum, last (%)", "personal_min", "percent"),
    ("keep", "keep", "keep", "fraction"),
    ("param.", "parameters, physical", "parameters", "large"),
    ("param.\nmasked", "parameters, mask-counted", "parameters_mask_counted", "large"),
    ("FLOPs", "FLOPs, one sample forward", "flops", "large"),
    ("MB\nup", "MB up, total", "bytes_up", "megabytes"),
    ("MB\ndown", "MB down, total", "bytes_down", "megabytes"),
    ("MB up\na round", "MB up, a round after warm-up", "bytes_up_per_round", "megabytes"),
    ("MB down\na round", "MB down, a round after warm-up", "bytes_down_per_round", "megabytes"),
    ("s", "seconds", "seconds", "seconds"),
    ("fail.", "failed replies", "failures", "count"),
)
COMPARED = {
    "avg_last",
    "avg_best",
    "std_last",
    "personal_last",
    "personal_best",
    "personal_min",
    "bytes_up",
    "bytes_down",
    "seconds",
}
NARROWEST = 150  # columns of text; below that the numbers themselves would be cut off


def runs_table(runs: Sequence[Run]) -> Table:
    """Return one row per run."""
    columns = [row for row in QUANTITIES if row[0]]
    table = _terminal_table([row[0] for row in columns], run="fold", strategy="ellipsis")
    for run in runs:
        numbers = summarise(run)
        cells = (written(getattr(numbers, field), kind) for *_, field, kind in columns)
        table.add_row(run.name, run.strategy, *cells)
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return one row per recipe: mean and spread over the runs that differ in the seed only."""
    columns = [row for row in QUANTITIES if row[2] in COMPARED]
    headings = ["seeds", *(row[0] for row in columns)]
    table = _terminal_table(headings, strategy="ellipsis", options="fold")
    table.title = "mean ± spread over seeds"
    for apart, group in recipes(runs):
        seeds = {run.options.get("run.seed") for run in group}
        numbers = mean_and_spread([summarise(run) for run in group])
        own = "\n".join(f"{k}={v}" for k, v in apart.items() if k != "strategy.name")
        cells = (_with_spread(numbers.get(field), kind) for *_, field, kind in columns)
        table.add_row(group[0].strategy, own, str(len(seeds)), *cells)
    return table


def _terminal_table(numbers: Sequence[str], **words: Literal["fold", "ellipsis"]) -> Table:
    """Return an empty table: columns of words by what happens to long ones, then of numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading, overflow in words.items():
        table.add_column(heading, overflow=overflow, min_width=8)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _with_spread(value: tuple[float, float | None] | None, kind: str) -> str:
    if value is None:
        return "–"
    mean, spread = value
    return written(mean, kind) + (f" ±{written(spread, kind)}" if spread is not None else "")


def written(value: float | None, kind: str) -> str:
    """Return a number as text; an en dash for one that is missing or not a number."""
    if value is None or value != value:
        return "–"
    if kind == "percent":
        return f"{100 * value:.2f}"
    if kind == "fraction":
        return f"{value:.3f}"
    if kind == "megabytes":
        return f"{value / 1e6:.2f}" if value < 1e9 else f"{value / 1e6:.0f}"
    if kind == "seconds":
        return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    if kind == "large" and value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value:.0f}"
