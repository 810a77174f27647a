"""The scripts of deploy/ one by one, without a federation."""

import configparser
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fedsparse_app.launch import Outcome
from tests.deploy.scripts import DEPLOY, module

DEVICE = """
superlink = "127.0.0.1:1"
ca = "ca.crt"
key = "key"
[node]
client-id = "camera 1"
keep = 0.5
spare = true
"""


@pytest.fixture
def device(tmp_path: Path) -> Path:
    for name in ("ca.crt", "key"):
        (tmp_path / name).write_text("x")
    path = tmp_path / "device.toml"
    path.write_text(DEVICE)
    return path


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [DEPLOY / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_certificate_serves_all_its_hosts_and_the_ca_is_kept(tmp_path: Path) -> None:
    assert run("certificates.sh", tmp_path, "localhost", "127.0.0.1").returncode == 0
    ca = (tmp_path / "ca.crt").read_text()
    assert run("certificates.sh", tmp_path, "fleet.example.org", "10.0.0.5", "::1").returncode == 0
    assert (tmp_path / "ca.crt").read_text() == ca
    verify = f"openssl verify -CAfile {tmp_path}/ca.crt {{}} {tmp_path}/server.pem"
    for check in ("-verify_hostname fleet.example.org", "-verify_ip 10.0.0.5", "-verify_ip ::1"):
        assert subprocess.run(verify.format(check).split(), capture_output=True).returncode == 0
    wrong = verify.format("-verify_hostname localhost").split()
    assert subprocess.run(wrong, capture_output=True).returncode != 0
    assert {(tmp_path / name).stat().st_mode & 0o077 for name in ("ca.key", "server.key")} == {0}


def test_a_key_that_is_there_is_kept(tmp_path: Path) -> None:
    assert run("keys.sh", tmp_path, "a").stdout == f"{tmp_path}/a.pub\n"
    first = (tmp_path / "a").read_text()
    assert run("keys.sh", tmp_path, "a", "b").returncode == 0
    assert (tmp_path / "a").read_text() == first
    assert (tmp_path / "b.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


@pytest.mark.parametrize("script", ["certificates.sh", "keys.sh", "supernode.py"])
def test_without_arguments_a_script_says_how_it_is_used(script: str) -> None:
    done = run(script)
    assert done.returncode == 2
    assert f"deploy/{script}" in done.stderr


def test_a_device_file_becomes_a_command(device: Path) -> None:
    supernode = module("supernode")
    command = supernode.command(supernode.read_device(device))
    assert command[0] == "flower-supernode"
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert pairs["--superlink"] == "127.0.0.1:1"
    assert pairs["--root-certificates"] == str(device.parent / "ca.crt")
    assert pairs["--node-config"] == "client-id='camera 1' keep=0.5 spare=true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEVICE.replace("key =", "keys ="), "keys: unknown"),
        (DEVICE.replace('superlink = "127.0.0.1:1"', ""), "superlink = None: wants str"),
        (DEVICE.replace('"127.0.0.1:1"', "8000"), "superlink = 8000: wants str"),
        ("heartbeat = 5\n" + DEVICE, "Flower takes 10 to 1800"),
        (DEVICE.replace('"key"', '"nokey"'), "key: no file"),
        ("[", "device.toml: "),
        (DEVICE + 'name = "it\'s"', "quotes"),
    ],
)
def test_a_device_file_that_cannot_be_used_is_refused(
    device: Path, text: str, message: str
) -> None:
    device.write_text(text)
    done = run("supernode.py", device)
    assert done.returncode == 2
    assert message in done.stderr


def supervise(device: Path, script: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> str:
    """Let the supervisor run ``script`` instead of a SuperNode, then stop it; return its words."""
    made = module("supernode").Supervisor(device, retry=0.05)
    made.command = ["bash", "-c", script]
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        made.run()
    finally:
        timer.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    return capsys.readouterr().out


def test_a_refused_supernode_is_started_again_until_it_stays(
    device: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
        echo x >> {tmp_path}/lives
        [ $(wc -l < {tmp_path}/lives) -ge 3 ] && {{ echo stays; exec sleep 600; }}
        echo 'Exit Code: 305'; exit 1
    """
    said = supervise(device, script, 1.0, capsys)
    assert said.count("SuperNode ended (exit code 305); starts again in 0.05 s") == 2
    assert said.count("stays") == 1
    assert said.rstrip().endswith("supervisor: stopped")


def test_a_killed_supernode_takes_its_clients_with_it(
    device: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"sleep 600 & echo $! >> {tmp_path}/clients; kill -9 $$"
    said = supervise(device, script, 0.5, capsys)
    assert "SuperNode ended (killed by SIGKILL)" in said
    for pid in (tmp_path / "clients").read_text().split():
        deadline = time.monotonic() + 5
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(pid)


def alive(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("completed", [True, False])
def test_the_fleet_exits_with_the_truth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    completed: bool,
) -> None:
    fleet = module("fleet")

    @contextmanager
    def no_fleet(*_: object):
        yield SimpleNamespace(run=lambda request: Outcome(completed, "why", tmp_path))

    monkeypatch.setattr(fleet, "fleet", no_fleet)
    monkeypatch.setattr("sys.argv", ["fleet.py", "--data", str(tmp_path)])
    assert fleet.main() == int(not completed)
    assert ("error: why" in capsys.readouterr().err) is not completed


def test_a_fleet_with_too_little_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data" / "client-0" / "mnist" / "7").mkdir(parents=True)
    done = run("fleet.py", "--data", tmp_path / "data", "--folder", tmp_path)
    assert done.returncode == 1
    assert "1 client folders for 4 devices" in done.stderr


def test_the_options_of_a_fleet_are_those_of_its_folders(tmp_path: Path) -> None:
    for path in ("a/mnist/7", "a/syn/3", "b/mnist/3", "test/syn/0"):
        (tmp_path / path).mkdir(parents=True)
    options = module("fleet").agreement(tmp_path)
    assert options["data.domains"] == "mnist,syn"
    assert options["data.classes"] == "0,3,7"
    assert options["data.test-dir"] == str(tmp_path / "test")


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_compose_files_name_what_is_there(path: Path) -> None:
    (service,) = yaml.safe_load(path.read_text())["services"].values()
    assert service["restart"] == "unless-stopped"
    context = path.parent / service["build"]["context"]
    lines = (context / service["build"]["dockerfile"]).read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    sources = [part for parts in copied for part in parts if not part.startswith("--")]
    assert sources
    assert all((context / source).exists() for source in sources)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.service")), ids=lambda path: path.name)
def test_units_start_what_is_there(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string("\n".join(line for line in path.read_text().split("\n")))
    assert unit["Service"]["Restart"] == "always"
    scripts = [word for word in unit["Service"]["ExecStart"].split() if "/deploy/" in word]
    assert all((DEPLOY / script.rpartition("/")[2]).exists() for script in scripts)
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_example_device_names_every_key() -> None:
    supernode, text = module("supernode"), (DEPLOY / "device.toml").read_text()
    assert all(f"\n{key} = " in text for key in supernode.OPTIONAL)
    assert all(f"{key} = " in text for key in supernode.REQUIRED if key != "node")
