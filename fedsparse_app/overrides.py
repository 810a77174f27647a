"""Run options as typed on the command line, read the way Flower reads them."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsparse_app.errors import ConfigError
from task.errors import did_you_mean

__all__ = ["Scalar", "app_options", "check_known", "parse_overrides"]

Scalar = str | int | float | bool

PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


def parse_overrides(items: Sequence[str]) -> dict[str, Scalar]:
    """Return run options from ``key=value`` pairs and TOML files; later ones win.

    Parameters
    ----------
    items : list of str
        Each a path to a ``.toml`` file or pairs separated by spaces, values as in TOML:
        ``"strategy.name='fedfip' run.rounds=5"``.

    Raises
    ------
    ConfigError
        Not a pair, not a TOML scalar, or a file that cannot be read.
    """
    overrides: dict[str, Scalar] = {}
    for item in items:
        overrides |= _from_file(Path(item)) if item.endswith(".toml") else _from_pairs(item)
    return overrides


def app_options(app: Path) -> dict[str, Scalar]:
    """Return the options an app declares, with their defaults, by dotted key.

    Raises
    ------
    ConfigError
        The folder holds no Flower App.
    """
    path = app / "pyproject.toml"
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
        return _flatten(tables["tool"]["flwr"]["app"].get("config", {}))
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: no Flower App ({type(error).__name__}: {error}); "
            "give the folder whose pyproject.toml has [tool.flwr.app]"
        ) from error


def check_known(overrides: Mapping[str, Scalar], known: Mapping[str, Scalar]) -> None:
    """Refuse an option the app does not have; Flower refuses it too, but does not say which.

    Raises
    ------
    ConfigError
        The unknown key and the nearest known one.
    """
    for key in overrides:
        if key not in known:
            near = did_you_mean(key, known) or f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"{key}: the app has no such option{near}")


def _from_pairs(text: str) -> dict[str, Scalar]:
    if rest := PAIR.sub("", text).split():
        raise ConfigError(f'{rest[0]}: not key=value; write for example "run.rounds=5"')
    options: dict[str, Scalar] = {}
    for key, value in PAIR.findall(text):
        try:
            options |= _flatten(tomllib.loads(f"{key} = {value}"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{key}: {value} is no TOML value; accepted are numbers, true, false and quoted "
                f"strings: \"{key}='{value}'\""
            ) from error
    return options


def _from_file(path: Path) -> dict[str, Scalar]:
    try:
        return _flatten(tomllib.loads(path.expanduser().read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Scalar):
            flat[prefix + key] = value
        else:
            raise ConfigError(
                f"{prefix}{key}: {value!r} is a {type(value).__name__}; accepted are numbers, "
                "true, false and strings; write a list as 'a,b,c'"
            )
    return flat
