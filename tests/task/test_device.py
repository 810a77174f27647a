import os

import pytest
import torch
from torch import nn

from task.data.dataset import Samples
from task.device import make_deterministic, move, place, to_host
from task.train import TrainingOptions, fit


class Stub:
    """Stands for a tensor on the CPU: there is no CUDA to move a real one to."""

    device = torch.device("cpu")

    def __init__(self, log=()):
        self.log = log

    def pin_memory(self):
        return Stub((*self.log, "pinned"))

    def to(self, device, non_blocking=False):
        return Stub((*self.log, device.type, non_blocking))


def test_tensors_go_to_cuda_through_pinned_memory_and_elsewhere_straight():
    assert move(Stub(), torch.device("cuda")).log == ("pinned", "cuda", True)
    assert move(Stub(), torch.device("cpu")).log == ("cpu", False)


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.ones(2)
    assert move(tensor, torch.device("cpu")) is tensor
    assert to_host({"t": tensor})["t"].data_ptr() == tensor.data_ptr()
    layer = nn.Linear(2, 2)
    weight = layer.weight
    assert place(layer, torch.device("cpu")).weight is weight


def test_deterministic_algorithms_are_switched_on_and_off(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    make_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def trained(autocast, clip):
    """Return what training changed in the weights, all in one vector, and the mean loss."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(1), nn.Linear(8 * 36, 4)
    )
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 3, 8, 8, generator=draw), torch.arange(32) % 4
    samples = Samples(x, y, torch.zeros_like(y))
    options = TrainingOptions(epochs=2, batch_size=8, lr=0.01, clip=clip)
    done = fit(net, samples, options, torch.Generator().manual_seed(2), autocast=autocast)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    return after - before, done.loss / done.samples


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("autocast", "tolerance"), [("bf16", 0.15), ("fp16", 0.03)])
def test_autocast_trains_the_same_network_less_precisely(autocast, tolerance, clip):
    wanted, loss = trained("off", clip)
    found, half_loss = trained(autocast, clip)
    off = float((found - wanted).norm() / wanted.norm())
    assert 1e-5 < off < tolerance
    assert half_loss == pytest.approx(loss, rel=0.02)
