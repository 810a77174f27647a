"""A SuperLink of one's own for the time of one run.

``flwr run`` talks to whatever SuperLink answers on the machine's fixed local port. That one may
belong to another user, environment or checkout: its working directory comes first on the import
path of its workers, so it can serve other client code without a word. It also outlives the run.
The SuperLink here has a free port, an empty working directory, a Flower home of its own, the
environment of this interpreter, and ends with the ``with`` block, together with all it started.
"""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsparse_app.home import (
    CONNECTION,
    HOST,
    Tls,
    environment,
    free_ports,
    write_connection,
)
from fedsparse_app.processes import end_sessions, sessions_below
from fedsparse_app.signals import ignoring_signals, leaving_on_signals

__all__ = ["SuperLink", "local_superlink"]

READY_WITHIN = 60.0  # seconds; 3 s on a quiet machine, ten times that on a loaded one
ENDED_WITHIN = 5.0  # seconds between asking to end and killing
ATTEMPTS = 3  # a free port may be taken between looking and binding


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink and how to speak to it.

    Parameters
    ----------
    port : int
        On 127.0.0.1.
    folder : Path
        Holds its Flower home, working directory and log; removed when it ends.
    process : subprocess.Popen
        Leader of its own session.
    sessions : frozenset of int
        The sessions it opened until it answered.
    env : dict of str to str
        Environment of the SuperLink and of every ``flwr`` command.
    """

    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    sessions: frozenset[int]
    env: Mapping[str, str]

    def submit(self, app: Path, run_config: Mapping[str, object], federation: str) -> str:
        """Start a run and return its id.

        Parameters
        ----------
        app : Path
            Folder of the Flower App.
        run_config : dict of str to (int, float, bool or str)
            Overrides by dotted key; each must exist in the app's own config.
        federation : str
            Simulation settings as ``key=value`` pairs separated by spaces.

        Raises
        ------
        ValueError
            Flower refused the app or an option; its words.
        """
        import tomli_w

        path = self.folder / "run-config.toml"
        path.write_text(tomli_w.dumps(run_config), "utf-8")
        overrides = ["--run-config", str(path)] if run_config else []
        settings = ["--federation-config", federation] if federation else []
        return str(self._ask("run", str(app), CONNECTION, *overrides, *settings)["run-id"])

    def register(self, public_key: Path) -> str:
        """Let the SuperNode with this key take part and return the id it will have for ever."""
        return str(self._ask("supernode", "register", str(public_key), CONNECTION)["node-id"])

    def nodes(self) -> dict[str, str]:
        """Return the status (``online``, ``offline``, ...) of every registered SuperNode."""
        nodes = self._ask("supernode", "ls", CONNECTION)["nodes"]
        return {node["node-id"]: node["status"] for node in nodes}

    def log(self, run_id: str) -> Iterator[str]:
        """Yield the lines of a run's log as they come, until the run has ended."""
        process = subprocess.Popen(
            [_program("flwr"), "log", run_id, CONNECTION, "--stream"],
            env=self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us; we end it
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def status(self, run_id: str) -> tuple[str, str]:
        """Return Flower's status of a run (``finished:completed``, ...) and its reason or ''."""
        if self.process.poll() is not None:
            raise ChildProcessError(f"the SuperLink ended on its own: {self.last_words()}")
        run = self._ask("ls", CONNECTION, "--run-id", run_id)["runs"][0]
        details = run.get("status-details") or ""
        return run["status"], "" if details == "N/A" else details

    def last_words(self) -> str:
        """Return the last lines of the SuperLink's own log."""
        text = (self.folder / "superlink.log").read_text("utf-8", errors="replace")
        return " | ".join(text.strip().splitlines()[-3:]) or "it said nothing"

    def _ask(self, *command: str) -> dict[str, Any]:
        done = subprocess.run(
            [_program("flwr"), *command, "--format", "json"],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {"error-message": done.stderr or done.stdout}
        if answer.get("success"):
            return answer
        words = str(answer.get("error-message", "")).splitlines()
        words = [line.strip() for line in words if line and "Using SuperLink" not in line]
        raise ValueError(f"flwr {command[0]}: {' '.join(words)}")


@contextmanager
def local_superlink(
    ready_within: float = READY_WITHIN, tls: Tls | None = None
) -> Iterator[SuperLink]:
    """Start a SuperLink and end it, and all it started, with the block.

    The end comes on success, exceptions, Ctrl-C, SIGTERM and SIGHUP alike.

    Parameters
    ----------
    ready_within : float, seconds
        How long it may take until it answers.
    tls : Tls or None
        None simulates the SuperNodes. With it real ones are served, on an encrypted connection
        and only those whose key is registered.

    Raises
    ------
    TimeoutError
        It did not answer in time.
    ChildProcessError
        It ended before it answered.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedsparse-"))
    started: list[subprocess.Popen[bytes]] = []
    sessions: set[int] = set()
    with leaving_on_signals():
        try:
            link = _start(folder, ready_within, started, tls)
            sessions |= link.sessions
            yield link
        finally:
            with ignoring_signals():
                for process in started:
                    _end(process, sessions)
                shutil.rmtree(folder, ignore_errors=True)


def _start(
    folder: Path, ready_within: float, started: list[subprocess.Popen[bytes]], tls: Tls | None
) -> SuperLink:
    """Start the process on a free port and wait for it; again where the port was snatched."""
    work = folder / "empty"
    work.mkdir()
    for attempt in range(1, ATTEMPTS + 1):
        (port,), env = free_ports(1), environment(folder)
        write_connection(folder / "home", port, tls)
        with open(folder / "superlink.log", "wb") as log:
            process = subprocess.Popen(
                _command(port, tls),
                env=env,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        link = SuperLink(port, folder, process, frozenset({process.pid}), env)
        if _answers(link, time.monotonic() + ready_within, tls):
            sessions = frozenset(sessions_below(process.pid))
            return SuperLink(port, folder, process, sessions, env)
        if process.poll() is None:
            raise TimeoutError(f"the SuperLink did not answer within {ready_within:g} s")
        if attempt == ATTEMPTS or "address already in use" not in link.last_words():
            break
    raise ChildProcessError(f"the SuperLink ended before it answered: {link.last_words()}")


def _answers(link: SuperLink, deadline: float, tls: Tls | None) -> bool:
    """Wait until the SuperLink is healthy; False when it has ended or the deadline has passed."""
    while link.process.poll() is None and time.monotonic() < deadline:
        connection = _connection(link.port, tls)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return link.process.poll() is None
        connection.close()
        time.sleep(0.1)
    return False


def _connection(port: int, tls: Tls | None) -> http.client.HTTPConnection:
    """Return a connection that knows no proxy."""
    if tls is None:
        return http.client.HTTPConnection(HOST, port, timeout=1.0)
    context = ssl.create_default_context(cafile=tls.ca)
    return http.client.HTTPSConnection(HOST, port, timeout=1.0, context=context)


def _end(process: subprocess.Popen[bytes], sessions: set[int]) -> None:
    """End the SuperLink and every process in the sessions that it opened."""
    ours = sessions | sessions_below(process.pid) | {process.pid}
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDED_WITHIN)
    end_sessions(ours, ENDED_WITHIN)
    process.wait()


def _command(port: int, tls: Tls | None) -> list[str]:
    command = [_program("flower-superlink"), "--isolation", "subprocess"]
    command += ["--host", HOST, "--port", str(port)]
    if tls is None:
        return [*command, "--insecure", "--simulation"]
    command += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)]
    return [*command, "--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]


def _program(name: str) -> str:
    """Return a command of this interpreter's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name}: not found; pip install 'flwr[simulation]'")
    return found
