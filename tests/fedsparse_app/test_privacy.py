"""A whole run under differential privacy: what it prints, what it leaves, what it keeps back."""

import json

import pytest

from fedsparse_app import inprocess
from fedsparse_app.checkpoint import load_checkpoint
from fedsparse_app.run_folder import read_run
from strategies.privacy import Ledger, PrivacyOptions

pytestmark = pytest.mark.app

OPTIONS = {
    "run.rounds": 1,
    "strategy.name": "fedavg",
    "fedavg.keep": 0.3,
    "federation.clients": 4,
    "train.epochs": 1,
    "train.batch-size": 256,
    "privacy.noise-multiplier": 0.5,
}


def test_a_run_states_epsilon_first_in_every_round_and_last(tmp_path, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        folder = inprocess.run({**OPTIONS, "run.output-dir": str(tmp_path)})
    planned = Ledger(PrivacyOptions(noise_multiplier=0.5)).planned(1, 4)
    rounds = read_run(folder).rounds
    assert rounds[0]["privacy"] == {"epsilon": 0.0, "epsilon_server": 0.0, "delta": 1e-5}
    assert rounds[1]["privacy"] == pytest.approx(planned)
    lines = [r.getMessage() for r in caplog.records if "at delta" in r.getMessage()]
    assert len(lines) == 2
    for line in lines:
        assert f"{planned['epsilon']:.4g}" in line
        assert f"{planned['epsilon_server']:.4g}" in line
    assert not any("seeded" in r.getMessage() for r in caplog.records)
    assert (rounds[1]["loss"], rounds[1]["personal"]) == (None, None)
    clients = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    for client in clients:
        told = ("loss", "samples", "steps", "seconds", "accuracy")
        assert [client[name] for name in told] == [None] * 5
    begun = load_checkpoint(folder)
    assert all(set(hello.domains.values()) == {1} for hello in begun.clients)
    assert begun.ledger["asked"] == {f"client-0{i}": 1 for i in range(4)}
    options = {**OPTIONS, "run.output-dir": str(tmp_path), "run.resume": str(folder)}
    assert inprocess.run({**options, "run.rounds": 2}) == folder
    # The round under way when a run stops is asked for again, so it counts: 1 + 1 + 1.
    assert load_checkpoint(folder).ledger["asked"] == {f"client-0{i}": 3 for i in range(4)}
