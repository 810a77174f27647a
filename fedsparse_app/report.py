"""Tables of run folders: on the terminal, and as report.md in the folder."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsparse_app import plots
from fedsparse_app.files import write_atomically
from fedsparse_app.run_folder import Run, read_run
from fedsparse_app.summary import (
    DEFINITIONS,
    Summary,
    summarise,
    summarise_clients,
)
from fedsparse_app.tables import NARROWEST, QUANTITIES, comparison_table, runs_table, written

__all__ = ["markdown", "report", "write_report"]

RECEIPT = {
    "bytes up": "bytes_up",
    "bytes down": "bytes_down",
    "parameters": "parameters",
    "training FLOPs": "round_flops",
    "seconds": "seconds",
}


def report(folders: Sequence[Path], console: Console | None = None) -> list[str]:
    """Print the table of some runs and write each one's report.md and plots.

    Parameters
    ----------
    folders : list of Path
        Run folders. Those that cannot be read are left out of the tables.
    console : Console, optional
        Where to print.

    Returns
    -------
    list of str
        What is wrong, one sentence a folder: missing, damaged or unfinished. Empty is good.
    """
    console = console or Console()
    console.width = max(console.width, NARROWEST)
    runs, problems = _read(folders)
    if runs:
        console.print(runs_table(runs))
    if len(runs) > 1:
        console.print(comparison_table(runs))
    for run in runs:
        written = _write(run)
        for note in run.notes:
            console.print(f"{run.name}: {note}", style="yellow", markup=False, soft_wrap=True)
        plotted = f"{len(written) - 1} plots" if written[1:] else "no plots: pip install matplotlib"
        console.print(f"{written[0]} ({plotted})", markup=False, soft_wrap=True)
        if not run.finished:
            problems.append(f"{run.folder}: {run.notes[-1]}")
    return problems


def write_report(folder: Path) -> list[Path]:
    """Write report.md and the plots into a run folder; return the files, report.md first.

    Raises
    ------
    ValueError
        The folder is none, or damaged.
    """
    return _write(read_run(folder))


def markdown(run: Run, drawn: Sequence[Path] = ()) -> str:
    """Return the report of one run as Markdown.

    Parameters
    ----------
    run : Run
        The run.
    drawn : list of Path
        Pictures beside it to show.
    """
    sections = [
        f"# {run.strategy}: {run.name}",
        *(f"**{note}**" for note in run.notes),
        _overview(run),
        "## Accuracy per domain (%)\n\n" + _domains(run),
        "## Clients\n\n" + _clients(run),
        "## Predicted and real\n\n" + _receipt(run),
        "## Coverage\n\n" + _coverage(run),
        "## Failures\n\n" + _failures(run),
        *(f"![{path.stem}]({path.name})" for path in drawn),
        "## What the words mean\n\n" + _bullets(DEFINITIONS),
        "## Options\n\n" + _bullets({f"`{k}`": f"`{v!r}`" for k, v in run.options.items()}),
        "## Versions\n\n" + _bullets(run.versions),
    ]
    return "\n\n".join(sections) + "\n"


def _read(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            problems.append(str(error))
    return runs, problems


def _write(run: Run) -> list[Path]:
    drawn = plots.draw(run)
    return [write_atomically(run.folder / "report.md", markdown(run, drawn).encode()), *drawn]


def _overview(run: Run) -> str:
    numbers: Summary = summarise(run)
    rows = [[row, written(getattr(numbers, field), kind)] for _, row, field, kind in QUANTITIES]
    rounds = f"Last is round {numbers.round_last}, best is round {numbers.round_best}."
    if numbers.round_last is None:
        rounds = "The global network was not evaluated."
    return "\n\n".join([rounds, *_remarks(run), _table(["", "value"], rows)])


def _remarks(run: Run) -> Iterator[str]:
    """Yield what must be known to read the numbers."""
    if run.options.get("partition.validation-fraction"):
        yield (
            "Clients scored on their validation samples (`partition.validation-fraction`); their "
            "test samples were not looked at."
        )
    if spent := run.rounds[-1].get("privacy"):
        yield (
            f"Differential privacy of a client: epsilon {spent['epsilon']:.4g} against whoever "
            f"sees the merged models, {spent['epsilon_server']:.4g} against the server, at delta "
            f"{spent['delta']:g}. What clients keep to themselves then is –."
        )


def _domains(run: Run) -> str:
    numbers = summarise(run)
    by_round = {row["round"]: row["global"] for row in run.rounds if row["global"]}
    if not by_round:
        return "The global network was not evaluated."
    shown = [("last", numbers.round_last), ("best", numbers.round_best)]
    names = list(by_round[numbers.round_last]["accuracy"])
    rows = [
        [f"{word} (round {number})"]
        + [written(by_round[number]["accuracy"].get(name), "percent") for name in names]
        + [written(by_round[number][key], "percent") for key in ("avg", "std")]
        for word, number in shown
    ]
    return _table(["", *names, "AVG", "STD"], rows)


def _clients(run: Run) -> str:
    headings = ["client", "domains", "personal last (%)", "personal best (%)", "keep"]
    headings += ["private channels", "MB up", "MB down", "failures"]
    held = run.partition.get("clients", {})
    rows = []
    for one in summarise_clients(run):
        samples = held.get(one.client, {}).get("domains", {})
        rows.append(
            [
                one.client,
                ", ".join(f"{name} {count}" for name, count in samples.items() if count),
                written(one.personal_last, "percent"),
                written(one.personal_best, "percent"),
                written(one.keep, "fraction"),
                written(one.private, "count"),
                written(one.bytes_up, "megabytes"),
                written(one.bytes_down, "megabytes"),
                written(one.failures, "count"),
            ]
        )
    return _table(headings, rows)


def _receipt(run: Run) -> str:
    """Say how far the plan was from what the answers that count took, all rounds together."""
    answered = [row for row in run.clients if row.get("predicted") and not row["failure"]]
    parts = []
    for word, key in RECEIPT.items():
        told = [row for row in answered if row["predicted"][key] is not None and row.get(key)]
        if told:
            real = sum(row[key] for row in told)
            off = real / sum(row["predicted"][key] for row in told) - 1
            parts.append(f"{word} {100 * off:+.2f} %")
    if not parts:
        return "No round was predicted."
    return f"Real against predicted, all clients and rounds: {', '.join(parts)}."


def _coverage(run: Run) -> str:
    """Say how many clients sent each entry of the global network in the last round that says."""
    told = [row for row in run.rounds if row.get("coverage")]
    if not told:
        return "No round tells how many clients sent each entry."
    cover = {int(clients): int(entries) for clients, entries in told[-1]["coverage"].items()}
    total = sum(cover.values()) or 1
    parts = [f"{k}: {v} ({100 * v / total:.1f} %)" for k, v in sorted(cover.items()) if v]
    return (
        f"Round {told[-1]['round']}: {cover.get(0, 0)} of {total} entries came from no client. "
        f"Entries by how many clients sent them: {', '.join(parts)}."
    )


def _failures(run: Run) -> str:
    rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in run.rounds:
        for failure in row.get("failures") or ():
            rounds[failure["client"], failure["reason"]].append(row["round"])
    if not rounds:
        return "None."
    rows = [
        [client, ", ".join(map(str, numbers)), " ".join(reason.split())]
        for (client, reason), numbers in sorted(rounds.items())
    ]
    return _table(["client", "rounds", "reason"], rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _bullets(pairs: Mapping[str, Any]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in pairs.items()) or "None recorded."
