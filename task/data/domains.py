"""Which client holds how much of which domain: the arithmetic of the multi-domain split.

1. Every client has the same number of places, one domain each; the places are spread over the
   domains as evenly as possible (:func:`places`, :func:`hold`).
2. Every client draws how much it wants of each of its domains from a Dirichlet distribution, and
   every domain is divided among its holders in proportion to that (:func:`divide`).
"""

import numpy as np

from task.data.split import shares

__all__ = ["deal", "divide", "hold", "most_clients", "places"]


def places(size: np.ndarray, clients: int, per_client: int) -> np.ndarray:
    """Return how many clients hold each domain.

    Parameters
    ----------
    size : (D,) int
        Samples of each domain.
    clients, per_client : int
        Number of clients, and of domains that each holds, at most D.

    Returns
    -------
    (D,) int64
        Summing to ``clients * per_client``, no two differing by more than 1; where they differ,
        the larger domains have more.
    """
    each, more = divmod(clients * per_client, len(size))
    number = np.full(len(size), each, dtype=np.int64)
    number[np.argsort(-size, kind="stable")[:more]] += 1
    return number


def most_clients(size: np.ndarray, per_client: int, least: int) -> int:
    """Return how many clients the domains serve, with ``least`` samples in every share.

    The domain of rank r in size is held by ``ceil((K * per_client - r) / D)`` of K clients, which
    may be ``floor(size / least)`` at most; solved for K.

    Parameters
    ----------
    size : (D,) int
        Samples of each domain.
    per_client, least : int
        Domains that each client holds, at most D, and samples that it needs of each.
    """
    limit = np.sort(size)[::-1] // least
    return int(((len(size) * limit + np.arange(len(size))) // per_client).min())


def hold(number: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Choose the domains of each client.

    Each client takes the domains with the most places left, which always works out, because no
    domain has more places than there are clients; among those the one that was least often
    together with what the client has already, so that all pairs occur; ties are broken by chance.

    Parameters
    ----------
    number : (D,) int
        Holders of each domain, from :func:`places`.
    clients, per_client : int
        As in :func:`places`.
    rng : Generator
        Breaks ties.

    Returns
    -------
    (clients, D) bool
        Row sums ``per_client``, column sums ``number``.
    """
    left = number.copy()
    held = np.zeros((clients, len(number)), dtype=bool)
    together = np.zeros((len(number), len(number)), dtype=np.int64)
    for row in held:
        for _ in range(per_client):
            met = together[row].sum(axis=0)
            order = np.lexsort((rng.random(len(left)), met, -left, row))
            row[order[0]] = True  # held domains sort last
            left[order[0]] -= 1
        together += np.outer(row, row)
    return held


def divide(
    size: np.ndarray, held: np.ndarray, alpha: float, least: int, rng: np.random.Generator
) -> np.ndarray:
    """Divide every domain among its holders, in shares that differ within each client.

    ``share[k, j] = least + (size[j] - least * holders[j]) * w[k, j] / sum_k w[k, j]`` with
    ``w[k, :] ~ Dirichlet(alpha)`` over the domains that client k holds.

    Parameters
    ----------
    size : (D,) int
        Samples of each domain.
    held : (K, D) bool
        From :func:`hold`.
    alpha : float > 0
        Concentration: small means that one domain dominates a client.
    least : int
        Samples of every share.

    Returns
    -------
    (K, D) int64
        Shares; the columns of domains that somebody holds sum to ``size``.
    """
    weight = np.zeros(held.shape)
    for client, row in enumerate(held):
        # A small alpha draws exact zeros; holders that all drew zero still need a proportion.
        weight[client, row] = rng.dirichlet(np.full(row.sum(), alpha)) + 1e-9
    share = np.where(held, least, 0)
    for domain in np.flatnonzero(held.any(axis=0)):
        rest = int(size[domain] - share[:, domain].sum())
        share[:, domain] += shares(rest, weight[:, domain])
    return share


def deal(domain: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client its share of the samples of each domain, chosen at random.

    Parameters
    ----------
    domain : (n,) int
        Domain of each sample, 0 to D-1.
    share : (K, D) int
        From :func:`divide`.

    Returns
    -------
    list of K (n_k,) int64
        Sorted sample indices, no sample twice.
    """
    parts: list[list[np.ndarray]] = [[] for _ in share]
    for value in range(share.shape[1]):
        rows = rng.permutation(np.flatnonzero(domain == value))
        ends = np.cumsum(share[:, value])
        for client, piece in enumerate(np.split(rows, ends)[:-1]):
            parts[client].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in parts]
