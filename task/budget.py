"""The widest network that a device can carry, solved from a budget of FLOPs or parameters."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Annotated

from task.channels import ChannelMap, Kept
from task.errors import DataError
from task.options import Interval, check_options

__all__ = ["Budget", "distinct_keeps", "widest_keep"]


@dataclass(frozen=True)
class Budget:
    """What a device can carry; the default is no limit, and all limits hold together.

    Parameters
    ----------
    keep : float
        Fraction of width.
    budget_mflops : float
        Million FLOPs of one sample's forward pass.
    budget_mparams : float
        Million trainable parameters.
    """

    keep: Annotated[float, Interval(0, 1, open_low=True)] = 1.0
    budget_mflops: Annotated[float, Interval(0, open_low=True)] = math.inf
    budget_mparams: Annotated[float, Interval(0, open_low=True)] = math.inf

    def __post_init__(self) -> None:
        check_options(self)


def widest_keep(
    channels: ChannelMap, budget: Budget, cost: Callable[[Kept], Mapping[str, float]]
) -> float:
    """Return the largest fraction of width whose network, its leading channels, fits ``budget``.

    Costs grow with the width, so the networks that rounding tells apart are searched by halves.

    Parameters
    ----------
    channels : ChannelMap
        Of the dense network.
    budget : Budget
        The limits.
    cost : callable
        Kept channels -> ``parameters`` and ``flops`` of one sample, of the network cut to them.

    Returns
    -------
    float in (0, 1]

    Raises
    ------
    DataError
        Not even the narrowest network fits; the message says the limit and what that one costs.
    """
    limits = {"flops": budget.budget_mflops, "parameters": budget.budget_mparams}

    def excess(keep: float) -> list[str]:
        costs = cost(channels.prefix(keep)) if min(limits.values()) < math.inf else {}
        return [name for name, limit in limits.items() if costs.get(name, 0) / 1e6 > limit]

    keeps = distinct_keeps(channels)
    fitting = bisect_left(keeps, True, key=lambda keep: bool(excess(keep)))
    if fitting == 0:
        (name, *_), costs = excess(keeps[0]), cost(channels.prefix(keeps[0]))
        raise DataError(
            f"budget-m{'params' if name == 'parameters' else name} = {limits[name]:g}: not "
            f"even the narrowest network fits, which takes {costs[name] / 1e6:g} million {name}; "
            "raise the budget or choose a smaller model.name"
        )
    return min(budget.keep, keeps[fitting - 1])


def distinct_keeps(channels: ChannelMap) -> list[float]:
    """Return one fraction of width for each network that ``channels.prefix`` can give, ascending.

    Each lies in the middle of those that round to the same widths where there is a middle; a
    network that rounding half to even gives at a single fraction is there too. The last is 1.
    """
    ends = {Fraction(2 * k + 1, 2 * n) for n in {*channels.groups.values()} for k in range(1, n)}
    between = pairwise([Fraction(0), *sorted(ends)])
    middles = [float((low + high) / 2) for low, high in between]
    found = {_widths(channels, keep): keep for keep in [*map(float, ends), *middles, 1.0]}
    return sorted(found.values())


def _widths(channels: ChannelMap, keep: float) -> tuple[int, ...]:
    return tuple(len(index) for index in channels.prefix(keep).values())
