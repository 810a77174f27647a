"""FedAvg: every client trains the whole network, the server averages.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.

1. The server sends w to the sampled clients S_t.
2. Client i runs E epochs of SGD on its own data: w_i.
3. The server sets w <- sum over S_t of n_i / n * w_i, n = sum over S_t of n_i.

Differences from the paper: none in the algorithm; BatchNorm statistics are averaged like weights.
"""

import time
from dataclasses import dataclass
from typing import Any

from strategies.base import SubmodelStrategy
from strategies.local import ClientHalf
from strategies.ops.average import weighted_mean
from strategies.records import Hello, Job, Update

__all__ = ["FedAvg", "FedAvgClient", "FedAvgOptions"]


@dataclass(frozen=True)
class FedAvgOptions:
    """FedAvg has no options of its own."""


class FedAvg(SubmodelStrategy):
    """Server half."""

    def job(self, client: Hello, round: int) -> Job:
        """Send the whole network."""
        kept = self.global_kept()
        return Job(client.client, round, kept, self.state, kept, evaluate=self.evaluates(round))

    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Average by samples."""
        self.state = weighted_mean([u.state for u in updates], [u.samples for u in updates])
        return {}


class FedAvgClient(ClientHalf):
    """Client half."""

    def train(self, job: Job) -> Update:
        """Train the whole network."""
        begin = time.perf_counter()
        model = self.me.submodel(job.kept, job.state)
        return self.update(job, model, self.fit(model, job), begin)
