"""Which client holds which training samples, by partitioners of flwr-datasets.

The split has a seed of its own, so that the seed of a model never moves the data. The indices
are cached: a worker need not import flwr-datasets, which takes seconds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from task.data import cache, domains, partitioners
from task.data.dataset import Samples
from task.data.split import generator, stratified
from task.errors import DataError, did_you_mean
from task.options import Interval, check_options

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

__all__ = ["PARTITIONS", "PartitionOptions", "counts", "local_split", "partition"]

logger = logging.getLogger(__name__)

PARTITIONS: dict[str, Callable[[PartitionOptions, int], Partitioner]] = {
    "multi-domain": partitioners.multi_domain,
    "one-domain": partitioners.one_domain,
    "dirichlet": partitioners.dirichlet,
    "pathological": partitioners.pathological,
    "iid": partitioners.iid,
}


@dataclass(frozen=True)
class PartitionOptions:
    """How training samples are divided over clients.

    Parameters
    ----------
    kind : str
        Key in ``PARTITIONS``.
    domains_per_client : int
        Of ``multi-domain``: domains that each client holds, at least 2.
    alpha : float > 0
        Dirichlet concentration of ``multi-domain`` (over a client's domains) and ``dirichlet``
        (of each class over the clients); small is uneven.
    classes_per_client : int
        Of ``pathological``: classes that each client holds.
    test_fraction : float in (0, 1)
        Of a client's samples, kept for its own test.
    validation_fraction : float in [0, 1)
        Of the other samples; where it is not 0 these are scored, and the test samples wait
        untouched until the options have been chosen.
    min_samples : int, >= 2
        Least samples of a client; of ``multi-domain`` and ``one-domain``: of each domain it holds.
    seed : int, >= 0
        Seed of the split.
    """

    kind: str = "multi-domain"
    domains_per_client: Annotated[int, Interval(1)] = 2
    alpha: Annotated[float, Interval(0, open_low=True, open_high=True)] = 0.5
    classes_per_client: Annotated[int, Interval(1)] = 2
    test_fraction: Annotated[float, Interval(0, 1, open_low=True, open_high=True)] = 0.2
    validation_fraction: Annotated[float, Interval(0, 1, open_high=True)] = 0.0
    min_samples: Annotated[int, Interval(2)] = 8
    seed: Annotated[int, Interval(0)] = 1

    def __post_init__(self) -> None:
        check_options(self)
        if self.kind not in PARTITIONS:
            hint = did_you_mean(self.kind, PARTITIONS)
            raise DataError(f"kind = {self.kind!r}: unknown{hint}; known: {', '.join(PARTITIONS)}")


def _accept(name: str, value: object, accepted: bool, what: str) -> None:
    if not accepted:
        raise DataError(f"partition.{name} = {value!r}: accepted is {what}")


def partition(samples: Samples, options: PartitionOptions, clients: int) -> list[np.ndarray]:
    """Divide training samples over clients.

    Parameters
    ----------
    samples : Samples
        The training samples of a data set.
    options : PartitionOptions
        How.
    clients : int
        Over how many.

    Returns
    -------
    list of ``clients`` (n_k,) int64
        Sorted indices into ``samples``, no sample twice. With too few clients to hold every
        domain (or class, for ``pathological``) the rest is left out.

    Raises
    ------
    DataError
        If the data cannot be divided like that: the message says what can be.
    """
    y, domain = samples.y.numpy(), samples.domain.numpy()
    _check(y, domain, options, clients)
    key = cache.key(
        f"partition-{options.kind}",
        *(repr(options), str(clients), y.tobytes(), domain.tobytes()),
        cache.versions("numpy", "flwr-datasets"),
        cache.source("partition", "partitioners", "multidomain", "domains", "split"),
    )
    stored = cache.cached(key, lambda: _build(y, domain, options, clients))
    return np.split(stored["rows"], np.cumsum(stored["sizes"])[:-1])


def _check(y: np.ndarray, domain: np.ndarray, options: PartitionOptions, clients: int) -> None:
    size = np.unique(domain, return_counts=True)[1]
    classes, least = len(np.unique(y)), options.min_samples
    per_client, most = options.domains_per_client, len(y) // least
    if options.kind == "multi-domain":
        what = f"2 to {len(size)}, the domains of the data"
        if len(size) < 2:
            raise DataError("partition 'multi-domain' needs 2 domains, the data has 1; take 'iid'")
        _accept("domains-per-client", per_client, 2 <= per_client <= len(size), what)
        most = domains.most_clients(size, per_client, least)
    elif options.kind == "one-domain":
        most = domains.most_clients(size, 1, least)
    elif options.kind == "pathological":
        what = f"1 to {classes}, the classes of the data"
        mine = options.classes_per_client
        _accept("classes-per-client", mine, 1 <= mine <= classes, what)
    if not 1 <= clients <= most:
        raise DataError(
            f"{clients} clients: with partition {options.kind!r} and min-samples = {least} these "
            f"{len(y)} samples serve 1 to {most}; take fewer clients or a smaller min-samples"
        )


def _build(
    y: np.ndarray, domain: np.ndarray, options: PartitionOptions, clients: int
) -> dict[str, np.ndarray]:
    from datasets import Dataset

    # The partitioners cut runs of neighbouring rows, and data sets are sorted by domain: unless
    # shuffled, a client of "iid" would hold one domain.
    order = generator(options.seed, "partition order").permutation(len(y))
    table = {"row": order, "label": y[order], "domain": domain[order]}
    partitioner = PARTITIONS[options.kind](options, clients)
    partitioner.dataset = Dataset.from_dict(table)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of draws that flwr-datasets repeats or leaves out
            parts = [_rows(partitioner.load_partition(client)) for client in range(clients)]
    except ValueError as error:
        raise DataError(
            f"partition {options.kind!r} of {len(y)} samples over {clients} clients failed with "
            f"alpha = {options.alpha}, min-samples = {options.min_samples} ({error}); take fewer "
            "clients, a smaller min-samples or, for 'dirichlet', a larger alpha"
        ) from error
    sizes = np.array([len(part) for part in parts])
    if sizes.min() < options.min_samples:
        raise DataError(
            f"partition {options.kind!r} leaves client {sizes.argmin()} of {clients} with "
            f"{sizes.min()} samples: min-samples = {options.min_samples}; take fewer clients, a "
            "smaller min-samples or another seed"
        )
    if sizes.sum() < len(y):
        left = len(y) - sizes.sum()
        logger.warning("%d of %d samples are held by none of %d clients", left, len(y), clients)
    return {"rows": np.concatenate(parts), "sizes": sizes}


def _rows(part: Any) -> np.ndarray:
    return np.sort(np.asarray(part.with_format("numpy")["row"][:], dtype=np.int64))


def local_split(
    samples: Samples, index: np.ndarray, options: PartitionOptions, client: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divide one client's samples into its own training and test samples.

    Every domain it holds has ``test_fraction`` tested, at least one sample and never all of
    them, with the classes in proportion (:func:`task.data.split.stratified`). A domain of which
    the client holds a single sample is trained on and not tested.

    Parameters
    ----------
    samples : Samples
        What :func:`partition` divided.
    index : (n_k,) int64
        The client's part.
    options : PartitionOptions
        ``test_fraction`` and ``seed``.
    client : int
        Which client, 0 and up.

    Returns
    -------
    train, test : sorted int64
        Indices into ``samples``, together ``index``; with a ``validation_fraction`` both are of
        the training samples.
    """
    rng = generator(options.seed, "local test", client)
    y, domain = samples.y.numpy()[index], samples.domain.numpy()[index]
    test = stratified(domain, y, options.test_fraction, rng)
    if not options.validation_fraction:
        return index[~test], index[test]
    index, y, domain = index[~test], y[~test], domain[~test]
    rng = generator(options.seed, "local validation", client)
    scored = stratified(domain, y, options.validation_fraction, rng)
    return index[~scored], index[scored]


def counts(
    samples: Samples, index: np.ndarray, domain_names: Sequence[str], class_names: Sequence[str]
) -> dict[str, Any]:
    """Count one client's samples, as JSON.

    Parameters
    ----------
    samples, index
        As in :func:`local_split`.
    domain_names, class_names : sequences of str
        Of the data set.

    Returns
    -------
    dict
        ``{"domains": {name: samples of each domain held}, "classes": [samples of each class]}``.
    """
    domain = np.bincount(samples.domain.numpy()[index], minlength=len(domain_names))
    label = np.bincount(samples.y.numpy()[index], minlength=len(class_names))
    held = {name: int(n) for name, n in zip(domain_names, domain, strict=True) if n}
    return {"domains": held, "classes": label.tolist()}
