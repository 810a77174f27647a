import math

import pytest
import torch

from task.budget import Budget, distinct_keeps, widest_keep
from task.cost import flops, parameters
from task.errors import DataError
from task.models import build, example
from task.submodel import slice_module
from task.trace import trace

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def work():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 5, 3, padding=1),
        torch.nn.BatchNorm2d(5),
        torch.nn.ReLU(),
        torch.nn.Conv2d(5, 7, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(1),
        torch.nn.Linear(7 * 64, 3),
    )
    inputs = torch.randn(2, *SHAPE)
    channels = trace(model, inputs)

    known = {}

    def cost(kept):
        key = tuple(len(index) for index in kept.values())
        if key not in known:
            network = slice_module(model, channels, kept)
            known[key] = {"parameters": parameters(network), "flops": flops(network, inputs)[0]}
        return known[key]

    return channels, cost


def widths(channels, keep):
    return tuple(len(index) for index in channels.prefix(keep).values())


def test_the_keeps_are_one_for_each_network_there_is(work):
    channels, _ = work
    found = [widths(channels, keep) for keep in distinct_keeps(channels)]
    fine = dict.fromkeys(widths(channels, i / 5000) for i in range(1, 5001))
    assert found == list(fine)


@pytest.mark.parametrize("field", ["flops", "parameters"])
def test_the_widest_network_that_fits_is_that_of_trying_all(work, field):
    channels, cost = work
    tried = {i / 1000: cost(channels.prefix(i / 1000))[field] for i in range(4, 1001, 4)}
    option = {"flops": "budget_mflops", "parameters": "budget_mparams"}[field]
    for limit in sorted({*tried.values()})[::2]:
        for slack in (0, 1, -1):
            best = max((k for k, c in tried.items() if c <= limit + slack), default=None)
            if best is None:
                continue
            keep = widest_keep(channels, Budget(**{option: (limit + slack) / 1e6}), cost)
            assert widths(channels, keep) == widths(channels, best), (limit, slack)


def test_of_several_limits_the_smallest_counts(work):
    channels, cost = work
    by_flops = widest_keep(channels, Budget(budget_mflops=0.02), cost)
    by_parameters = widest_keep(channels, Budget(budget_mparams=0.0006), cost)
    assert 0 < by_parameters < by_flops < 1
    both = Budget(budget_mflops=0.02, budget_mparams=0.0006)
    assert widest_keep(channels, both, cost) == by_parameters
    assert widest_keep(channels, Budget(0.1, 0.02, 0.0006), cost) == 0.1
    assert widest_keep(channels, Budget(0.99, 0.02), cost) == by_flops


def test_without_a_budget_nothing_is_measured(work):
    def never(kept):
        raise AssertionError("measured")

    assert widest_keep(work[0], Budget(), never) == 1.0
    assert widest_keep(work[0], Budget(keep=0.3), never) == 0.3


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(budget_mflops=0.001), r"budget-mflops = 0\.001: .*takes 0\.00[0-9]+ million flops"),
        (Budget(budget_mparams=1e-5), r"budget-mparams = 1e-05: .*takes 0\.000[0-9]+ million par"),
    ],
)
def test_a_budget_below_the_narrowest_network_says_what_that_costs(work, budget, message):
    with pytest.raises(DataError, match=message):
        widest_keep(*work[:1], budget, work[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": 0.0}, r"keep = 0\.0: must be in \(0, 1\]"),
        ({"keep": 1.5}, r"keep = 1\.5"),
        ({"budget_mflops": -1.0}, r"budget-mflops = -1\.0: must be > 0"),
        ({"budget_mparams": math.nan}, r"budget-mparams = nan"),
        ({"budget_mflops": "3 M"}, r"budget-mflops = '3 M': must be a number"),
    ],
)
def test_a_limit_that_is_none_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Budget(**values)


def test_it_is_quick_for_a_network_of_real_size():
    model = build("cnn", (1, 28, 28), 10)
    inputs = example("cnn", (1, 28, 28))
    channels, calls = trace(model, inputs), []

    def cost(kept):
        calls.append(kept)
        network = slice_module(model, channels, kept)
        return {"parameters": parameters(network), "flops": flops(network, inputs)[0]}

    keep = widest_keep(channels, Budget(budget_mparams=0.02), cost)
    best = slice_module(model, channels, channels.prefix(keep))
    assert parameters(best) <= 20_000
    assert len(calls) <= 10
