"""The ways to divide samples over clients: each makes a partitioner of flwr-datasets.

All work on a table with the columns ``label`` and ``domain``. flwr-datasets takes seconds to
import, so that happens inside.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

    from task.data.partition import PartitionOptions

__all__ = ["dirichlet", "iid", "multi_domain", "one_domain", "pathological"]


def iid(options: PartitionOptions, clients: int) -> Partitioner:
    """Give every client the same mixture of domains and classes, up to chance."""
    from flwr_datasets.partitioner import IidPartitioner

    return IidPartitioner(clients)


def dirichlet(options: PartitionOptions, clients: int) -> Partitioner:
    """Divide each class over the clients by a draw from Dirichlet(alpha)."""
    from flwr_datasets.partitioner import DirichletPartitioner

    return DirichletPartitioner(
        clients,
        "label",
        alpha=float(options.alpha),
        min_partition_size=options.min_samples,
        seed=options.seed,
    )


def pathological(options: PartitionOptions, clients: int) -> Partitioner:
    """Give every client exactly ``classes_per_client`` classes.

    With fewer clients than classes, samples of a class that nobody holds are left out.
    """
    from flwr_datasets.partitioner import PathologicalPartitioner

    return PathologicalPartitioner(
        clients,
        "label",
        options.classes_per_client,
        class_assignment_mode="first-deterministic",
        seed=options.seed,
    )


def multi_domain(options: PartitionOptions, clients: int) -> Partitioner:
    """Give every client exactly ``domains_per_client`` domains, in unequal shares."""
    from task.data.multidomain import MultiDomainPartitioner

    return MultiDomainPartitioner(
        clients,
        "domain",
        domains_per_partition=options.domains_per_client,
        alpha=options.alpha,
        min_share=options.min_samples,
        seed=options.seed,
    )


def one_domain(options: PartitionOptions, clients: int) -> Partitioner:
    """Give every client one domain; the clients are dealt over the domains evenly."""
    return multi_domain(dataclasses.replace(options, domains_per_client=1), clients)
