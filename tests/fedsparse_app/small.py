"""A data set and a network with which a whole run takes a second."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fedsparse_app import server_app
from task import data
from task.data.dataset import DataSet, Samples
from task.models import MODELS

SMALL = {
    "run.rounds": 2,
    "federation.clients": 3,
    "federation.evaluate-on": "clients",
    "data.name": "small",
    "model.name": "small",
    "train.epochs": 1,
    "fedfip.keep": 0.5,
    "fedfip.phi": 0.0,
    "fedfip.react-max": 0.2,
    "fedfip.fisher-refresh": 1,
    "subflot.rates": "0.25, 0.5",
}


def small_network(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(1),
        nn.Linear(6 * 16, classes),
    )


def small_data():
    draw = torch.Generator().manual_seed(3)
    n, y = 300, torch.randint(3, (300,), generator=draw)
    x = torch.randint(120, (n, 1, 8, 8), generator=draw) + 60 * y.view(-1, 1, 1, 1)
    samples = Samples(x.to(torch.uint8), y, torch.arange(n) % 2)
    return DataSet("small", ("even", "odd"), ("a", "b", "c"), samples, samples)


@contextmanager
def small_tables():
    """Put both into the tables, and write no report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.DATASETS, "small", small_data)
        patch.setitem(MODELS, "small", small_network)
        patch.setattr(server_app, "_report", lambda recorder: None)
        yield patch
