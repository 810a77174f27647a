"""run.device, run.autocast and run.deterministic on their way from the options to the training."""

import pytest
import torch

from fedsparse_app import inprocess
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.workload import device
from tests.fedsparse_app.small import SMALL, small_tables


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: emulated)
    with pytest.raises(ConfigError, match=r"run\.autocast = 'bf16'.*'fp16'"):
        device(read({"run.autocast": "bf16"}))
    assert device(read({"run.autocast": "fp16"})).type == "cuda"
    assert device(read({"run.autocast": "bf16", "run.device": "cpu"})).type == "cpu"


@pytest.mark.app
def test_autocast_reaches_the_clients_and_deterministic_changes_no_number(tmp_path):
    made, seen = {}, []

    def run(name, **options):
        place = {"run.output-dir": str(tmp_path / name), "strategy.name": "fedavg"}
        options = {f"run.{key}": value for key, value in options.items()}
        made[name] = inprocess.run({**SMALL, **place, "run.rounds": 1, **options})
        seen.append(torch.are_deterministic_algorithms_enabled())

    with small_tables():
        run("off")
        run("deterministic", deterministic=True)
        run("bf16", autocast="bf16")
    metrics = {name: (folder / "metrics.jsonl").read_bytes() for name, folder in made.items()}
    assert seen == [False, True, False]
    assert metrics["deterministic"] == metrics["off"] != metrics["bf16"]
