"""The server's state after a whole round, in one file that is replaced atomically."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from fedsparse_app.files import write_atomically
from fedsparse_app.recipe import versions
from strategies.base import SubmodelStrategy
from strategies.records import Hello

__all__ = ["FILE", "FORMAT", "Checkpoint", "load_checkpoint", "save_checkpoint"]

FILE = "checkpoint.safetensors"
FORMAT = 1
"""Raised whenever what is written here changes, or what a strategy's memory means."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run knows after ``round`` and cannot make again from its options.

    Parameters
    ----------
    model, memory : dict of str to Tensor
        The global network; the method's own server state.
    options, versions : dict of str to scalar
        What the run was asked for, and what it ran with.
    clients : list of Hello
        Those met so far.
    starved : int
        Rounds in a row without enough replies.
    ledger : dict
        What the rounds have told about each client, as differential privacy counts it.
    recorder : dict
        What the recorder carries from round to round.
    """

    round: int
    model: dict[str, Tensor]
    memory: dict[str, Tensor]
    options: dict[str, Any]
    versions: dict[str, str]
    clients: list[Hello]
    starved: int
    ledger: dict[str, Any]
    recorder: dict[str, Any]


def save_checkpoint(
    folder: Path,
    round: int,
    strategy: SubmodelStrategy,
    config: Config,
    recorder: Mapping[str, Any],
) -> None:
    """Write what a resumed run needs, with a hash over all of it."""
    arrays = {f"model.{name}": tensor for name, tensor in strategy.state.items()}
    arrays |= {f"memory.{name}": tensor for name, tensor in strategy.memory().items()}
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in arrays.items()}
    about = json.dumps(
        {
            "round": round,
            "options": config.flat(),
            "versions": versions(),
            "clients": [asdict(hello) for _, hello in sorted(strategy.exchange.clients.items())],
            "starved": strategy.starved,
            "ledger": strategy.ledger.saved(),
            "recorder": recorder,
        }
    )
    metadata = {"format": str(FORMAT), "fedsparse": about, "sha256": _digest(about, arrays)}
    write_atomically(folder / FILE, save(arrays, metadata))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint of ``folder``.

    Raises
    ------
    ConfigError
        There is none, it is damaged, or another version of fedsparse wrote it.
    """
    path = folder / FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: not there, so no round of this run was finished; start it again without "
            "run.resume"
        )
    try:
        metadata, arrays = _read(path)
        kind, about = metadata.get("format", "none"), metadata["fedsparse"]
        whole = kind != str(FORMAT) or metadata["sha256"] == _digest(about, arrays)
    except (SafetensorError, OSError, KeyError) as error:
        raise ConfigError(_damaged(path, str(error))) from None
    if kind != str(FORMAT):
        raise ConfigError(
            f"{path}: of format {kind}, and this version reads {FORMAT}; resume with the version "
            "of fedsparse in config.toml, or start a new run"
        )
    if not whole:
        raise ConfigError(_damaged(path, "its content does not have its hash"))
    parts: dict[str, Any] = {"model": {}, "memory": {}}
    for key, tensor in arrays.items():
        part, name = key.split(".", 1)
        parts[part][name] = tensor
    said: dict[str, Any] = json.loads(about)
    said["clients"] = [Hello(**row) for row in said["clients"]]
    return Checkpoint(**said, **parts)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        # Copies: a tensor of safe_open is the file itself, which the next round replaces.
        arrays = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return file.metadata() or {}, arrays


def _digest(about: str, arrays: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(arrays.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> str:
    return f"{path}: damaged ({why}); put back a whole copy of the run folder, or start a new run"
