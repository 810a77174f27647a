"""The server's state after a whole round, in one file that is replaced atomically."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedsparse_app.config import Config
from fedsparse_app.files import write_atomically
from strategies.base import SubmodelStrategy

__all__ = ["FILE", "load_checkpoint", "save_checkpoint"]

FILE = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path,
    round: int,
    strategy: SubmodelStrategy,
    config: Config,
    personal: dict[str, float],
) -> None:
    """Write model, method state, clients met, options and the round they belong to."""
    arrays = {f"model.{name}": tensor for name, tensor in strategy.state.items()}
    arrays |= {f"memory.{name}": tensor for name, tensor in strategy.memory().items()}
    about = {
        "round": round,
        "options": config.flat(),
        "clients": [asdict(hello) for _, hello in sorted(strategy.exchange.clients.items())],
        "starved": strategy.starved,
        "personal": personal,
        "ledger": strategy.ledger.saved(),
    }
    contiguous = {name: tensor.contiguous() for name, tensor in arrays.items()}
    write_atomically(folder / FILE, save(contiguous, {"fedsparse": json.dumps(about)}))


def load_checkpoint(
    folder: Path,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return (model, memory, what it says about itself) of the last whole round in ``folder``."""
    model: dict[str, Tensor] = {}
    memory: dict[str, Tensor] = {}
    with safe_open(folder / FILE, "pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()["fedsparse"])
        for key in file.keys():  # noqa: SIM118  not a mapping
            part, name = key.split(".", 1)
            (model if part == "model" else memory)[name] = file.get_tensor(key)
    return model, memory, about
