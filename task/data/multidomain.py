"""The multi-domain split as a partitioner of flwr-datasets (importing this takes seconds)."""

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from task.data import domains
from task.data.split import generator

__all__ = ["MultiDomainPartitioner"]


class MultiDomainPartitioner(Partitioner):  # type: ignore[misc]  # flwr-datasets is untyped
    """Give every partition samples of exactly ``domains_per_partition`` domains, unequal shares.

    Every domain is held by about the same number of partitions, every sample of a domain that is
    held is used once. With one domain per partition this is the usual feature-shift split.

    Parameters
    ----------
    num_partitions : int
        Partitions.
    partition_by : str
        Column of the domain.
    domains_per_partition : int
        Domains in each partition, at most as many as there are.
    alpha : float > 0
        Dirichlet concentration of a partition's wishes; small means that one domain dominates.
    min_share : int
        Least number of samples of each domain in a partition.
    seed : int, >= 0
        Decides everything.

    Examples
    --------
    >>> from datasets import Dataset
    >>> partitioner = MultiDomainPartitioner(2, "domain", domains_per_partition=2, min_share=1)
    >>> partitioner.dataset = Dataset.from_dict({"domain": ["a"] * 5 + ["b"] * 5})
    >>> sorted(set(partitioner.load_partition(0)["domain"]))
    ['a', 'b']
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str,
        *,
        domains_per_partition: int = 2,
        alpha: float = 0.5,
        min_share: int = 8,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._domains_per_partition = domains_per_partition
        self._alpha = alpha
        self._min_share = min_share
        self._seed = seed
        self._parts: list[np.ndarray] | None = None

    @property
    def num_partitions(self) -> int:
        """Number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return one partition."""
        if self._parts is None:
            self._parts = self._deal()
        return self.dataset.select(self._parts[partition_id])

    def _deal(self) -> list[np.ndarray]:
        """Split the dataset.

        Raises
        ------
        ValueError
            If the domains are too few, or too small for that many partitions.
        """
        names, domain = np.unique(np.asarray(self.dataset[self._partition_by]), return_inverse=True)
        size, per_client = np.bincount(domain), self._domains_per_partition
        if not 1 <= per_client <= len(names):
            raise ValueError(f"domains_per_partition = {per_client}: accepted 1 to {len(names)}")
        most = domains.most_clients(size, per_client, self._min_share)
        if self._num_partitions > most:
            raise ValueError(f"num_partitions = {self._num_partitions}: accepted at most {most}")
        number = domains.places(size, self._num_partitions, per_client)
        rng = generator(self._seed, "multi-domain partition")
        held = domains.hold(number, self._num_partitions, per_client, rng)
        share = domains.divide(size, held, self._alpha, self._min_share, rng)
        return domains.deal(domain, share, rng)
