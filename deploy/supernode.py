#!/usr/bin/env python3
"""Keep a device in the federation: start its SuperNode, and again whenever it ends.

    deploy/supernode.py device.toml           # until Ctrl-C or SIGTERM
    deploy/supernode.py --once device.toml    # for supervisors of your own

Flower believes a killed SuperNode alive until its heartbeats have been missing for a minute, and
refuses it (exit code 305) for so long; it does not try again by itself. This script does. The keys
of device.toml are listed in docs/deployment.md; nothing is imported but Flower.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

WARM = Path(__file__).resolve().parent / "warm"
REQUIRED = {"superlink": str, "ca": str, "key": str, "node": dict}
OPTIONAL = {"port": (int, 9094), "retry": (int, 20), "heartbeat": (int, 30), "warm": (bool, False)}
FILES = ("ca", "key")
INTERVAL = "HEARTBEAT_DEFAULT_INTERVAL"
ENDED_WITHIN = 15.0  # seconds: a SuperNode that is told to end says goodbye to the SuperLink


class DeviceError(ValueError):
    """device.toml cannot be used."""


def read_device(path: Path) -> dict[str, Any]:
    """Return the keys of a device file, with defaults; its paths count from the file's folder.

    Raises
    ------
    DeviceError
        A key is unknown, missing or of another type, or a file is not there.
    """
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DeviceError(f"{path}: {error}") from None
    kinds = REQUIRED | {key: kind for key, (kind, _) in OPTIONAL.items()}
    for key in [*given, *(key for key in REQUIRED if key not in given)]:
        if key not in kinds:
            raise DeviceError(f"{path}: {key}: unknown; known: {', '.join(sorted(kinds))}")
        if type(given.get(key)) is not kinds[key]:
            raise DeviceError(f"{path}: {key} = {given.get(key)!r}: wants {kinds[key].__name__}")
    device = {key: default for key, (_, default) in OPTIONAL.items()} | given
    if not 10 <= device["heartbeat"] <= 1800:
        raise DeviceError(f"{path}: heartbeat = {device['heartbeat']}: Flower takes 10 to 1800")
    for key in FILES:
        device[key] = str(path.resolve().parent / Path(device[key]).expanduser())
        if not Path(device[key]).is_file():
            raise DeviceError(f"{path}: {key}: no file {device[key]}")
    return device


def command(device: dict[str, Any]) -> list[str]:
    """Return what starts Flower's SuperNode."""
    return [
        "flower-supernode",
        *("--superlink", device["superlink"]),
        *("--root-certificates", device["ca"]),
        *("--auth-supernode-private-key", device["key"]),
        *("--port", str(device["port"])),
        *("--node-config", " ".join(f"{k}={toml(v)}" for k, v in device["node"].items())),
    ]


def toml(value: object) -> str:
    """Write one value of the node config; Flower takes strings, numbers and booleans."""
    if isinstance(value, str):
        if "'" in value or "\n" in value:
            raise DeviceError(f"node config {value!r}: quotes and line ends do not fit")
        return f"'{value}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def be_supernode(device: dict[str, Any]) -> None:
    """Turn this process into the SuperNode."""
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.cli.flower_supernode import flower_supernode

    # The SuperLink takes 10 to 1800 s from each SuperNode; flower-supernode has no option for it.
    for module in (heartbeat, fleet_http_connection):
        if not hasattr(module, INTERVAL):
            raise DeviceError(f"heartbeat: not known where in this Flower; {INTERVAL} has moved")
        setattr(module, INTERVAL, device["heartbeat"])
    beside = Path(sys.executable).parent  # of flower-superexec, which Flower seeks on the PATH
    first = [str(WARM)] if device["warm"] else []
    os.environ["PATH"] = os.pathsep.join([*first, str(beside), os.environ.get("PATH", "")])
    sys.argv = command(device)
    flower_supernode()


class Supervisor:
    """One SuperNode at a time, with all it starts, until a signal says stop."""

    def __init__(self, path: Path, retry: float) -> None:
        self.command = [sys.executable, str(Path(__file__).resolve()), "--once", str(path)]
        self.retry = retry
        self.stopped = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Start the SuperNode, wait for its end, and again."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)
        while not self.stopped.is_set():
            code, reason = self.life()
            if not self.stopped.is_set():
                say(f"SuperNode ended ({reason or how(code)}); starts again in {self.retry:g} s")
                self.stopped.wait(self.retry)
        say("stopped")

    def life(self) -> tuple[int, str]:
        """Run one SuperNode to its end; return its exit status and Flower's exit code in words."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        say(f"SuperNode started, process {self.process.pid}")
        if self.stopped.is_set():  # a signal while it was starting
            self.process.terminate()
        assert self.process.stdout is not None
        reasons: list[str] = []
        # A thread, because what the SuperNode started may hold the pipe open after its end.
        echo = threading.Thread(target=pass_on, args=(self.process.stdout, reasons), daemon=True)
        echo.start()
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a client at work for a dead SuperNode
        echo.join(1.0)
        return code, reasons[-1] if reasons else ""

    def stop(self, number: int, frame: FrameType | None) -> None:
        """End the SuperNode: gently, so that the SuperLink knows at once."""
        self.stopped.set()
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            killer = threading.Timer(ENDED_WITHIN, process.kill)
            killer.daemon = True
            killer.start()


def pass_on(lines: IO[str], reasons: list[str]) -> None:
    """Print what the SuperNode says and note Flower's exit codes."""
    for line in lines:
        print(line, end="", flush=True)
        if found := re.search(r"Exit Code: (\d+)", line):
            reasons.append(f"exit code {found[1]}")


def how(code: int) -> str:
    """Return an exit status in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def say(text: str) -> None:
    """Print with the time, beside Flower's lines."""
    print(f"{time.strftime('%H:%M:%S')} supervisor: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    once = arguments[:1] == ["--once"]
    if len(arguments) != 1 + once or arguments[-1].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    path = Path(arguments[-1])
    try:
        device = read_device(path)
        command(device)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    if once:
        be_supernode(device)
    else:
        Supervisor(path, device["retry"]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
