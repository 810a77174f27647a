"""The script that compares a GPU with the CPU, tried where there is none."""

import pytest
import torch

from benchmarks import gpu
from tests.strategies.federation import network

TINY = ["--samples", "32", "--batch", "16", "--repeats", "1"]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(gpu, "SHAPE", (2, 6, 6))
    monkeypatch.setattr(gpu, "CLASSES", 4)
    monkeypatch.setattr(gpu, "build", lambda *_: network())
    monkeypatch.setattr(gpu, "example", lambda *_: torch.randn(2, 2, 6, 6))


def test_the_cpu_equals_itself(capsys):
    assert gpu.main(["--device", "cpu", *TINY]) == 0
    said = capsys.readouterr().out
    assert said.count(": same (") == 3
    assert said.count("ms a step") == 3 * 4


def test_a_difference_is_found_and_named(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "OPTIONS", {"fedavg": {}})
    monkeypatch.setattr(gpu, "times", lambda *_: ())
    honest, calls = gpu.shares, []

    def other_the_second_time(samples):
        calls.append(samples)
        made = honest(samples)
        return made if len(calls) % 2 else type(made)(made.x.flip(3), made.y, made.domain)

    monkeypatch.setattr(gpu, "shares", other_the_second_time)
    assert gpu.main(["--device", "cpu", *TINY]) == 1
    assert "fedavg: DIFFERS in weights" in capsys.readouterr().out


def test_without_cuda_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(TINY) == 2
    assert "no CUDA device" in capsys.readouterr().out
