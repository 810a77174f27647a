"""Random splits that keep the mixture of domains and classes."""

import zlib

import numpy as np

__all__ = ["generator", "shares", "stratified"]


def generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """Return the random generator of one purpose; purposes with the same seed are independent.

    Parameters
    ----------
    seed : int, >= 0
        Seed of the data, not of the model.
    purpose : str
        What is drawn, e.g. ``"local test"``.
    index : int, >= 0
        Which of several, e.g. the client.
    """
    # The length is there because numpy takes [1, 2] and [1, 2, 0] for the same seed.
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(index), *index])


def shares(total: int, weight: np.ndarray) -> np.ndarray:
    """Divide ``total`` in proportion to ``weight`` by largest remainders.

    ``floor(total * w / sum w)`` each, and one more for the largest remainders, first come first.

    Parameters
    ----------
    total : int, >= 0
        Samples to divide.
    weight : (n,) float or int, >= 0, not all zero
        Claims.

    Returns
    -------
    (n,) int64
        Samples each, summing to ``total``.

    Examples
    --------
    >>> shares(5, np.array([3, 1, 1])).tolist()
    [3, 1, 1]
    """
    exact = total * (weight / weight.sum())
    part: np.ndarray = np.floor(exact).astype(np.int64)
    order = np.argsort(part - exact, kind="stable")
    part[order[: total - part.sum()]] += 1
    return part


def stratified(
    domain: np.ndarray, y: np.ndarray, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Mark about ``fraction`` of every domain, with the classes in the domain's own proportions.

    A domain of n samples has ``t = clip(round(fraction * n), 1, n - 1)`` marked; a domain of one
    sample has none, because both sides need every domain. Class c, n_c of the n, has
    ``floor(t * n_c / n)`` or one more.

    Parameters
    ----------
    domain, y : (n,) int
        Domain and class of each sample.
    fraction : float in (0, 1)
        Share to mark.
    rng : Generator
        Chooses which samples.

    Returns
    -------
    (n,) bool
        True for the marked samples.
    """
    marked = np.zeros(len(y), dtype=bool)
    for value in np.unique(domain):
        rows = np.flatnonzero(domain == value)
        test = int(np.clip(np.floor(fraction * len(rows) + 0.5), 1, len(rows) - 1))
        classes, count = np.unique(y[rows], return_counts=True)
        for label, size in zip(classes, shares(test, count), strict=True):
            marked[rng.permutation(rows[y[rows] == label])[:size]] = True
    return marked
