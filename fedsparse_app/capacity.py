"""What a device can carry: stated in its node config, solved from a budget, measured on request."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from fedsparse_app.workload import Workload, device, workload
from strategies.hello import Hello
from task.budget import Budget, widest_keep
from task.data.dataset import Samples
from task.submodel import slice_module
from task.train import TrainingOptions, fit

__all__ = ["CAPACITY", "carried", "measured_speed", "with_capacity"]

CAPACITY = ("keep", "budget-mflops", "budget-mparams")
"""The keys of node config that state a capacity."""

PROBE_STEPS = 3


def with_capacity(hello: Hello, node: Mapping[str, Any], config: Config) -> Hello:
    """Return ``hello`` with what the device can carry, or with the reason why it cannot take part.

    Parameters
    ----------
    hello : Hello
        Of one client of the node.
    node : mapping
        Node config: any of ``CAPACITY``, and ``probe=true`` to measure the time of a step.
    config : Config
        Options of the run.
    """
    try:
        keep = carried(node, workload(config)) if {*CAPACITY} & {*node} else None
    except ConfigError as error:
        return replace(hello, refusal=str(error))
    speed = None
    if node.get("probe", False):
        width = 1.0 if keep is None else keep
        speed = measured_speed(workload(config), width, config.train, device(config))
    return replace(hello, keep=keep, speed=speed)


def carried(stated: Mapping[str, Any], work: Workload) -> float | None:
    """Return the fraction of width that a device can carry; None where it states nothing.

    Parameters
    ----------
    stated : mapping
        Some of ``CAPACITY``, the smallest counts; other keys are not looked at.
    work : Workload
        The dense network and its costs.

    Raises
    ------
    ConfigError
        A value is no limit, or a budget that no network meets: its name, its value, and what the
        narrowest network costs.
    """
    limits = {key.replace("-", "_"): _number(stated[key]) for key in CAPACITY if key in stated}
    if not limits:
        return None
    try:
        return widest_keep(
            work.channels,
            Budget(**limits),
            lambda kept: work.costs(slice_module(work.model, work.channels, kept)),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def measured_speed(
    work: Workload, keep: float, training: TrainingOptions, place: torch.device
) -> float:
    """Return training FLOPs per second: the best of a few steps of the network cut to ``keep``.

    The first step is not counted. Methods that add a term to the loss take longer.
    """
    network = slice_module(work.model, work.channels, work.channels.prefix(keep)).to(place)
    rows = torch.arange(training.batch_size)
    labels = rows % work.score_shape[1]
    batch = Samples(work.example[rows % len(work.example)], labels, 0 * labels).to(place)
    step = replace(training, epochs=1)
    seconds = []
    for _ in range(1 + PROBE_STEPS):
        begin = time.perf_counter()
        fit(network, batch, step, torch.Generator().manual_seed(0))
        seconds.append(time.perf_counter() - begin)
    return work.costs(network)["train-flops"] * len(rows) / min(seconds[1:])


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
