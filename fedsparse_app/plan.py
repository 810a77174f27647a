"""What a round will cost each client, known before any training, from shapes alone."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsparse_app.config import Config
from fedsparse_app.workload import Workload, make_strategy
from strategies.base import SubmodelStrategy
from strategies.fedavg import FedAvgOptions
from strategies.hello import Hello
from strategies.records import Job, Update, encode_job, encode_scores, encode_update, wire_bytes
from task.channels import Kept, count_kept
from task.cost import activation_bytes, parameters, state_bytes
from task.submodel import extract, slice_module
from task.train import Scores

__all__ = ["Forecast", "Planner", "document", "server", "totals"]

PERSONAL_COSTS = ("private", "seconds")
SUMMED = ("parameters", "round_flops", "bytes_down", "bytes_up")


@dataclass(frozen=True)
class Forecast:
    """One client in one round.

    Parameters
    ----------
    client : str
        Who.
    keep : float
        Fraction of the channels it trains.
    parameters, flops, train_flops : int
        Of that network; forward pass, and both passes, of one sample.
    round_flops : int or None
        Cross-entropy training of its samples for all local epochs; None = it keeps their number.
    bytes_down, bytes_up : int
        Serialised messages to and from it.
    seconds : float or None
        ``round_flops`` / measured speed; None = not measured.
    memory : int
        Bytes at the peak of training: the network's tensors, a gradient and, with momentum, a
        momentum per parameter, and for every sample of a batch the activations that the backward
        pass needs. Without temporary buffers, the data, a method's own terms, the dense copy in
        which FEDFIP's client keeps what it has seen, and the some 200 MB of torch itself.
    """

    client: str
    keep: float
    parameters: int
    flops: int
    train_flops: int
    round_flops: int | None
    bytes_down: int
    bytes_up: int
    seconds: float | None
    memory: int


def server(config: Config, work: Workload, hellos: Iterable[Hello] = ()) -> SubmodelStrategy:
    """Return the server half of the chosen method, with the initial network and these clients."""
    strategy = make_strategy(config, work)
    strategy.state, strategy.rounds = work.model.state_dict(), config.run.rounds
    strategy.exchange.recall(hellos)
    return strategy


class Planner:
    """Forecasts for the clients that a strategy has met.

    Real messages with values of no meaning are written and measured, so that whatever a method
    sends is in the numbers. What depends on the data is not: private channels and the rounds that
    refresh the Fisher information of FEDFIP, and where ``scope = "global"`` puts its channels.

    Parameters
    ----------
    config : Config
        Options of the run.
    work : Workload
        The dense network.
    strategy : SubmodelStrategy
        Whose messages; its ``state`` and clients must be there.
    speed : float or None
        Training FLOPs per second of devices that did not measure their own.
    """

    def __init__(
        self, config: Config, work: Workload, strategy: SubmodelStrategy, speed: float | None = None
    ) -> None:
        self.config, self.work, self.strategy, self.speed = config, work, strategy, speed
        self._costs: dict[tuple[int, ...], dict[str, float]] = {}
        self._bytes: dict[Any, int] = {}

    def forecast(self, clients: Iterable[str], round: int) -> dict[str, Forecast]:
        """Return what ``round`` will be for ``clients``, as far as shapes tell."""
        twin = self.strategy.rehearsal(round)
        hellos = [self.strategy.exchange.clients[client] for client in sorted(clients)]
        evaluate = self.strategy.evaluates(round)
        judged = 0, 0
        if hellos and evaluate and self.config.federation.evaluate_on == "clients":
            judged = self._evaluation(hellos[0].client, twin.global_kept(), round)
        return {
            client: self._row(twin, replace(job, evaluate=evaluate), judged)
            for client, job in twin.jobs(hellos, round).items()
        }

    def dense(self, clients: Iterable[str]) -> dict[str, Forecast]:
        """Return what a round of FedAvg with the dense network would be for ``clients``."""
        method = replace(self.config, method=FedAvgOptions())
        method = replace(method, strategy=replace(method.strategy, name="fedavg"))
        hellos = [self.strategy.exchange.clients[client] for client in clients]
        everyone = [replace(hello, keep=None) for hello in hellos]
        plain = Planner(method, self.work, server(method, self.work, everyone), self.speed)
        return plain.forecast([hello.client for hello in everyone], self.config.run.rounds)

    def _row(self, twin: SubmodelStrategy, job: Job, judged: tuple[int, int]) -> Forecast:
        hello = self.strategy.exchange.clients[job.client]
        costs = self._network(job.kept)
        trained, hidden = hello.trained, self.config.privacy.on
        if trained is None and not hidden:
            trained = sum(hello.domains.values())
        one = int(costs["train-flops"]) * self.config.train.epochs
        flops = None if trained is None else one * trained
        speed = hello.speed or self.speed
        return Forecast(
            client=job.client,
            keep=count_kept(job.kept) / max(1, self.work.channels.size),
            parameters=int(costs["parameters"]),
            flops=int(costs["flops"]),
            train_flops=int(costs["train-flops"]),
            round_flops=flops,
            bytes_down=self._down(job) + judged[0],
            bytes_up=self._up(twin, job, hello) + judged[1],
            seconds=flops / speed if flops is not None and speed else None,
            memory=int(costs["memory"]),
        )

    def _network(self, kept: Kept) -> dict[str, float]:
        widths = tuple(map(len, kept.values()))
        if widths not in self._costs:
            network = slice_module(self.work.model, self.work.channels, kept)
            training = self.config.train
            copies = 2 if training.momentum else 1
            memory = state_bytes(network.state_dict()) + copies * 4 * parameters(network)
            memory += training.batch_size * activation_bytes(network, self.work.example)
            self._costs[widths] = self.work.costs(network) | {"memory": memory}
        return self._costs[widths]

    def _down(self, job: Job) -> int:
        key = "down", _shapes(job.state), _shapes(job.extras), job.sent is job.kept
        if key not in self._bytes:
            self._bytes[key] = wire_bytes(encode_job(job, self.work.channels, {}))
        return self._bytes[key]

    def _up(self, twin: SubmodelStrategy, job: Job, hello: Hello) -> int:
        sent = job.state if job.sent is job.kept else extract(twin.state, twin.channels, job.kept)
        state = {name: tensor for name, tensor in sent.items() if twin.uploads(name)}
        extras = twin.replied(job, hello)
        key = "up", _shapes(state), _shapes(extras), job.evaluate
        if key not in self._bytes:
            hidden = self.config.privacy.on  # scores and what of the costs depends on the data
            names = ("parameters", "flops", "train-flops", *(() if hidden else PERSONAL_COSTS))
            scores = self._scores() if job.evaluate and not hidden else None
            costs = dict.fromkeys(names, 0.0)
            update = Update(job.client, job.round, state, 1, 1, 0.0, extras, scores, costs)
            self._bytes[key] = wire_bytes(encode_update(update))
        return self._bytes[key]

    def _evaluation(self, client: str, kept: Kept, round: int) -> tuple[int, int]:
        """Return the bytes that scoring the global network on a client takes, down and up."""
        state = extract(self.strategy.state, self.work.channels, kept)
        job, scores = Job(client, round, kept, state, kept), encode_scores(self._scores())
        return self._down(job), wire_bytes(scores)

    def _scores(self) -> Scores:
        counts = torch.zeros(self.work.score_shape, dtype=torch.int64)
        return Scores(counts, counts, torch.zeros(len(counts), dtype=torch.float64))


def document(planner: Planner, refused: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the plan as JSON: rows of round 1 and of the last round, totals, ratios to dense."""
    clients = sorted(planner.strategy.exchange.clients)
    last = planner.config.run.rounds
    rows = planner.forecast(clients, last)
    total, dense = totals(rows.values()), totals(planner.dense(clients).values())
    return {
        "round": last,
        "clients": [asdict(row) for row in rows.values()],
        "round_1": [asdict(row) for row in planner.forecast(clients, 1).values()],
        "refused": dict(refused or {}),
        "total": total,
        "dense_fedavg": dense,
        "ratio": {name: total[name] / dense[name] if dense[name] else None for name in total},
    }


def totals(rows: Iterable[Forecast]) -> dict[str, int]:
    """Return sums over clients of what adds up."""
    listed = list(rows)
    return {name: sum(getattr(row, name) or 0 for row in listed) for name in SUMMED}


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
