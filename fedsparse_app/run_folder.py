"""What a run left on disk, read back; whatever is missing or cut off is said, not guessed."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "Run", "options_of", "read_run"]

Row = Mapping[str, Any]

EXPECTED = (
    "a run folder holds config.toml, metrics.jsonl, timing.jsonl, clients.jsonl, partition.json"
)


@dataclass(frozen=True)
class Run:
    """A run folder in memory.

    Parameters
    ----------
    folder : Path
        Where it lies.
    options : dict of str to scalar
        The resolved run options by dotted key.
    versions : dict of str to str
        What it ran with.
    rounds, timing, clients : list of dict
        The lines of metrics.jsonl, timing.jsonl and clients.jsonl.
    partition : dict
        ``domains``, ``classes`` and per client its samples.
    notes : tuple of str
        What the reader should know: lines cut off, rounds that are not there.
    finished : bool
        All ``run.rounds`` rounds are there.
    """

    folder: Path
    options: Mapping[str, Any]
    versions: Mapping[str, Any]
    rounds: list[Row]
    timing: list[Row]
    clients: list[Row]
    partition: Row
    notes: tuple[str, ...]
    finished: bool

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @property
    def strategy(self) -> str:
        """The strategy as named in the options."""
        return str(self.options.get("strategy.name", "?"))


def read_run(folder: Path) -> Run:
    """Read a run folder.

    A last line that was cut off, as a killed run leaves it, is dropped and noted.

    Raises
    ------
    ValueError
        No such folder, a file is missing or no round was finished, or a file is damaged:
        which one and where.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder that a run printed")
    config, partition = _toml(folder / "config.toml"), _json(folder / "partition.json")
    notes: list[str] = []
    rounds = _lines(folder / "metrics.jsonl", {"round", "global", "personal"}, notes)
    timing = _lines(folder / "timing.jsonl", {"round"}, notes)
    clients = _lines(folder / "clients.jsonl", {"round", "client"}, notes)
    if not rounds:
        raise ValueError(f"{folder / 'metrics.jsonl'}: holds no round yet; the run never got there")
    options = config.get("options", {})
    last, wanted = rounds[-1]["round"], options.get("run.rounds")
    finished = wanted is None or last >= wanted
    if not finished:
        notes.append(f"unfinished: {last} of {wanted} rounds are there")
    return Run(
        folder,
        options,
        config.get("versions", {}),
        rounds,
        timing,
        clients,
        partition,
        tuple(notes),
        finished,
    )


def options_of(folder: Path) -> dict[str, Any]:
    """Return the resolved options of the run in ``folder`` by dotted key.

    Raises
    ------
    ValueError
        There is no such run, or its config.toml is damaged.
    """
    return dict(_toml(folder / "config.toml").get("options", {}))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {EXPECTED}") from error


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged: an object was expected, found {value!r:.40}")
    return value


def _lines(path: Path, fields: set[str], notes: list[str]) -> list[Row]:
    """Return the objects of a JSON-lines file; the last line may be cut off."""
    lines = _text(path).rstrip("\n").split("\n")  # splitlines() would also cut inside strings
    return list(_parsed(path, lines, fields, notes))


def _parsed(path: Path, lines: list[str], fields: set[str], notes: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                notes.append(f"{path.name}: the last line ({number}) is cut off and left out")
                return
            raise ValueError(f"{path}, line {number}: damaged: {error}") from error
        if not isinstance(row, dict) or (missing := fields - row.keys()):
            what = f"lacks {', '.join(sorted(missing))}" if isinstance(row, dict) else "no object"
            raise ValueError(f"{path}, line {number}: damaged: {what}")
        yield row
