"""Run the app and say truthfully how it ended.

``flwr run`` exits with 0 as soon as the run was accepted. Here the verdict is the status that
Flower gives the run in the end, and the reason comes with it.
"""

import re
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsparse_app.overrides import Scalar, app_options, check_known, parse_overrides
from fedsparse_app.run_folder import options_of
from fedsparse_app.superlink import SuperLink, local_superlink

__all__ = ["Outcome", "Request", "launch", "run_on", "simulation"]

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TROUBLE = re.compile(r"\bERROR\b|^\s*[\w.]*(Error|Exception)\b")
LINES_KEPT = 200  # of the log, to find the reason in
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """What to run; None leaves a value to the app, or to the machine.

    Parameters
    ----------
    app : Path
        Folder of the Flower App.
    config : tuple of str
        Overrides as typed, see ``parse_overrides``; the fields below win over them.
    rounds, clients : int or None
        ``run.rounds`` and ``federation.clients``; each client is one simulated SuperNode.
    workers : int or None
        Clients that train at the same time.
    output_dir : Path or None
        Where run folders go; ``./runs`` where the overrides do not say either.
    resume : Path or None
        Run folder to go on with; its options hold where nothing else is said.
    """

    app: Path = Path(".")
    config: tuple[str, ...] = ()
    rounds: int | None = None
    clients: int | None = None
    workers: int | None = None
    output_dir: Path | None = None
    resume: Path | None = None

    def overrides(self) -> dict[str, Scalar]:
        """Return the run options to override, with an absolute ``run.output-dir``."""
        options = self._begun() | parse_overrides(self.config)
        named = {"run.rounds": self.rounds, "federation.clients": self.clients}
        options |= {key: value for key, value in named.items() if value is not None}
        # Relative to the caller: the app itself runs in a folder of the SuperLink.
        place = self.output_dir or Path(str(options.get("run.output-dir") or "runs"))
        return options | {"run.output-dir": str(place.expanduser().absolute())}

    def _begun(self) -> dict[str, Scalar]:
        """Return the options of the run to go on with."""
        if self.resume is None:
            return {}
        if self.output_dir is not None:
            raise ValueError("--resume goes on in the run's own folder; leave out --output-dir")
        folder = self.resume.expanduser().resolve()
        options = options_of(folder)
        return options | {"run.output-dir": str(folder.parent), "run.resume": str(folder)}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: completed or not, why not, and its run folder as far as it was seen."""

    completed: bool
    reason: str
    folder: Path | None


def launch(
    request: Request, echo: Callable[[str], None] = print, *, in_process: bool = False
) -> Outcome:
    """Run an app in simulation, on a SuperLink of its own or in this process.

    Parameters
    ----------
    request : Request
        What to run.
    echo : callable
        Takes every line of the log.
    in_process : bool
        Run the app of this package here, one client after the other, without SuperLink and Ray.

    Raises
    ------
    ValueError, OSError
        An option cannot be used, Flower refused the app, or the SuperLink failed.
    """
    overrides = request.overrides()
    if in_process:
        return _in_process(request, overrides, echo)
    options = app_options(request.app)
    check_known(overrides, options)
    clients = (options | overrides).get("federation.clients")
    return _on_superlink(request, overrides, simulation(clients, request.workers), echo)


def simulation(clients: Scalar | None, workers: int | None) -> str:
    """Return Flower's simulation settings: one CPU a client, at most ``workers`` at a time."""
    settings = {
        "num-supernodes": clients,
        "client-resources-num-cpus": 1,
        "init-args-num-cpus": workers,
    }
    return " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)


def _on_superlink(
    request: Request,
    overrides: Mapping[str, Scalar],
    federation: str,
    echo: Callable[[str], None],
) -> Outcome:
    with local_superlink() as link:
        return run_on(link, request.app, overrides, federation, echo)


def run_on(
    link: SuperLink,
    app: Path,
    overrides: Mapping[str, Scalar],
    federation: str,
    echo: Callable[[str], None],
) -> Outcome:
    """Run an app on a SuperLink that is up; for the parameters see ``launch`` and ``submit``."""
    folder, lines = None, deque[str](maxlen=LINES_KEPT)
    run_id = link.submit(app.resolve(), overrides, federation)
    for line in link.log(run_id):
        echo(line)
        lines.append(COLOUR.sub("", line))
        folder = folder or _folder_in(lines[-1], str(overrides["run.output-dir"]))
    status, details = _final_status(link, run_id)
    completed = status == "finished:completed"
    return Outcome(completed, "" if completed else _reason(status, details, lines), folder)


def _in_process(
    request: Request, overrides: dict[str, Scalar], echo: Callable[[str], None]
) -> Outcome:
    if request.app != Path(".") or request.workers is not None:
        raise ValueError(
            "--in-process runs the installed app, one client at a time; leave out APP and --workers"
        )
    from fedsparse_app.inprocess import run

    try:
        return Outcome(True, "", run(overrides))
    except RuntimeError as error:  # a failed run, not an option: where it happened matters
        for line in traceback.format_exc().splitlines():
            echo(line)
        return Outcome(False, str(error), None)


def _folder_in(line: str, parent: str) -> Path | None:
    """Return the run folder where a line of the log names one: a folder in the output folder."""
    if found := re.search(re.escape(parent.rstrip("/")) + r"/([^/\s'\"]+)", line):
        folder = Path(parent) / found[1].rstrip(".,:;)")
        return folder if folder.is_dir() else None
    return None


def _final_status(link: SuperLink, run_id: str) -> tuple[str, str]:
    """Wait for the verdict: the log may end a moment before the run does, or be cut off."""
    while True:
        status, details = link.status(run_id)
        if status.startswith("finished:"):
            return status, details
        time.sleep(POLL_SECONDS)


def _reason(status: str, details: str, lines: Sequence[str]) -> str:
    trouble = [line.strip() for line in lines if TROUBLE.search(line)][-3:]
    return "\n  ".join([f"{status}: {details}" if details else status, *trouble])
