"""The command line: ``fedsparse run``, ``plan``, ``report``, ``export``, ``channels``, ``data``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

# What a command needs is imported inside it: a report must not wait for torch.

app = typer.Typer(
    help="Federated learning with pruned, personalised models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Print what the user can mend in one message; everything else keeps its traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
) -> None:
    """Print the numbers of runs; write report.md and plots into each folder."""
    from fedsparse_app.report import report as write_reports

    with _plain_errors():
        problems = write_reports(folders)
    for problem in problems:
        typer.secho(f"error: {problem}", fg="red", err=True)
    raise typer.Exit(1 if problems else 0)


@app.command()
def channels(
    model: Annotated[str, typer.Argument(help="Name of a model.")],
    shape: Annotated[str, typer.Option(help="Shape of one sample.")] = "3,32,32",
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
) -> None:
    """Print which tensors share which channels in a model."""
    from task import models
    from task.channels_view import describe
    from task.trace import trace

    with _plain_errors():
        sample = _shape(shape)
        network = models.build(model, sample, classes)
        cmap = trace(network, models.example(model, sample))
        typer.echo(describe(cmap, network.state_dict()))


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of the app.")] = Path("."),
    config: Annotated[
        list[str] | None,
        typer.Option("-c", "--run-config", help='Options as "key=value ..." or a TOML file.'),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Same as run.rounds.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Clients trained at a time; one a core if not given.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without Flower's runtime, one client at a time.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where run folders go; ./runs if not given.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Run folder to go on with, with the options it has."),
    ] = None,
) -> None:
    """Run the app in simulation and exit with 0 only if it completed."""
    from fedsparse_app.launch import Request, launch

    with _plain_errors():
        request = Request(folder, tuple(config or ()), rounds, clients, workers, output_dir, resume)
        outcome = launch(request, _echo, in_process=in_process)
    if outcome.folder is not None:
        typer.echo(f"run folder: {outcome.folder}")
    if not outcome.completed:
        typer.secho(f"error: {outcome.reason}", fg="red", err=True)
        raise typer.Exit(1)


@app.command()
def plan(
    config: Annotated[
        list[str] | None,
        typer.Option("-c", "--run-config", help='Options as "key=value ..." or a TOML file.'),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help='Capacities, "a: keep=0.5, b: budget-mflops=3" or a TOML file with a table each; '
            "the simulation's clients if not given."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan there as well.")
    ] = None,
) -> None:
    """Print what a round costs each client, before any training; exit with 2 if one cannot."""
    from rich.console import Console

    from fedsparse_app.config import read
    from fedsparse_app.files import write_atomically
    from fedsparse_app.fleet import parse_fleet, plan_table, planned, summary_lines
    from fedsparse_app.overrides import parse_overrides

    with _plain_errors():
        fleet = None if clients is None else parse_fleet(clients)
        made = planned(read(parse_overrides(config or ())), fleet)
        if json_file is not None:
            write_atomically(json_file, json.dumps(made, indent=1).encode())
    console = Console()
    console.width = max(console.width, 110)
    console.print(plan_table(made))
    for line in summary_lines(made):
        typer.echo(line)
    for client, reason in made["refused"].items():
        typer.secho(f"error: {client}: {reason}", fg="red", err=True)
    raise typer.Exit(2 if made["refused"] else 0)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="Name of an embedded data set, digits.")],
    out: Annotated[Path, typer.Option(help="New folder to write to.")],
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 4,
    config: Annotated[
        list[str] | None,
        typer.Option("-c", "--run-config", help='Options "partition.key=value ..." or a file.'),
    ] = None,
) -> None:
    """Write a data set as folders of images, one per client, for data.name="folder"."""
    from fedsparse_app import trees
    from fedsparse_app.config import read
    from fedsparse_app.overrides import parse_overrides
    from task.data import load

    with _plain_errors():
        out, data_set = out.expanduser().resolve(), load(name)
        options = parse_overrides(config or ()) | {"federation.clients": clients}
        held = trees.write_trees(out, data_set, read(options))
    for folder, domains in held.items():
        parts = ", ".join(f"{domain} {count}" for domain, count in domains.items())
        typer.echo(f"{out / folder}: {sum(domains.values())} images ({parts})")
    typer.echo(trees.commands(out, data_set, list(held)))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    client: Annotated[
        str | None, typer.Option(help="Whose personal network; the global one if not given.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="torch-export, onnx or safetensors.")
    ] = "torch-export",
    out: Annotated[Path | None, typer.Option(help="The file; in RUN/export if not given.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The device's state-dir, where it has one.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the latency's median.")] = 50,
) -> None:
    """Write one network of a run as a file for devices, once its outputs are checked."""
    from fedsparse_app.export import Request
    from fedsparse_app.export import export as write

    with _plain_errors():
        exported = write(Request(run, client, format, out, state_dir, repeats))
    for line in exported.lines(repeats):
        typer.echo(line)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"--shape {text}: not a shape; write whole numbers, for example 3,32,32")
    return shape


def _echo(line: str) -> None:
    typer.echo(line)  # click drops the colours where the output is no terminal
    sys.stdout.flush()


if __name__ == "__main__":
    app()
