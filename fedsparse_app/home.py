"""Where Flower's commands look for their SuperLink: environment, Flower home, ports."""

import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONNECTION", "HOST", "Tls", "environment", "free_ports", "write_connection"]

HOST = "127.0.0.1"
CONNECTION = "own"  # name of the SuperLink in the Flower home written here
RAY_PATH_LIMIT = 36  # longest folder for which Ray's sockets still fit into 107 bytes


@dataclass(frozen=True)
class Tls:
    """Files of a SuperLink for SuperNodes: its CA's certificate, its own and its private key."""

    ca: Path
    certificate: Path
    key: Path


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: this interpreter, a home in ``folder``."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["FLWR_HOME"] = str(folder / "home")
    env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"  # else `uv sync` at every run
    env["FLWR_TELEMETRY_ENABLED"] = "0"
    env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    env["PYTHONUNBUFFERED"] = "1"  # log lines come when they are written
    env["NO_PROXY"] = env["no_proxy"] = ",".join(filter(None, [env.get("NO_PROXY"), HOST]))
    env.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers may see the GPUs
    if len(str(folder)) <= RAY_PATH_LIMIT:
        env["RAY_TMPDIR"] = str(folder)  # Ray keeps the logs of every run; these go with us
    return env


def write_connection(home: Path, port: int, tls: Tls | None) -> None:
    """Name our SuperLink in Flower's config by address: `flwr` then starts and seeks no other."""
    home.mkdir(exist_ok=True)
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    text += f'address = "{HOST}:{port}"\n'
    text += f'root-certificates = "{tls.ca.absolute()}"\n' if tls else "insecure = true\n"
    (home / "config.toml").write_text(text, "utf-8")


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free now, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
