#!/usr/bin/env python3
"""A whole federation on this machine: SuperLink, TLS, SuperNodes with keys, data and capacities.

    deploy/fleet.py --rounds 3 -c "strategy.name='subflot'"
    deploy/fleet.py --stay        # up until Ctrl-C, for `flwr run` from another terminal

Everything it starts ends with it. The exit code is 0 only if the run has completed.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout that this script belongs to

from fedsparse_app.home import HOST, Tls, free_ports  # noqa: E402
from fedsparse_app.launch import Outcome, Request, run_on  # noqa: E402
from fedsparse_app.overrides import Scalar, app_options, check_known  # noqa: E402
from fedsparse_app.processes import end_sessions  # noqa: E402
from fedsparse_app.signals import ignoring_signals  # noqa: E402
from fedsparse_app.superlink import SuperLink, local_superlink  # noqa: E402

CAPACITIES = ("keep=0.25", "keep=0.5", "keep=0.75", "keep=1.0")
TEST = "test"  # the server's folder among those of the clients
HEARTBEAT = 12  # seconds; a killed SuperNode is taken back after twice that
RETRY = 4  # seconds
READY_WITHIN = 120.0  # seconds
GOODBYE_WITHIN = 20.0  # seconds


@dataclass(frozen=True)
class Device:
    """One supervised SuperNode with a folder of its own."""

    name: str
    folder: Path
    node_id: str
    supervisor: subprocess.Popen[bytes]

    def log(self) -> str:
        """Return what supervisor, SuperNode and clients have said so far."""
        return (self.folder / "log").read_text("utf-8", errors="replace")

    def supernode(self) -> int:
        """Return the process id of the SuperNode started last; of its session, too."""
        return int(re.findall(r"SuperNode started, process (\d+)", self.log())[-1])

    def end(self) -> None:
        """End the supervisor, its SuperNode and all that this has started."""
        with suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(GOODBYE_WITHIN)
        with suppress(IndexError):
            end_sessions({self.supernode()}, 1.0)
        self.supervisor.kill()
        self.supervisor.wait()


@dataclass(frozen=True)
class Fleet:
    """A SuperLink and its devices, and the options that fit their data."""

    link: SuperLink
    tls: Tls
    devices: tuple[Device, ...]
    options: dict[str, Scalar]

    def run(self, request: Request, echo: Callable[[str], None] = print) -> Outcome:
        """Run the app on the devices; options of the request win."""
        overrides = self.options | request.overrides()
        check_known(overrides, app_options(request.app))
        return run_on(self.link, request.app, overrides, "", echo)

    def await_devices(self) -> None:
        """Wait until every SuperNode has reported to the SuperLink.

        Raises
        ------
        TimeoutError
            One has not; its last words are in the message.
        """
        deadline = time.monotonic() + READY_WITHIN
        while True:
            nodes = self.link.nodes()
            absent = [device for device in self.devices if nodes[device.node_id] != "online"]
            if not absent:
                return
            if time.monotonic() > deadline:
                said = " | ".join(absent[0].log().strip().splitlines()[-3:])
                raise TimeoutError(f"{absent[0].name} not online in {READY_WITHIN:g} s: {said}")
            time.sleep(0.5)


@contextmanager
def fleet(folder: Path, data: Path, capacities: Sequence[str] = CAPACITIES) -> Iterator[Fleet]:
    """Start a federation on loopback and end it with the block.

    Parameters
    ----------
    folder : Path
        For certificates, keys, logs and the devices' state; kept afterwards.
    data : Path
        One folder of images per client, as ``fedsparse data`` writes them, and one named test.
    capacities : sequence of str
        Node config of each device, ``keep=0.5`` or ``budget-mflops=3``.
    """
    clients = [tree for tree in sorted(data.iterdir()) if tree.is_dir() and tree.name != TEST]
    if len(clients) < len(capacities):
        raise ValueError(f"{data}: {len(clients)} client folders for {len(capacities)} devices")
    clients = clients[: len(capacities)]
    names = [tree.name for tree in clients]
    script(HERE / "certificates.sh", folder / "pki", "localhost", HOST)
    script(HERE / "keys.sh", folder / "keys", *names)
    pki = folder / "pki"
    tls = Tls(pki / "ca.crt", pki / "server.pem", pki / "server.key")
    with local_superlink(tls=tls) as link, ExitStack() as stack:
        devices: list[Device] = []
        stack.callback(end, devices)
        ports = free_ports(len(names))
        for tree, capacity, port in zip(clients, capacities, ports, strict=True):
            devices.append(start(folder, link, tree, capacity, port))
        yield Fleet(link, tls, tuple(devices), agreement(data) | {"federation.clients": len(names)})


def start(folder: Path, link: SuperLink, tree: Path, capacity: str, port: int) -> Device:
    """Register a device's key and start its supervisor."""
    name, place = tree.name, folder / "devices" / tree.name
    place.mkdir(parents=True, exist_ok=True)
    node_id = link.register(folder / "keys" / f"{name}.pub")
    (place / "device.toml").write_text(
        f'superlink = "{HOST}:{link.port}"\n'
        f'ca = "{folder / "pki" / "ca.crt"}"\nkey = "{folder / "keys" / name}"\n'
        f"port = {port}\nretry = {RETRY}\nheartbeat = {HEARTBEAT}\nwarm = true\n\n"
        f'[node]\nclient-id = "{name}"\n{capacity}\n'
        f'data-dir = "{tree.resolve()}"\nstate-dir = "{place / "state"}"\n',
        "utf-8",
    )
    env = {
        **link.env,
        "FLWR_HOME": str(place / "flower"),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    with open(place / "log", "wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, HERE / "supernode.py", place / "device.toml"],
            env=env,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us; we end it
        )
    return Device(name, place, node_id, supervisor)


def end(devices: Sequence[Device]) -> None:
    """End all devices, at the same time."""
    with ignoring_signals():
        for device in devices:
            device.supervisor.terminate()
        for device in devices:
            device.end()


def agreement(data: Path) -> dict[str, Scalar]:
    """Return the run options that describe the images in ``data``."""
    branches = [branch for branch in data.glob("*/*") if branch.is_dir()]
    classes = {folder.name for branch in branches for folder in branch.iterdir() if folder.is_dir()}
    return {
        "data.name": "folder",
        "data.domains": ",".join(sorted({branch.name for branch in branches})),
        "data.classes": ",".join(sorted(classes)),
        "data.test-dir": str((data / TEST).resolve()),
    }


def script(path: Path, *arguments: object) -> None:
    """Run one of the scripts beside this one."""
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{path.name}: {done.stderr.strip() or done.stdout.strip()}")


def digits(folder: Path, clients: int) -> Path:
    """Return a folder with the embedded digits as images, written on first use."""
    from fedsparse_app.config import read
    from fedsparse_app.trees import write_trees
    from task.data import load

    data = folder / f"digits-{clients}"
    if not data.exists():
        write_trees(data, load("digits"), read({"federation.clients": clients}))
    return data


def stay(up: Fleet) -> None:
    """Say how to reach the fleet and wait for a signal."""
    up.await_devices()
    options = " ".join(f"{key}={value!r}" for key, value in up.options.items())
    print(f"{len(up.devices)} SuperNodes are online; logs: {up.devices[0].folder.parent}/*/log")
    print(f'FLWR_HOME={up.link.env["FLWR_HOME"]} flwr run . --stream -c "{options}"')
    print("Ctrl-C ends it", flush=True)
    while True:
        time.sleep(1)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="run.rounds")
    parser.add_argument("-c", "--run-config", action="append", default=[], help="as of flwr run")
    parser.add_argument("--data", type=Path, help="client folders; default: the embedded digits")
    parser.add_argument("--folder", type=Path, help="keys, logs, state; default: a temporary one")
    parser.add_argument("--capacity", nargs="+", default=CAPACITIES, help="node config per device")
    parser.add_argument("--output-dir", type=Path, help="of run folders; default: ./runs")
    parser.add_argument("--stay", action="store_true", help="run nothing, wait for Ctrl-C")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    given = arguments()
    try:
        with ExitStack() as stack:
            folder = given.folder or stack.enter_context(TemporaryDirectory(prefix="fleet-"))
            folder = Path(folder).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            data = given.data or digits(folder, len(given.capacity))
            up = stack.enter_context(fleet(folder, data, given.capacity))
            if given.stay:
                stay(up)
            request = Request(
                HERE.parent, tuple(given.run_config), given.rounds, output_dir=given.output_dir
            )
            outcome = up.run(request)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if outcome.folder:
        print(f"run folder: {outcome.folder}")
    if not outcome.completed:
        print(f"error: {outcome.reason}", file=sys.stderr)
    return int(not outcome.completed)


if __name__ == "__main__":
    sys.exit(main())
