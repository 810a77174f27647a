"""FedAvg: every client trains the whole network, the server averages.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

1. The server sends w to the sampled clients S_t.
2. Client i runs E epochs of SGD on its own data: w_i.
3. The server sets w <- sum over S_t of n_i / n * w_i, n = sum over S_t of n_i.

Differences from the paper: none in the algorithm; BatchNorm statistics are averaged like weights.
``keep`` below 1 does the same with the leading channels of every group: the plain small network
that every client can carry, the reference for methods with submodels.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any

from strategies.base import SubmodelStrategy
from strategies.errors import ShapeError
from strategies.local import ClientHalf
from strategies.records import Hello, Job, Update
from task.channels import Kept
from task.options import Interval, check_options
from task.submodel import extract, scatter

__all__ = ["FedAvg", "FedAvgClient", "FedAvgOptions"]


@dataclass(frozen=True)
class FedAvgOptions:
    """Width of the one network, as a fraction of the dense one."""

    keep: Annotated[float, Interval(0, 1, open_low=True)] = 1.0

    unprotected = ""  # differential privacy covers its one message, the network

    def __post_init__(self) -> None:
        check_options(self)


class FedAvg(SubmodelStrategy):
    """Server half."""

    options: FedAvgOptions

    def admit(self, hello: Hello) -> None:
        """Refuse a device that cannot carry the one network."""
        keep = 1.0 if hello.keep is None else hello.keep
        carried = self.channels.prefix(keep)
        if any(len(carried[group]) < len(index) for group, index in self.global_kept().items()):
            raise ShapeError(
                f"the device carries keep = {keep:g}, fedavg trains one network of keep = "
                f"{self.options.keep:g} everywhere: set fedavg.keep={keep:g} or less, or "
                "strategy.name='subflot' or 'fedfip', which fit each client's network to its device"
            )

    def jobs(self, clients: list[Hello], round: int) -> dict[str, Job]:
        """Send the whole network."""
        kept = self.global_kept()
        state = extract(self.state, self.channels, kept)
        return {c.client: Job(c.client, round, kept, state, kept) for c in clients}

    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Average by samples, or as ``federation.merge`` says."""
        mean = self.average.networks([u.state for u in updates], [u.samples for u in updates])
        scatter(mean, self.channels, self.global_kept(), self.state)
        return {}

    def global_kept(self) -> Kept:
        """Return the leading channels."""
        return self.channels.prefix(self.options.keep)


class FedAvgClient(ClientHalf):
    """Client half."""

    def train(self, job: Job) -> Update:
        """Train the whole network."""
        begin = time.perf_counter()
        model = self.me.submodel(job.kept, job.state)
        return self.update(job, model, self.fit(model, job), begin)
