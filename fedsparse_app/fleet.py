"""The clients of a plan: those of the simulation, or a fleet as stated; and the plan as a table."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsparse_app.capacity import CAPACITY, measured_speed, with_capacity
from fedsparse_app.client_app import introductions
from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from fedsparse_app.overrides import parse_overrides
from fedsparse_app.plan import Planner, document, server
from fedsparse_app.workload import device, workload
from strategies.errors import ShapeError
from strategies.hello import Hello
from strategies.privacy import OFF
from task.data.folder import NAME as FOLDER

__all__ = ["parse_fleet", "plan_table", "planned", "summary_lines"]

KNOWN = (*CAPACITY, "samples", "probe")

COLUMNS = (
    ("keep", "keep", "{:.3f}", 1),
    ("parameters", "parameters", "{:,.0f}", 1),
    ("MFLOPs\nforward", "flops", "{:.2f}", 1e6),
    ("MFLOPs\ntraining", "train_flops", "{:.2f}", 1e6),
    ("GFLOPs\na round", "round_flops", "{:.2f}", 1e9),
    ("MB down", "bytes_down", "{:.2f}", 1e6),
    ("MB up", "bytes_up", "{:.2f}", 1e6),
    ("s", "seconds", "{:.1f}", 1),
    ("MB\nmemory", "memory", "{:.1f}", 1e6),
)


def parse_fleet(text: str) -> dict[str, dict[str, Any]]:
    """Return what each device of a fleet states, by client.

    Parameters
    ----------
    text : str
        ``"a: keep=0.5, b: budget-mflops=3 samples=800"``, or the path of a TOML file with a table
        per client.

    Raises
    ------
    ConfigError
        No client, a key that says nothing about capacity, or not readable.
    """
    if text.endswith(".toml"):
        try:
            fleet = tomllib.loads(Path(text).expanduser().read_text("utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{text}: cannot be read as TOML: {error}") from error
    else:
        fleet = {}
        for part in filter(None, map(str.strip, text.split(","))):
            client, colon, pairs = part.partition(":")
            if client.strip() in fleet:
                raise ConfigError(f"--clients: {client.strip()} is there twice")
            fleet[client.strip()] = parse_overrides([pairs]) if colon else {}
    for client, stated in fleet.items():
        unknown = stated.keys() - {*KNOWN} if isinstance(stated, dict) else {"no table"}
        if unknown or not client:
            raise ConfigError(
                f"--clients: {client!r}: {', '.join(sorted(unknown)) or 'no name'}: write for "
                f'example "a: keep=0.5, b: budget-mflops=3", with any of {", ".join(KNOWN)}'
            )
    if not fleet:
        raise ConfigError('--clients: names no client; write for example "a: keep=0.5, b: keep=1"')
    return fleet


def planned(config: Config, fleet: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the plan of a run, before any of it.

    Parameters
    ----------
    config : Config
        Options of the run.
    fleet : mapping, optional
        As `parse_fleet` returns it. Each client gets one of as many shares of the run's data,
        unless it states its ``samples``. Without it: the clients of the simulation.

    Returns
    -------
    dict
        See `document`; ``refused`` are the clients that cannot take part, and why.
    """
    if fleet is not None:
        federation = config.federation
        least = min(federation.min_replies, federation.sampled(len(fleet)))
        try:
            federation = replace(federation, clients=len(fleet), min_replies=least)
        except ValueError as error:
            raise ConfigError(f"federation.{error}") from None
        config = replace(config, federation=federation)
    work, hellos = workload(config), _introduced(config, fleet)
    strategy, refused = server(config, work), {}
    for hello in hellos:
        try:
            if hello.refusal:
                raise ShapeError(hello.refusal)
            strategy.admit(hello)
            strategy.exchange.clients[hello.client] = hello
        except ShapeError as error:
            refused[hello.client] = str(error)
    speed = measured_speed(work, 1.0, config.train, device(config))
    return document(Planner(config, work, strategy, speed), refused)


def _introduced(config: Config, fleet: Mapping[str, Mapping[str, Any]] | None) -> list[Hello]:
    config = replace(config, privacy=OFF)  # a plan is for who makes it: nothing is to be hidden
    elsewhere = config.data.name == FOLDER and not config.data.dir
    if elsewhere and not (fleet and all("samples" in stated for stated in fleet.values())):
        raise ConfigError(
            "data.dir = '': a plan needs the number of images: set data.dir to the clients' "
            'folders, or state samples, for example --clients "a: keep=0.5 samples=800"'
        )
    if fleet is None:
        return introductions(config, {"partition-id": 0, "num-partitions": 1})
    hellos = []
    for number, (client, stated) in enumerate(fleet.items()):
        if elsewhere:
            some = Hello(client, dict.fromkeys(config.data.agreement().domains, 1))
            hello = with_capacity(some, stated, config)
            hellos.append(replace(hello, trained=int(stated["samples"])))
            continue
        place = {"partition-id": number, "num-partitions": len(fleet), "client-id": client}
        (hello,) = introductions(config, {**place, **stated})
        hellos.append(replace(hello, trained=int(stated.get("samples", hello.trained or 0))))
    return hellos


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return the rows of a plan with totals and, below, their ratio to dense FedAvg."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("client", no_wrap=True)
    for heading, *_ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan["clients"]:
        table.add_row(row["client"], *_cells(row))
    table.add_section()
    table.add_row("total", *_cells(plan["total"]))
    table.add_row("dense FedAvg", *_cells(plan["dense_fedavg"]))
    ratio = {name: value for name, value in plan["ratio"].items() if value is not None}
    table.add_row("ratio", *(f"{ratio[key]:.2f}" if key in ratio else "" for _, key, *_ in COLUMNS))
    return table


def summary_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return what the table does not say: which round it is of, and whether round 1 differs."""
    lines = [f"Round {plan['round']}, if every client takes part."]
    first = {key: sum(row[key] for row in plan["round_1"]) for key in ("bytes_down", "bytes_up")}
    if any(first[key] != plan["total"][key] for key in first):
        down, up = (first[key] / 1e6 for key in first)
        peak = max(row["memory"] for row in plan["round_1"]) / 1e6
        lines.append(
            f"Round 1 is another: {down:.2f} MB down, {up:.2f} MB up, at most {peak:.1f} MB memory."
        )
    lines.append("s: cross-entropy training at the speed of this machine, unless probe=true.")
    return lines


def _cells(row: Mapping[str, Any]) -> list[str]:
    values = [(row.get(key), form, unit) for _, key, form, unit in COLUMNS]
    return ["" if value is None else form.format(value / unit) for value, form, unit in values]
