"""The driver: one Flower ``Strategy`` that says hello, trains, merges and evaluates.

A method subclasses :class:`SubmodelStrategy` and writes ``jobs`` (which channels and arrays each
client gets) and ``merge`` (how the answers become the next global model). Messages of different
shapes, checking of replies and bookkeeping are here and in ``exchange``, once.
"""

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields, replace
from logging import INFO, WARNING
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from torch import Tensor

from strategies.exchange import Exchange, receive
from strategies.federation import FederationOptions
from strategies.memory import InMemory, Memory, Personal
from strategies.ops.average import coverage
from strategies.ops.robust import Merge
from strategies.privacy import OFF, Ledger, PrivacyOptions, fewest, positive_variances, variances
from strategies.records import Hello, Job, Update, decode_scores, decode_update
from strategies.rounds import Round, check_update, expected_shapes, most_bytes
from task.channels import ChannelMap, Kept, State
from task.submodel import extract
from task.train import Scores

__all__ = ["SubmodelStrategy"]


class SubmodelStrategy(Strategy):
    """Server half of every method; abstract in ``jobs`` and ``merge``.

    Parameters
    ----------
    channels : ChannelMap
        Of the dense global network.
    federation : FederationOptions
        Who takes part.
    options : dataclass
        The method's own options.
    seed : int
        Of client sampling and of whatever the method draws.
    score_shape : (int, int)
        Domains and classes of every score.
    privacy : PrivacyOptions
        What clients do to their updates before they send them.
    """

    def __init__(
        self,
        channels: ChannelMap,
        federation: FederationOptions,
        options: Any,
        *,
        seed: int,
        score_shape: tuple[int, int],
        privacy: PrivacyOptions = OFF,
    ) -> None:
        self.channels, self.federation, self.options = channels, federation, options
        self.seed, self.score_shape = seed, score_shape
        self.average = Merge(federation.merge, federation.trim)
        self.privacy, self.ledger = privacy, Ledger(privacy)
        self.state: State = {}
        self.exchange = Exchange(federation, channels, seed, self.admit)
        self.rounds, self.starved = 0, 0  # to run; in a row without enough replies
        self.done = -1  # the last round on record; 0 is the initial model, -1 nothing
        self.on_round: Callable[[Round], None] = lambda _: None
        memories: defaultdict[str, Memory] = defaultdict(InMemory)
        self.store: Callable[[str], Memory] = memories.__getitem__
        self._round = Round(0)

    # What a method writes --------------------------------------------------------------------

    @abstractmethod
    def jobs(self, clients: list[Hello], round: int) -> dict[str, Job]:
        """Return what each of ``clients`` (sorted by name) is asked to do in ``round``."""

    @abstractmethod
    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Put the updates (sorted by client) into ``self.state``; return what to record."""

    def admit(self, hello: Hello) -> None:
        """Raise ``ShapeError`` when the client cannot carry what the method would send it."""

    def global_kept(self) -> Kept:
        """Return the channels of the global network as it is evaluated and saved."""
        return self.channels.full()

    def uploaded(self, job: Job, update: Update) -> Kept:
        """Return the channels whose tensors ``update`` carries."""
        return job.kept

    def uploads(self, tensor: str) -> bool:
        """Whether updates carry ``tensor``; what they do not stays with the clients."""
        return True

    def validate(self, job: Job, update: Update) -> None:
        """Raise ``ShapeError`` when the method's own arrays in ``update`` do not fit."""

    def most_bytes(self, job: Job) -> int:
        """Return the most bytes that an answer to ``job`` can have; larger ones are not read."""
        return most_bytes(job, self.channels.size, self.score_shape)

    def rehearsal(self, round: int) -> Self:
        """Return a copy whose ``jobs`` have the shapes that they will have in ``round``."""
        twin = copy(self)
        twin.store = lambda _: InMemory()  # what is known of a client changes values alone
        return twin

    def replied(self, job: Job, hello: Hello) -> dict[str, Tensor]:
        """Return arrays shaped as the method's own in an ordinary reply to ``job``."""
        return {}

    def personal(self, client: str, round: int, own: Memory) -> Personal | None:
        """Return what ``client`` takes home after ``round``; None if arrays are missing.

        It is what it trained last and was scored with, where the method keeps that, else as much of
        the global network as it carries. ``own`` are the client's own arrays, which its device has.
        """
        most = self.channels.prefix(self.exchange.clients[client].keep or 1.0)
        kept = {g: index[: len(most[g])] for g, index in self.global_kept().items()}
        return Personal(round, kept, extract(self.state, self.channels, kept), shared=True)

    def memory(self) -> dict[str, Tensor]:
        """Return the method's server state beside the model, for the checkpoint.

        What is large and per client goes to ``store(client)`` instead, which keeps it per round.
        """
        return {}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """Take up what ``memory`` returned when the checkpoint was written."""

    def resume(
        self, done: int, memory: dict[str, Tensor], clients: list[Hello], starved: int
    ) -> None:
        """Let ``start`` go on after round ``done``; its initial arrays are then of that round."""
        self.done, self.starved = done, starved
        self.exchange.recall(clients)
        self.recall(memory)

    # Flower's hooks ------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to round ``num_rounds``; ``on_round`` sees the initial model and every round.

        Raises
        ------
        RuntimeError
            The clients do not appear in time, or ``patience`` rounds went without enough replies.
        """
        config, result, self.rounds = ConfigRecord(), Result(), num_rounds
        if train_config or evaluate_config:
            log(WARNING, "train_config and evaluate_config are not sent: options are run config")
        self.state = initial_arrays.to_torch_state_dict()
        if self.done < num_rounds:
            self.exchange.await_clients(grid)
        if self.done < 0:
            self.on_round(Round(0))
            if evaluate_fn and (scored := evaluate_fn(0, initial_arrays)) is not None:
                result.evaluate_metrics_serverapp[0] = scored
        for number in range(max(1, self.done + 1), num_rounds + 1):
            begin = time.monotonic()
            arrays = ArrayRecord(self.state)
            messages = list(self.configure_train(number, arrays, config, grid))
            replies = receive(grid, messages, timeout)
            _, metrics = self.aggregate_train(number, replies)
            self._round.train_seconds = time.monotonic() - begin
            messages = list(self.configure_evaluate(number, arrays, config, grid))
            if messages:
                replies = receive(grid, messages, timeout)
                if (total := self.aggregate_evaluate(number, replies)) is not None:
                    result.evaluate_metrics_clientapp[number] = total
            self._round.evaluate_seconds = time.monotonic() - begin - self._round.train_seconds
            self.on_round(self._round)
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            scored = evaluate_fn(number, ArrayRecord(self.state)) if evaluate_fn else None
            if scored is not None:
                result.evaluate_metrics_serverapp[number] = scored
        result.arrays = ArrayRecord(self.state)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and write each its own job."""
        self.exchange.greet(grid)
        self._round = Round(
            server_round, refused=self.exchange.roster.refused | self.exchange.refused
        )
        sampled = [self.exchange.clients[c] for c in self.exchange.sample(server_round, grid)]
        for client, job in self.jobs(sampled, server_round).items():
            self._round.jobs[client] = replace(job, evaluate=self.evaluates(server_round))
        self.ledger.ask(self._round.jobs)
        return self.exchange.messages(self._round.jobs, MessageType.TRAIN, self._round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply, merge the usable ones in the order of client ids."""
        round = self._round
        shapes: dict[int, tuple[Kept, dict[str, tuple[int, ...]]]] = {}
        for job, content in self.exchange.answers(replies, round, self.most_bytes):
            try:
                update = decode_update(content)
                kept = self.uploaded(job, update)
                if id(kept) not in shapes:
                    expected = expected_shapes(self.state, self.channels, kept)
                    sent = {name: shape for name, shape in expected.items() if self.uploads(name)}
                    shapes[id(kept)] = kept, sent
                hello = self.exchange.clients[job.client]
                check_update(job, update, shapes[id(kept)][1], self.score_shape, hello)
                self.validate(job, update)
                round.updates.append(update)
            except Exception as error:  # whatever a reply does to the checks, it alone pays
                round.fail(job.client, str(error) or type(error).__name__)
        round.updates.sort(key=lambda update: update.client)
        round.merged = len(round.updates) >= self.federation.min_replies
        self.starved = 0 if round.merged else self.starved + 1
        if self.starved >= self.federation.patience:
            raise RuntimeError(
                f"{self.starved} rounds in a row with fewer than "
                f"federation.min-replies = {self.federation.min_replies} usable replies; "
                + round.blame()
            )
        if not round.merged:
            return None, None
        before = variances(self.state) if self.privacy.on else {}
        round.diagnostics = self.merge(server_round, round.updates)
        metrics = MetricRecord({"replies": len(round.updates)})
        if self.privacy.on:
            positive_variances(self.state, before)
            self._account(round)
        else:
            metrics["loss"] = sum(u.loss * u.samples for u in round.updates) / sum(
                u.samples for u in round.updates
            )
        return ArrayRecord(self.state), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the global network to this round's clients, where they are to score it."""
        if self.federation.evaluate_on == "server" or not self.evaluates(server_round):
            return []
        kept = self.global_kept()
        state = extract(self.state, self.channels, kept)
        jobs = {c: Job(c, server_round, kept, state, kept) for c in self._round.jobs}
        return self.exchange.messages(jobs, MessageType.EVALUATE, self._round)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Add up the sums that the clients answered."""
        answers = self.exchange.answers(replies, self._round, self.most_bytes)
        total: Scores | None = None
        for job, content in sorted(answers, key=lambda pair: pair[0].client):
            try:
                scores = decode_scores(content, self.score_shape)
            except Exception as error:  # as above
                self._round.fail(job.client, str(error) or type(error).__name__)
                continue
            total = scores if total is None else total + scores
        self._round.scores = total
        return None if total is None else MetricRecord({"accuracy": total.accuracy()})

    def summary(self) -> None:
        """Log the method's options as a tree."""
        log(INFO, "%s", type(self).__name__)
        for field in fields(self.options):
            log(INFO, "├── %s: %s", field.name.replace("_", "-"), getattr(self.options, field.name))

    def _account(self, round: Round) -> None:
        """Enter a merge into the ledger: how many noises there are in every entry."""
        kept = [self.uploaded(round.jobs[u.client], u) for u in round.updates]
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        holders = fewest(round.updates, coverage(self.channels, shapes, kept))
        self.ledger.merge((u.client for u in round.updates), holders)

    def evaluates(self, round: int) -> bool:
        """Whether ``round`` is one that gets evaluated."""
        return round % self.federation.evaluate_every == 0 or round == self.rounds
