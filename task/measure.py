"""How a network that runs elsewhere compares with the one it was made from."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["inputs", "largest_difference", "latency"]

Run = Callable[[Tensor], Tensor]

BATCHES = (1, 5)
"""Neither is the batch that a network is traced with."""


def inputs(example: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return ``count`` random inputs like ``example``: noise, or its token sequences in turn."""
    if example.is_floating_point():
        source = torch.Generator().manual_seed(seed)
        return torch.randn(count, *example.shape[1:], generator=source)
    return example[torch.arange(count) % len(example)]


@torch.no_grad()
def largest_difference(run: Run, reference: Run, example: Tensor) -> float:
    """Return the largest |difference| of outputs, in units of the largest |output|.

    Infinite where an output has another shape or is not a number.
    """
    worst = 0.0
    for count in BATCHES:
        x = inputs(example, count, seed=count)
        found, wanted = run(x), reference(x)
        if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
            return float("inf")
        scale = float(wanted.abs().max()) or 1.0
        worst = max(worst, float((found - wanted).abs().max()) / scale)
    return worst


@torch.no_grad()
def latency(runs: Sequence[Run], example: Tensor, repeats: int) -> list[float]:
    """Return the median seconds of one sample on one thread, of each of ``runs``.

    They are timed in turn, so that a slow spell of the machine hits all of them alike; the first
    turns do not count.
    """
    sample, threads = inputs(example, 1), torch.get_num_threads()
    taken: list[list[float]] = [[] for _ in runs]
    torch.set_num_threads(1)
    try:
        for turn in range(-3, repeats):
            for run, times in zip(runs, taken, strict=True):
                begin = time.perf_counter()
                run(sample)
                if turn >= 0:
                    times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(times) for times in taken]
