"""Solvers: from the cost of matching channels to a transport plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strategies.errors import ShapeError
from strategies.ops.plans import Floats, Plan

__all__ = ["balanced", "cover", "emd", "prices", "sinkhorn", "solve"]

# Annealing of the prices: temperatures relative to the mean gap, and rounds at each.
TEMPERATURES, ROUNDS = (0.2, 0.05, 0.012, 0.003), 6
TINY = 1e-20  # keeps single precision away from 0 and infinity


def balanced(cost: Floats) -> Plan:
    """Find the best plan that uses each channel of the narrow side almost equally often.

    Every channel of the wide side goes to one of the narrow side, which are used ``floor(k)`` or
    ``ceil(k)`` times each, ``k = wide / narrow``. Where k is whole this is optimal transport with
    uniform marginals, whose plan is then a hard map. Otherwise uniform marginals would split
    channels, and a mixture of different channels computes neither of them.

    It is a linear assignment with ``ceil(k)`` copies of every narrow channel, the last of which is
    optional where k is not whole. Subtracting prices from the columns changes no optimum; with
    prices near the optimal dual the assignment takes less time than a network simplex.

    Parameters
    ----------
    cost : (n, m) float64

    Returns
    -------
    Plan
        Whole masses. Deterministic; of equal channels the first ones are matched.
    """
    from scipy.optimize import linear_sum_assignment

    n, m = cost.shape
    if n < m:
        return balanced(np.ascontiguousarray(cost.T)).reverse()
    low, high = n // m, -(-n // m)
    price = prices(cost, low, high)
    # Rows that stand for no channel fill the last copies. Those may remain without a channel, so
    # none of them is worth paying for.
    square = np.empty((m * high, m * high))
    for copy in range(high):
        paid = price if copy < low else np.minimum(price, 0.0)
        columns = slice(copy * m, copy * m + m)
        np.subtract(cost, paid, out=square[:n, columns])
        square[n:, columns] = np.inf if copy < low else -paid
    _, column = linear_sum_assignment(square)
    return Plan(np.arange(n), column[:n] % m, np.ones(n), (n, m))


def prices(cost: Floats, low: int, high: int) -> Floats:
    """Guess what each column is worth in an optimal assignment, its dual, by entropic transport.

    ``exp((price - cost) / temperature)`` is scaled until rows sum to 1 and columns to something
    between ``low`` and ``high``, where a column strictly between has price 0, one that is sought
    too much a negative and one that is not wanted a positive price. Nothing depends on the guess
    being good except time; rounding lets equal columns keep equal prices.

    Parameters
    ----------
    cost : (n, m) float64
    low, high : int
        How often a column must and may be used.

    Returns
    -------
    (m,) float64 array
        To be subtracted from the columns.
    """
    gap = (cost - cost.min(1, keepdims=True)).astype(np.float32)
    price, mean = np.zeros(cost.shape[1], np.float32), float(gap.mean()) or 1.0
    kernel = np.empty_like(gap)
    for temperature in TEMPERATURES:
        scale = temperature * mean
        np.subtract(price, gap, out=kernel)
        kernel -= kernel.max(1, keepdims=True)
        kernel /= scale
        np.exp(kernel, out=kernel)
        factor, neutral = np.ones_like(price), np.exp(np.clip(-price / scale, -40.0, 40.0))
        for _ in range(ROUNDS):
            wanted = np.maximum((1 / np.maximum(kernel @ factor, TINY)) @ kernel, TINY)
            factor = np.minimum(np.maximum(neutral, low / wanted), high / wanted)
        price += scale * np.log(np.maximum(factor, TINY))
    step = 1e-3 * mean
    return np.round(price / step).astype(np.float64) * step


def emd(cost: Floats, supply: Floats | None = None) -> Plan:
    """Find the optimal transport plan: ``min <T, C>``, rows sum to the supply, columns to 1/m.

    Parameters
    ----------
    cost : (n, m) float64
    supply : (n,) float64, optional
        Mass of each source, > 0; the same for all if None, which is the paper.

    Returns
    -------
    Plan
        With splits unless one width divides the other and the supply is uniform.

    References
    ----------
    Flamary et al., POT: Python Optimal Transport, JMLR 2021; Bonneel et al., Displacement
    interpolation using Lagrangian mass transport, 2011 (the network simplex).
    """
    n, m = cost.shape
    if supply is None and max(n, m) % min(n, m) == 0:
        return balanced(cost)
    import ot

    # Whole numbers leave no rounding in the marginals, and masses that are exactly zero.
    a = np.full(n, float(m)) if supply is None else supply * (n * m / supply.sum())
    plan = ot.emd(a, np.full(m, float(n)), cost, numItermax=10**7, center_dual=False)
    return _positive(plan)


def cover(cost: Floats) -> Plan:
    """Find a hard map without equal shares: a best one-to-one core, the rest to its nearest.

    Every channel of the narrow side gets a partner of its own by linear assignment; the other
    channels of the wide side each go to the nearest. Exact for duplicates of any multiplicity,
    which uniform marginals cannot express.

    Parameters
    ----------
    cost : (n, m) float64

    Returns
    -------
    Plan
        Whole masses.
    """
    from scipy.optimize import linear_sum_assignment

    n, m = cost.shape
    if n < m:
        return cover(np.ascontiguousarray(cost.T)).reverse()
    target = cost.argmin(1)
    sources, targets = linear_sum_assignment(cost)
    target[sources] = targets
    return Plan(np.arange(n), target, np.ones(n), (n, m))


def sinkhorn(cost: Floats, supply: Floats | None = None, reg: float = 0.01) -> Plan:
    """Find the entropic plan: ``min <T, C> - reg * mean(C) * H(T)``, marginals as in `emd`.

    In the logarithmic domain, since the plain iteration underflows to an all-zero plan without a
    word. Every channel becomes a mixture of several: an ablation, not a recommendation.

    Parameters
    ----------
    cost : (n, m) float64
    supply : (n,) float64, optional
    reg : float > 0
        Regularisation relative to the mean cost.

    References
    ----------
    Cuturi, Sinkhorn distances, NeurIPS 2013; Schmitzer, Stabilized sparse scaling algorithms for
    entropy regularized transport problems, 2019.
    """
    import ot

    n, m = cost.shape
    a = np.full(n, 1 / n) if supply is None else supply / supply.sum()
    scale = reg * (float(cost.mean()) or 1.0)
    plan = ot.sinkhorn(
        a, np.full(m, 1 / m), cost, scale, "sinkhorn_log", numItermax=1000, stopThr=1e-6, warn=False
    )
    return _positive(plan)


def _positive(plan: Floats) -> Plan:
    source, target = np.nonzero(plan > 0)
    return Plan(source, target, plan[source, target], (plan.shape[0], plan.shape[1]))


def solve(cost: Floats, solver: str, supply: Floats | None = None, reg: float = 0.01) -> Plan:
    """Find a plan for a cost matrix (n, m) with the solver of that name.

    Raises
    ------
    ShapeError
        The solver is unknown, or makes hard maps and cannot respect a supply.
    """
    if supply is None and solver in HARD:
        return HARD[solver](cost)
    if solver == "emd":
        return emd(cost, supply)
    if solver == "sinkhorn":
        return sinkhorn(cost, supply, reg)
    why = "makes hard maps, which know no supply" if solver in HARD else "is unknown"
    raise ShapeError(
        f"solver {solver!r} {why}; choose emd or sinkhorn, or without supply also "
        f"{' or '.join(HARD)}"
    )


HARD: dict[str, Callable[[Floats], Plan]] = {"balanced": balanced, "cover": cover}
