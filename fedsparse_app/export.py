"""Take a network of a run home: one file with the small network, checked against the original."""

import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsparse_app.checkpoint import FILE, load_checkpoint
from fedsparse_app.config import Config, read
from fedsparse_app.errors import ConfigError
from fedsparse_app.files import write_atomically
from fedsparse_app.run_folder import read_run
from fedsparse_app.state import ClientState, state_root
from fedsparse_app.workload import Workload, make_strategy, workload
from strategies.base import SubmodelStrategy
from strategies.memory import Personal
from task.channels import count_kept
from task.cost import parameters
from task.errors import did_you_mean
from task.exported import FORMATS, Run
from task.measure import largest_difference, latency
from task.submodel import extract, slice_module

__all__ = ["TOLERANCE", "Exported", "Request", "export", "restore"]

TOLERANCE = 1e-4
"""Largest difference of an output, in units of the largest output: float32 in another order."""


@dataclass(frozen=True)
class Request:
    """What is wanted.

    Parameters
    ----------
    run : Path
        Run folder.
    client : str or None
        Whose personal network; None = the global network.
    format : str
        Key in ``FORMATS``.
    out : Path or None
        The file; None = ``export/<client or global>.<suffix>`` in the run folder.
    state_dir : Path or None
        The ``state-dir`` of the device, where its arrays are not in the run folder.
    repeats : int
        Runs of a latency measurement.
    """

    run: Path
    client: str | None = None
    format: str = "torch-export"
    out: Path | None = None
    state_dir: Path | None = None
    repeats: int = 50


@dataclass(frozen=True)
class Exported:
    """What was written, beside the dense network in the same format.

    Parameters
    ----------
    file : Path
    what : str
        Which network, trained when.
    difference : float
        Largest difference from the network of the run, as `TOLERANCE`.
    channels, parameters, bytes, seconds : (int or float, int or float)
        Of this network and of the dense one; ``seconds`` are latencies of one sample.
    """

    file: Path
    what: str
    difference: float
    channels: tuple[int, int]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    seconds: tuple[float, float]

    def lines(self, repeats: int) -> Iterator[str]:
        """Yield what a person reads."""
        yield self.what
        yield f"{'':12}{'this':>12}{'dense':>12}"
        for name, pair in (("channels", self.channels), ("parameters", self.parameters)):
            yield f"{name:12}{pair[0]:>12,}{pair[1]:>12,}"
        yield f"{'KB':12}" + "".join(f"{size / 1000:>12,.1f}" for size in self.bytes)
        yield f"{'latency, ms':12}" + "".join(f"{1000 * s:>12.3f}" for s in self.seconds)
        yield f"latency: median of {repeats}, batch 1, one thread, {_machine()}"
        yield f"largest difference from the network of the run: {self.difference:.1e}"
        yield f"file: {self.file}"


def export(request: Request) -> Exported:
    """Write the network that ``request`` asks for, once its outputs are those of the original.

    Raises
    ------
    ConfigError
        The run, the client or its state is not there, or the outputs differ; then no file is.
    DataError
        A package that the format needs is not installed.
    """
    if request.format not in FORMATS:
        raise ConfigError(f"--format {request.format}: unknown. Known: {', '.join(FORMATS)}")
    config, work, strategy, round = restore(request.run)
    chosen = _chosen(request, config, strategy, round)
    network = slice_module(work.model, work.channels, chosen.kept, chosen.state).eval()
    about = _about(request, config, work, chosen)
    content, run, difference = _written(request.format, network, work, about)
    dense, whole, beside = network, content, run  # of full width, or else:
    if parameters(network) < parameters(work.model):
        everything = work.channels.full()
        dense = slice_module(work.model, work.channels, everything, strategy.state).eval()
        about |= {"kept": _lists(everything)}
        whole, beside, _ = _written(request.format, dense, work, about)
    seconds = latency([run, beside], work.example, request.repeats)
    name = (request.client or "global") + FORMATS[request.format].suffix
    return Exported(
        write_atomically(request.out or request.run / "export" / name, content),
        _what(
            request, config, chosen, count_kept(chosen.kept) < count_kept(strategy.global_kept())
        ),
        difference,
        (count_kept(chosen.kept), work.channels.size),
        (parameters(network), parameters(dense)),
        (len(content), len(whole)),
        (seconds[0], seconds[1]),
    )


