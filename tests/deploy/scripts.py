"""The scripts of deploy/ as modules, and images for a small federation."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from fedsparse_app.config import read
from fedsparse_app.trees import write_trees
from task.data import load

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def module(name: str) -> ModuleType:
    """Import deploy/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def few_digits(out: Path) -> Path:
    """Write 240 digits for four clients and 80 for the server."""
    data = load("digits")
    parts = {"train": (data.train, 240), "test": (data.test, 80)}
    few = {
        name: samples.take(torch.arange(0, len(samples), len(samples) // count)[:count])
        for name, (samples, count) in parts.items()
    }
    options = {"federation.clients": 4, "partition.min-samples": 20}
    write_trees(out, replace(data, **few), read(options))
    return out
