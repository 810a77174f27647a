"""Going on with a run that was stopped: which one, whether it can be, and from where."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.supercore import log
from safetensors import SafetensorError, safe_open

from fedsparse_app.checkpoint import Checkpoint, load_checkpoint
from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from fedsparse_app.files import owned, sweep
from fedsparse_app.journal import cut
from fedsparse_app.overrides import Scalar
from fedsparse_app.recipe import NOT_INSTALLED, versions
from fedsparse_app.state import rewind
from task.channels import State

__all__ = ["MAY_DIFFER", "open_folder", "resumed"]

MAY_DIFFER = {
    "run.rounds",
    "run.resume",
    "run.output-dir",
    "run.device",
    "run.threads",
    "federation.timeout",
    "federation.wait",
    "federation.patience",
}
"""Options that decide where, how long and with what patience, but not what is computed."""


@contextmanager
def open_folder(config: Config, run_id: int) -> Iterator[Path]:
    """Give the folder of a run, made where it is a new one, and keep other runs out of it.

    Raises
    ------
    ConfigError, ValueError
        The run to resume is not there, or it is still being written.
    """
    folder = config.run_folder(run_id)
    if not config.run.resume:
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
        raise ConfigError(
            f"run.resume = {config.run.resume!r}: no folder {folder} on this machine; give the "
            "absolute path that the run printed, or its name inside run.output-dir"
        )
    with owned(folder):
        yield folder


def resumed(config: Config, folder: Path, initial: State, partition: object) -> Checkpoint:
    """Return where the run in ``folder`` goes on; take back what it wrote after that.

    Parameters
    ----------
    initial : State
        Of the network that ``config`` describes.
    partition : json or None
        The split that ``config`` describes.

    Raises
    ------
    ConfigError, ValueError
        There is nothing to go on with, or it is not the run that ``config`` describes; the folder
        is as it was then.
    """
    checkpoint = load_checkpoint(folder)
    _check_versions(folder, checkpoint.versions)
    _check_options(folder, config.flat(), checkpoint.options)
    _check_rounds(folder, checkpoint.round, config.run.rounds)
    _check_model(folder, checkpoint.model, initial)
    if partition is not None:
        _check_partition(folder / "partition.json", partition)
    cut(folder, checkpoint.round)
    sweep(folder)
    for root in (folder / "histories", folder / "clients"):
        rewind(root, checkpoint.round)
    log(INFO, "resumed after round %d of %d", checkpoint.round, config.run.rounds)
    return checkpoint


def _check_versions(folder: Path, then: Mapping[str, str]) -> None:
    now = versions()
    known = {p: (v, now[p]) for p, v in then.items() if NOT_INSTALLED not in (v, now[p])}
    differ = {package: pair for package, pair in known.items() if pair[0] != pair[1]}
    if "fedsparse" in differ:
        old, new = differ["fedsparse"]
        raise ConfigError(
            f"{folder}: written by fedsparse {old}, and this is {new}, which may compute something "
            f"else; install fedsparse {old} to go on, or start a new run"
        )
    for package, (old, new) in differ.items():
        log(WARNING, "%s was %s and is %s: last bits may differ", package, old, new)


def _check_options(folder: Path, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    absent = "not set"
    other = then.get("strategy.name") != now.get("strategy.name")  # which has options of its own
    keys = (now.keys() & then.keys() if other else now.keys() | then.keys()) - MAY_DIFFER
    pairs = {key: (then.get(key, absent), now.get(key, absent)) for key in sorted(keys)}
    differ = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if not differ:
        return
    lines = "".join(
        f"\n  {key} = {new!r}, the run began with {old!r}" for key, (old, new) in differ.items()
    )
    repeat = " ".join(f"{key}={_typed(old)}" for key, (old, _) in differ.items() if old != absent)
    advice = f'add to -c "{repeat}", or use  fedsparse run --resume {folder}  which reads them; '
    if not repeat:
        advice = "this version has options that the run did not know, so resume with that of then; "
    raise ConfigError(
        f"run.resume = {str(folder)!r}: not the run that these options describe:{lines}\n{advice}"
        f"only {', '.join(sorted(MAY_DIFFER - {'run.resume'}))} may change"
    )


def _typed(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def _check_rounds(folder: Path, done: int, wanted: int) -> None:
    if done > wanted or (done == wanted and _closed(folder, done)):
        raise ConfigError(
            f"run.rounds = {wanted}: the run in {folder} has done {done} rounds and is finished; "
            f"give run.rounds above {done} to go on, or leave out run.resume to start a new run"
        )


def _closed(folder: Path, round: int) -> bool:
    """Whether the final model is there: a kill may come between it and the last round."""
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return (file.metadata() or {}).get("round") == str(round)
    except (SafetensorError, OSError):
        return False


def _check_model(folder: Path, found: State, expected: State) -> None:
    def shapes(state: State) -> dict[str, str]:
        return {name: f"{tuple(t.shape)} {t.dtype}" for name, t in state.items()}

    then, now = shapes(found), shapes(expected)
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise ConfigError(
                f"{folder}: {name} is {then.get(name, 'not there')} in the checkpoint and "
                f"{now.get(name, 'not there')} in the network of model.name; resume with the code "
                "that began the run, or start a new run"
            )


def _check_partition(path: Path, now: object) -> None:
    try:
        then = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # written anew
    if then != json.loads(json.dumps(now)):
        raise ConfigError(
            f"{path}: the data or its split is not what the run began with; resume with the same "
            "data, or start a new run"
        )
