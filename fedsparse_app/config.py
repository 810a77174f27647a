"""Run config as typed options: read once at the boundary, checked before round 1.

``[tool.flwr.app.config]`` in pyproject.toml lists every option with its default and a comment.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from fedsparse_app.errors import ConfigError
from fedsparse_app.overrides import Scalar
from strategies import STRATEGIES, FederationOptions, PrivacyOptions
from task.data import DATASETS, folder
from task.data.options import DataOptions
from task.data.partition import PartitionOptions
from task.device import Autocast
from task.errors import did_you_mean
from task.models import MODELS
from task.options import Interval, check_options, field_types
from task.train import TrainingOptions

__all__ = ["SECTIONS", "Config", "read"]


@dataclass(frozen=True)
class RunOptions:
    """One run: its seed, length, place and machine."""

    seed: Annotated[int, Interval(0)] = 1
    rounds: Annotated[int, Interval(1)] = 20
    output_dir: str = "~/fedsparse-runs"
    state_dir: str = ""
    resume: str = ""
    threads: Annotated[int, Interval(1)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: Autocast = "off"
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ModelOptions:
    """Which network."""

    name: str = "cnn"


@dataclass(frozen=True)
class StrategyOptions:
    """Which method; its own options are in the section of its name."""

    name: str = "fedfip"


SECTIONS: dict[str, type[Any]] = {
    "run": RunOptions,
    "strategy": StrategyOptions,
    "federation": FederationOptions,
    "data": DataOptions,
    "partition": PartitionOptions,
    "model": ModelOptions,
    "train": TrainingOptions,
    "privacy": PrivacyOptions,
    **{name: method.options for name, method in STRATEGIES.items()},
}


@dataclass(frozen=True)
class Config:
    """All options of a run; ``method`` are those of the chosen strategy."""

    run: RunOptions
    strategy: StrategyOptions
    federation: FederationOptions
    data: DataOptions
    partition: PartitionOptions
    model: ModelOptions
    train: TrainingOptions
    privacy: PrivacyOptions
    method: Any

    def flat(self) -> dict[str, Scalar]:
        """Return the options as dotted keys, those of other methods left out."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "method"}
        named[self.strategy.name] = self.method
        return {
            f"{section}.{field.name.replace('_', '-')}": getattr(options, field.name)
            for section, options in named.items()
            for field in fields(options)
        }

    def run_folder(self, run_id: int) -> Path:
        """Return where this run writes; server and simulated clients agree without a message.

        A resumed run writes where it began. On a device that has no such path its name counts.
        """
        parent = Path(self.run.output_dir).expanduser().resolve()
        if not self.run.resume:
            return parent / f"{run_id}-{self.strategy.name}-{self.data.name}"
        begun = (parent / Path(self.run.resume).expanduser()).resolve()
        return begun if begun.is_dir() else parent / begun.name


def read(run_config: Mapping[str, Any]) -> Config:
    """Turn Flower's flat run config into options.

    Raises
    ------
    ConfigError
        Naming the key, the value found, what is accepted and, for names, the nearest one.
    """
    known = {
        f"{section}.{field.name.replace('_', '-')}"
        for section, options in SECTIONS.items()
        for field in fields(options)
    }
    for key in run_config:
        if key not in known:
            raise ConfigError(f"{key}: unknown option{did_you_mean(key, known, cutoff=0.4) or '.'}")
    read_section = {
        section: _section(section, options, run_config) for section, options in SECTIONS.items()
    }
    tables: dict[str, Iterable[str]] = {
        "strategy": STRATEGIES,
        "data": (*DATASETS, folder.NAME),
        "model": MODELS,
    }
    for section, table in tables.items():
        _check_name(f"{section}.name", read_section[section].name, table)
    if read_section["data"].name == folder.NAME:
        _check_judge(read_section["data"], read_section["federation"])
    names = [field.name for field in fields(Config) if field.name != "method"]
    config = Config(
        **{name: read_section[name] for name in names},
        method=read_section[read_section["strategy"].name],
    )
    if config.privacy.on and (reason := _unprotected(config)):
        z = config.privacy.noise_multiplier
        raise ConfigError(f"privacy.noise-multiplier = {z:g}: {reason}; 0 switches privacy off")
    return config


def _unprotected(config: Config) -> str:
    """Return why differential privacy cannot be had with the other options; "" if it can."""
    name, federation = config.strategy.name, config.federation
    if reason := getattr(config.method, "unprotected", "has messages that it does not cover"):
        return f"{name} {reason}"
    if federation.merge != "mean":
        return (
            f"noise of many clients cancels in a mean, not in federation.merge = "
            f"{federation.merge!r}; must be 'mean'"
        )
    if federation.evaluate_on == "clients":
        return "federation.evaluate-on = 'clients' sends scores without noise; must be 'server'"
    if config.privacy.delta >= 1 / federation.clients:
        return (
            f"privacy.delta = {config.privacy.delta:g} would let one of {federation.clients} "
            f"clients be published whole; must be below {1 / federation.clients:g}"
        )
    return ""


def _section(section: str, options: type[Any], run_config: Mapping[str, Any]) -> Any:
    values = {}
    for field, kind, _, _ in field_types(options):
        key = f"{section}.{field.name.replace('_', '-')}"
        if key in run_config:
            value = run_config[key]
            is_whole = kind is float and isinstance(value, int) and not isinstance(value, bool)
            values[field.name] = float(value) if is_whole else value
    try:
        check_options(made := options(**values))
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from None
    return made


def _check_judge(data: DataOptions, federation: FederationOptions) -> None:
    if federation.evaluate_on == "server" and not data.test_dir:
        raise ConfigError(
            "federation.evaluate-on = 'server': the server sees no client's images; set "
            "data.test-dir to a folder of its own, or federation.evaluate-on='clients'"
        )


def _check_name(key: str, name: str, table: Iterable[str]) -> None:
    if name not in table:
        near = did_you_mean(name, table, cutoff=0.4) or "."
        raise ConfigError(f"{key} = {name!r}: unknown{near} Known: {', '.join(sorted(table))}")
