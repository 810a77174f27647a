"""A data set and a network so small that a whole run takes a second."""

import torch

from strategies import STRATEGIES
from task.data import DATASETS, DataSet, Samples
from task.models import MODELS
from tests.strategies.federation import CLASSES, DOMAINS, network

__all__ = ["METHODS", "install", "options", "remove"]

SAMPLES, TESTS = 60, 12  # of each domain

COMMON = {
    "run.rounds": 4,
    "data.name": "toy",
    "model.name": "toy",
    "federation.clients": 4,
    "train.epochs": 1,
    "train.batch-size": 8,
}

# Whatever lives longer than a round is in one of them: masks, Fisher, prototypes, private channels;
# histories of unequal age, widths that change, norms that stay with the client; sampling.
OWN = {
    "fedavg": {"federation.fraction": 0.75, "federation.evaluate-every": 3},
    "fedfip": {
        "fedfip.keep": 0.5,
        "fedfip.phi": 0.2,
        "fedfip.react-max": 0.4,
        "fedfip.fisher-refresh": 2,
        "fedfip.kappa": 0.5,
        "fedfip.dsr-every": 2,
        "fedfip.dsr-batch": 8,
    },
    "subflot": {
        "subflot.rate-mode": "dynamic",
        "subflot.bn-local": True,
        "subflot.importance": "cost",
        "federation.fraction": 0.75,
    },
}


METHODS = {name: OWN.get(name, {}) for name in STRATEGIES}


def install():
    """Put ``toy`` into the tables."""
    DATASETS["toy"] = data
    MODELS["toy"] = lambda shape, classes: network()


def remove():
    del DATASETS["toy"], MODELS["toy"]


def options(method, output_dir):
    return COMMON | METHODS[method] | {"strategy.name": method, "run.output-dir": str(output_dir)}


def data():
    names = tuple(f"domain-{k}" for k in range(DOMAINS))
    classes = tuple(str(c) for c in range(CLASSES))
    return DataSet("toy", names, classes, samples(SAMPLES, 1), samples(TESTS, 2))


def samples(each, seed):
    """Draw images in which a class is a bright quadrant and a domain an offset."""
    draw = torch.Generator().manual_seed(seed)
    domain = torch.arange(DOMAINS).repeat_interleave(each)
    y = torch.arange(CLASSES).repeat(DOMAINS * each // CLASSES)
    x = 0.5 * torch.randn(len(y), 2, 6, 6, generator=draw) + domain.view(-1, 1, 1, 1)
    for image, c in zip(x, y.tolist(), strict=True):
        image[:, 3 * (c // 2) : 3 * (c // 2) + 3, 3 * (c % 2) : 3 * (c % 2) + 3] += 2
    return Samples(x, y, domain)
