"""A SuperLink of one's own: the truth about the run, and nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fedsparse_app import superlink
from fedsparse_app.processes import end_sessions, members, sessions_below
from fedsparse_app.signals import ignoring_signals, leaving_on_signals
from fedsparse_app.superlink import local_superlink

PYPROJECT = """
[project]
name = "tiny"
version = "1.0.0"
description = "Ends at once"
license = { text = "Apache-2.0" }
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "tiny.server_app:app"
clientapp = "tiny.client_app:app"
[tool.flwr.app.config]
run.rounds = 1
run.output-dir = ""
federation.clients = 1
act = "end"
"""

SERVER_APP = """
import os, pathlib, time
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    options = context.run_config
    folder = pathlib.Path(options["run.output-dir"]) / f"run-{context.run_id}"
    folder.mkdir(parents=True)
    print(f"run folder: {folder}", "rounds", options["run.rounds"], flush=True)
    while len(list(grid.get_node_ids())) < options["federation.clients"]:
        time.sleep(0.05)
    print("cwd", os.listdir(), "nodes", len(list(grid.get_node_ids())), flush=True)
    if options["act"] == "raise":
        raise ValueError("strategy.name = 'fedfib': unknown")
    if options["act"] == "sleep":
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def tiny_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    app = tmp_path_factory.mktemp("app")
    (app / "tiny").mkdir()
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "tiny" / "__init__.py").write_text("")
    (app / "tiny" / "server_app.py").write_text(SERVER_APP)
    client_app = "from flwr.clientapp import ClientApp\napp = ClientApp()\n"
    (app / "tiny" / "client_app.py").write_text(client_app)
    return app


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Hold every temporary folder of these tests; short, for Ray's sockets are in there."""
    folder = Path(tempfile.mkdtemp(prefix="fs"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Stale:
    """What another project left on the machine's fixed port: healthy, and remembering who asked."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        stale = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stale.requests.append(self.path)
                self.send_response(200)
                self.end_headers()

            do_POST = do_GET

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def stale() -> Iterator[Stale]:
    stale = Stale()
    yield stale
    stale.server.shutdown()
    stale.server.server_close()


def start(app: Path, scratch: Path, stale: Stale, act: str) -> subprocess.Popen[str]:
    """Start ``fedsparse run`` on the tiny app with two clients."""
    (scratch / act[0]).mkdir()  # one letter: Ray's socket paths must fit into 107 bytes
    env = os.environ | {"TMPDIR": str(scratch / act[0]), "PYTHONPATH": str(Path.cwd())}
    env |= {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(stale.server.server_port)}
    command = f"-m fedsparse_app.cli run {app} --rounds 7 --clients 2 --workers 1"
    return subprocess.Popen(
        [sys.executable, *command.split(), "-c", f"act='{act}'", "--output-dir", "out"],
        env=env,
        cwd=app,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def ended(tiny_app: Path, scratch: Path, stale: Stale) -> dict[str, tuple[int, str, str]]:
    """Run three at once: one that is well, one that raises and one terminated in its middle."""
    runs = {act: start(tiny_app, scratch, stale, act) for act in ("sleep", "raise", "end")}
    try:
        await_worker(scratch / "s")
        runs["sleep"].send_signal(signal.SIGTERM)
        outputs = {act: run.communicate(timeout=120) for act, run in runs.items()}
    finally:
        for run in runs.values():
            run.terminate()
    return {act: (runs[act].returncode, *outputs[act]) for act in runs}


def await_worker(scratch: Path) -> None:
    """Wait until Ray's workers run: the most there can be to end, and our check sees them."""
    deadline = time.monotonic() + 120
    while not any("default_worker" in line or "ray::" in line for line in left_behind(scratch)):
        assert time.monotonic() < deadline, "no worker came up"
        time.sleep(0.2)


def left_behind(scratch: Path) -> list[str]:
    """Return files in ``scratch`` and processes that work in it or were told of it."""
    left = [str(path) for path in scratch.rglob("*") if not path.is_dir()]
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                traces = os.readlink(process / "cwd") + (process / "environ").read_text("latin-1")
                command = (process / "cmdline").read_text("latin-1").replace("\0", " ")
            except OSError:
                continue
            if f"{scratch}/" in traces + command:
                left.append(f"{process.name} {command}")
    return left


@pytest.mark.app
def test_a_run_that_completes_exits_with_0_and_names_its_folder_last(
    ended: dict[str, tuple[int, str, str]], tiny_app: Path
) -> None:
    code, out, err = ended["end"]
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("run folder:") and "7" in line][
        :1
    ]
    assert line.endswith("rounds 7")
    last = out.splitlines()[-1]
    assert last.startswith(f"run folder: {tiny_app}/out/run-")
    assert Path(last.removeprefix("run folder: ")).is_dir()


@pytest.mark.app
def test_the_app_runs_in_an_empty_folder_with_as_many_nodes_as_clients(
    ended: dict[str, tuple[int, str, str]],
) -> None:
    assert "cwd [] nodes 2" in ended["end"][1]


@pytest.mark.app
def test_a_run_that_raises_exits_with_1_and_the_reason(
    ended: dict[str, tuple[int, str, str]],
) -> None:
    code, out, err = ended["raise"]
    assert code == 1
    assert "error: finished:failed: " in err
    assert "ValueError: strategy.name = 'fedfib': unknown" in err
    assert "Traceback" not in err
    assert "Traceback" in out  # the log has it
    assert "run folder: " in out.splitlines()[-1]


@pytest.mark.app
@pytest.mark.usefixtures("ended")
def test_nothing_is_left_and_the_stale_superlink_was_never_asked(
    scratch: Path, stale: Stale
) -> None:
    assert left_behind(scratch) == []
    assert stale.requests == []
    with socket.create_connection(("127.0.0.1", stale.server.server_port), timeout=1):
        pass


@pytest.mark.app
def test_a_terminated_run_exits_as_such(ended: dict[str, tuple[int, str, str]]) -> None:
    assert ended["sleep"][0] == 128 + signal.SIGTERM


@pytest.mark.app
def test_an_exception_in_the_block_ends_the_superlink(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def interrupted() -> None:
        with local_superlink() as link:
            assert link.process.pid in members(link.sessions)
            assert len(members(link.sessions)) >= 2  # the SuperLink and its executor
            with pytest.raises(ValueError, match=r"flwr run: .*pyproject.toml"):
                link.submit(scratch / "no-app", {}, "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left_behind(scratch) == []


def test_a_superlink_that_does_not_answer_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(superlink, "_command", lambda *_: ["sleep", "600"])
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"), local_superlink(0.2):
        pass
    assert left_behind(tmp_path) == []


def test_a_superlink_that_ends_at_once_says_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(superlink, "_command", lambda *_: ["sh", "-c", "echo no licence; exit 3"])
    with pytest.raises(ChildProcessError, match="no licence"), local_superlink():
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_was_snatched_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def command(port: int, *_: object) -> list[str]:
        tries.append(port)
        return ["sh", "-c", "echo error: address already in use"]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(superlink, "_command", command)
    with pytest.raises(ChildProcessError, match="already in use"), local_superlink():
        pass
    assert len(tries) == superlink.ATTEMPTS


def test_an_environment_without_flower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match=r"flower-superlink: not found; pip install"):
        superlink._program("flower-superlink")


def test_a_session_is_ended_with_orphans_and_those_that_do_not_listen() -> None:
    # a grandchild in the same session, a deaf process, and a daughter in a session of her own
    script = "(sleep 600 &) ; setsid sleep 601 & trap '' TERM ; sleep 602 ; sleep 603"
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    other = subprocess.Popen(["sleep", "604"], start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while len(sessions_below(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        sessions = sessions_below(process.pid)
        assert len(members(sessions)) >= 3
        end_sessions(sessions, within=0.3)
        assert members(sessions) == set()
        assert other.poll() is None
    finally:
        process.kill()
        process.wait()
        other.kill()
        other.wait()


def test_ones_own_session_is_never_ended() -> None:
    assert os.getsid(0) not in sessions_below(os.getpid())
    end_sessions({os.getsid(0)}, within=0.1)
    assert os.getpid() in members({os.getsid(0)})


def test_sigterm_runs_the_cleaning_up_and_a_second_one_does_not_disturb_it() -> None:
    steps = []

    def work() -> None:
        with leaving_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
                steps.append("went on")
            finally:
                with ignoring_signals():
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGINT)
                    steps.append("cleaned")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        work()
    assert left.value.code == 128 + signal.SIGTERM
    assert steps == ["cleaned"]
    assert signal.getsignal(signal.SIGTERM) is before