def _written(
    name: str, network: nn.Module, work: Workload, about: dict[str, Any]
) -> tuple[bytes, Run, float]:
    """Return ``network`` in a format, the same run from there, and their largest difference."""
    content = FORMATS[name].write(network, work.example, about)
    run = FORMATS[name].read(content)
    difference = largest_difference(run, network, work.example)
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"--format {name}: outputs differ by {difference:.1e} from those of the "
            f"network of the run, at most {TOLERANCE:.0e} is accepted; nothing was written"
        )
    return content, run, difference


def restore(folder: Path) -> tuple[Config, Workload, SubmodelStrategy, int]:
    """Return the run as it was after its last whole round."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder that a run printed")
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder}: holds no {FILE}: the run never finished a round")
    begun = load_checkpoint(folder)
    config = read(begun.options)
    work = workload(config)
    strategy = make_strategy(config, work)
    strategy.state = begun.model
    strategy.resume(begun.round, begun.memory, begun.clients, begun.starved)
    strategy.store = lambda client: ClientState(folder / "histories", client)
    return config, work, strategy, begun.round


def _chosen(request: Request, config: Config, strategy: SubmodelStrategy, round: int) -> Personal:
    """Return the network that is asked for, with the round it is of."""
    kept, client = strategy.global_kept(), request.client
    if client is None:
        return Personal(round, kept, extract(strategy.state, strategy.channels, kept))
    _check_client(client, list(strategy.exchange.clients))
    folder = request.run.expanduser().resolve()
    root = state_root(folder, request.state_dir or config.run.state_dir)
    personal = strategy.personal(client, round, ClientState(root, client))
    if personal is None:
        raise ConfigError(
            f"--client {client}: no network of its own up to round {round} in {root / client} or "
            f"{folder / 'histories' / client}; it never answered, or its device keeps its arrays: "
            "run this there, with the run folder and --state-dir as in its node config"
        )
    return personal


def _check_client(client: str, known: list[str]) -> None:
    if client not in known:
        near = did_you_mean(client, known) or "."
        raise ConfigError(f"--client {client}: unknown{near} Known: {', '.join(sorted(known))}")


def _about(request: Request, config: Config, work: Workload, chosen: Personal) -> dict[str, Any]:
    """Return what the file says about itself."""
    images, weights = work.data.train.x.dtype == torch.uint8, request.format == "safetensors"
    return {
        "run": request.run.expanduser().resolve().name,
        "client": request.client,
        "round": chosen.round,
        "model": config.model.name,
        "shape": list(work.data.shape),
        "normalisation": "byte / 127.5 - 1" if images else "none",
        "classes": list(work.data.classes),
        "kept": _lists(chosen.kept),
        "recipe": config.flat(),
        # What weights alone need to become a network again; the other formats hold a graph.
        **({"channels": json.loads(work.channels.to_json())} if weights else {}),
    }


def _lists(kept: Any) -> dict[str, list[int]]:
    return {group: index.tolist() for group, index in kept.items()}


def _what(request: Request, config: Config, chosen: Personal, cut: bool) -> str:
    """Say which network this is, and how it was scored if it was."""
    run, client = request.run.expanduser().resolve(), request.client
    if client is None:
        return f"global network of {run.name} after round {chosen.round}"
    if chosen.shared:
        return (
            f"global network of {run.name} after round {chosen.round}"
            f"{', cut to what the device carries' if cut else ''}: "
            f"{config.strategy.name} as configured keeps no network of {client} alone"
        )
    scored = [
        row["accuracy"]
        for row in read_run(run).clients
        if (row["client"], row["round"]) == (client, chosen.round) and row.get("accuracy")
    ]
    accuracy = ""
    if scored:
        right, seen = scored[-1]["correct"], scored[-1]["total"]
        kind = "validation" if config.partition.validation_fraction else "test"
        accuracy = f", {100 * right / seen:.1f} % of its own {seen} {kind} samples right"
    return f"network of {client} of {run.name} as trained in round {chosen.round}{accuracy}"


def _machine() -> str:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
