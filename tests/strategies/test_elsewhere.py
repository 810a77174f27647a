"""The client halves on a device that is not the CPU: same numbers, no tensor left behind."""

from dataclasses import replace

import pytest
import torch

from strategies.records import Job
from tests.elsewhere import PLACE, Elsewhere, elsewhere
from tests.strategies.federation import Federation

METHODS = {
    "fedavg": {},
    "fedfip": {"keep": 0.5, "phi": 0.2, "react_max": 0.3, "fisher_refresh": 1, "dsr_every": 1},
    "fedfip without refresh, gate-fd, by weight": {
        "keep": 0.5,
        "fisher_refresh": 0,
        "dsr_grad": "gate-fd",
        "fisher": "weight",
        "dsr_every": 1,
    },
    "subflot with local norms and importance": {"bn_local": True, "importance": "cost"},
}


def federation(name, device):
    fed = Federation(name.split()[0], clients=2, **METHODS[name])
    for half in fed.halves.values():
        shares = {"train": half.me.train.to(device), "test": half.me.test.to(device)}
        half.me = replace(half.me, device=device, **shares)
    return fed


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_are_those_of_the_cpu(name):
    wanted = federation(name, torch.device("cpu"))
    wanted.run(2)
    with elsewhere():
        fed = federation(name, PLACE)
        fed.run(2)
        whole = fed.channels.full()
        job = Job("client-00", 2, whole, fed.server.state, whole)
        scores = fed.halves[job.client].evaluate(job)
        network = fed.halves[job.client].me.submodel(whole, fed.server.state)
        assert all(isinstance(t, Elsewhere) for t in network.state_dict().values())
    assert [round.failures for round in fed.rounds] == [{}] * 3
    for key, tensor in wanted.server.state.items():
        assert torch.equal(fed.server.state[key], tensor), key
    assert torch.equal(scores.loss, wanted.halves[job.client].evaluate(job).loss)


def test_a_tensor_left_on_the_cpu_is_found():
    with elsewhere():
        x = torch.ones(3).to(PLACE)
        assert isinstance(x, Elsewhere)
        assert (2 * x.sum()).item() == 6
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            x + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()
