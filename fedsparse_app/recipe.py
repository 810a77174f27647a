"""config.toml: what a run was asked for, and the versions it ran with."""

import json
from importlib.metadata import PackageNotFoundError, version

from fedsparse_app.config import Config
from fedsparse_app.overrides import Scalar

__all__ = ["NOT_INSTALLED", "recipe_toml", "versions"]

NOT_INSTALLED = "not installed, run from its source"


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers."""
    return {package: _version(package) for package in ("fedsparse", "flwr", "torch", "numpy")}


def recipe_toml(config: Config) -> str:
    """Return ``config`` and the versions as TOML."""
    lines = ["[options]", *(f'"{k}" = {_value(v)}' for k, v in config.flat().items())]
    lines += ["", "[versions]", *(f"{k} = {_value(v)}" for k, v in versions().items())]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _value(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, str) else repr(value)
