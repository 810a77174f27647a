"""A real federation on this machine: TLS, keys, four capacities, one SuperNode killed."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedsparse_app.home import HOST, free_ports
from fedsparse_app.launch import Outcome, Request
from fedsparse_app.processes import members
from tests.deploy.scripts import DEPLOY, few_digits, module

pytestmark = [pytest.mark.deploy, pytest.mark.app]

ROUNDS = 3
VICTIM = 1  # of the devices, killed in FEDFIP's second round
COMMON = "train.epochs=1 federation.evaluate-every=3 federation.timeout=120.0"


@dataclass
class Story:
    """What happened, looked at after all has ended."""

    names: list[str] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    strangers: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)

    def rounds(self, method: str) -> list[dict[str, Any]]:
        return self._lines(method, "metrics.jsonl")

    def clients(self, method: str) -> list[dict[str, Any]]:
        return self._lines(method, "clients.jsonl")

    def _lines(self, method: str, name: str) -> list[dict[str, Any]]:
        folder = self.outcomes[method].folder
        assert folder is not None
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("fleet")
    told, scripts = Story(), module("fleet")
    with scripts.fleet(folder, few_digits(folder / "digits")) as up:
        strangers = start_strangers(up, folder)
        try:
            told.names = [device.name for device in up.devices]
            told.node_ids = [device.node_id for device in up.devices]
            for method in ("fedfip", "subflot"):
                config = (f"{COMMON} strategy.name='{method}'",)
                request = Request(DEPLOY.parent, config, ROUNDS, output_dir=folder / "runs")
                echo = Killer(up.devices[VICTIM]) if method == "fedfip" else print
                told.outcomes[method] = up.run(request, echo)
            told.nodes = up.link.nodes()
            told.logs = [device.log() for device in up.devices]
            told.strangers = {
                name: (process.poll(), (folder / name).read_text())
                for name, process in strangers.items()
            }
            told.sessions = {up.link.process.pid, *(device.supernode() for device in up.devices)}
            told.sessions |= {device.supervisor.pid for device in up.devices}
        finally:
            for process in strangers.values():
                process.kill()
                process.wait()
    return told


class Killer:
    """Takes the lines of a run's log; kills a SuperNode that is at work for the second round."""

    def __init__(self, device: Any) -> None:
        self.device, self.killed = device, False

    def __call__(self, line: str) -> None:
        print(line)
        if f"1/{ROUNDS} |" in line and not self.killed:
            deadline = time.monotonic() + 120
            while "ROUND 2]" not in self.device.log():
                assert time.monotonic() < deadline, "round 2 never reached the device"
                time.sleep(0.05)
            os.kill(self.device.supernode(), signal.SIGKILL)
            self.killed = True


def start_strangers(up: Any, folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    """Start SuperNodes that have no business here."""
    subprocess.run([DEPLOY / "keys.sh", folder / "strange", "key"], check=True)
    key = ["--auth-supernode-private-key", folder / "strange" / "key"]
    ca = ["--root-certificates", up.tls.ca]
    options = {"no key": ca, "unregistered key": [*ca, *key], "no CA": key, "plain": ["--insecure"]}
    processes = {}
    for (name, extra), port in zip(options.items(), free_ports(len(options)), strict=True):
        command = ["flower-supernode", *extra, "--superlink", f"{HOST}:{up.link.port}"]
        with open(folder / name, "wb") as log:
            processes[name] = subprocess.Popen(
                [*command, "--port", str(port), "--max-retries", "1", "--isolation", "process"],
                env={**up.link.env, "FLWR_HOME": str(folder / "strange" / name)},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    return processes


@pytest.mark.parametrize("method", ["fedfip", "subflot"])
def test_the_run_completes_with_all_its_rounds(story: Story, method: str) -> None:
    assert story.outcomes[method].completed, story.outcomes[method].reason
    assert [line["round"] for line in story.rounds(method)] == list(range(ROUNDS + 1))


def test_the_round_of_the_kill_goes_on_without_the_victim(story: Story) -> None:
    victim = story.names[VICTIM]
    failed = {
        (line["round"], line["client"]): line["failure"]
        for line in story.clients("fedfip")
        if line["failure"]
    }
    assert {client for _, client in failed} == {victim}
    assert "Node Unavailable" in failed[2, victim]
    trained = {line["client"] for line in story.clients("fedfip") if line["round"] == 2}
    assert trained >= set(story.names)


def test_the_supervisor_tries_again_until_the_superlink_takes_the_victim_back(
    story: Story,
) -> None:
    log = story.logs[VICTIM]
    assert "SuperNode ended (killed by SIGKILL)" in log
    assert "SuperNode ended (exit code 305)" in log
    lives = [line.split()[-1] for line in log.splitlines() if "SuperNode ID:" in line]
    assert lives == [story.node_ids[VICTIM]] * 2  # the same key, the same node


def test_in_the_end_every_client_counts(story: Story) -> None:
    last = [line for line in story.clients("subflot") if line["round"] == ROUNDS]
    assert {line["client"]: line["failure"] for line in last} == dict.fromkeys(story.names)
    first = [line for line in story.clients("fedfip") if line["round"] == 1]
    assert {line["client"]: line["failure"] for line in first} == dict.fromkeys(story.names)


def test_every_device_trains_at_its_capacity(story: Story) -> None:
    last = {line["client"]: line for line in story.clients("subflot") if line["round"] == ROUNDS}
    widths = [last[name]["keep"] for name in story.names]
    assert widths == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.02)


def test_strangers_are_turned_away(story: Story) -> None:
    assert {name: code for name, (code, _) in story.strangers.items()} == dict.fromkeys(
        story.strangers, 1
    )
    for name, (_, text) in story.strangers.items():
        assert "Exit Code: 305" in text, name
        assert "Receiving" not in text, name
    assert sorted(story.nodes) == sorted(story.node_ids)
    assert set(story.nodes.values()) == {"online"}


def test_nothing_is_left_running(story: Story) -> None:
    assert story.sessions
    assert members(story.sessions) == set()
