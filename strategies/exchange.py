"""Who is there, and what was sent to whom: Flower nodes on one side, clients by name on the other.

Node ids are random and change when a SuperNode restarts, one node can serve several clients, and
replies come in any order; above this file there are clients and jobs only.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING
from typing import Annotated, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from strategies.errors import ShapeError
from strategies.records import Hello, Job, decode_hellos, encode_job, wire_bytes
from strategies.rounds import Round
from task.channels import ChannelMap
from task.options import Interval, check_options
from task.seeding import generator

__all__ = ["Exchange", "FederationOptions"]

TRIES = 3
"""Hellos to a node that does not answer them: it must not hold up every round."""


@dataclass(frozen=True)
class FederationOptions:
    """Who takes part and who evaluates.

    Parameters
    ----------
    clients : int
        Clients to wait for before round 1.
    fraction : float
        Share of the clients sampled in each round.
    min_replies : int
        Fewer usable replies leave the global model as it was.
    patience : int
        Rounds in a row without ``min_replies`` after which the run fails.
    timeout, wait : float
        Seconds for the replies of a round; seconds for the clients to appear.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    evaluate_on : str
        Who scores the global network: ``server`` (test sets) or ``clients`` (their own shares).
    merge, trim : str, float
        How an entry is merged: weighted ``mean``, ``median``, or ``trimmed``, the mean without the
        fraction ``trim`` on each side.
    """

    clients: Annotated[int, Interval(1)] = 20
    fraction: Annotated[float, Interval(0, 1, open_low=True)] = 1.0
    min_replies: Annotated[int, Interval(1)] = 2
    patience: Annotated[int, Interval(1)] = 3
    timeout: Annotated[float, Interval(1)] = 600.0
    wait: Annotated[float, Interval(1)] = 120.0
    evaluate_every: Annotated[int, Interval(1)] = 1
    evaluate_on: Literal["server", "clients"] = "server"
    merge: Literal["mean", "median", "trimmed"] = "mean"
    trim: Annotated[float, Interval(0, 0.5, open_low=True, open_high=True)] = 0.2

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_replies > self.sampled(self.clients):
            raise ValueError(
                f"min-replies = {self.min_replies}: must be at most {self.sampled(self.clients)}, "
                f"the clients sampled in a round (fraction {self.fraction:g} of {self.clients})"
            )
        sampled = self.sampled(self.clients)
        if self.merge == "trimmed" and int(self.trim * sampled) == 0:
            raise ValueError(
                f"trim = {self.trim:g}: drops nobody of the {sampled} clients in a round; must be "
                f"at least 1/{sampled} and below 0.5, or take merge = 'median'"
            )

    def sampled(self, clients: int) -> int:
        """Return how many of ``clients`` a round samples: ``fraction`` of them, at least one."""
        return max(1, int(self.fraction * clients + 0.5))


class Exchange:
    """The clients met so far and the messages of the exchange under way."""

    def __init__(self, federation: FederationOptions, channels: ChannelMap, seed: int) -> None:
        self.federation, self.channels, self.seed = federation, channels, seed
        self.clients: dict[str, Hello] = {}
        self._node: dict[str, int] = {}
        self._met: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._sent: list[tuple[Message, Job]] = []

    def await_clients(self, grid: Grid) -> None:
        """Say hello until ``clients`` are there.

        Raises
        ------
        RuntimeError
            They are not there after ``wait`` seconds.
        """
        begin = time.monotonic()
        reasons: dict[int, str] = {}
        while True:
            reasons |= self.greet(grid)
            if len(self.clients) >= self.federation.clients:
                return
            waited = time.monotonic() - begin
            hopeless = reasons and not self.clients and min(self._tries.values()) >= TRIES
            if waited > self.federation.wait or hopeless:
                raise RuntimeError(
                    f"{len(self.clients)} of {self.federation.clients} clients after "
                    f"{waited:.0f} s: start more SuperNodes or lower federation.clients"
                    + "".join(f"; {reason}" for reason in list(reasons.values())[:1])
                )
            time.sleep(0.1)

    def greet(self, grid: Grid) -> dict[int, str]:
        """Say hello to nodes not met before, a few times each; return what went wrong, by node."""
        alive = set(grid.get_node_ids())
        nodes = sorted(n for n in alive - self._met if self._tries[n] < TRIES)
        if not nodes:
            return {}
        self._tries.update(nodes)
        hello = RecordDict({"hello": ConfigRecord({})})
        messages = [Message(hello, node, MessageType.QUERY) for node in nodes]
        reasons = dict.fromkeys(nodes, "hello failed: no reply")
        for reply in grid.send_and_receive(messages, timeout=self.federation.wait):
            node = _asked(reply, messages)
            if reply.has_error():
                reasons[node] = f"hello failed: {_reason(reply)}"
                continue
            try:
                hellos = decode_hellos(reply.content)
            except ShapeError as error:
                reasons[node] = f"hello failed: {error}"
                continue
            self._met.add(node)
            del reasons[node]
            for client in hellos:
                other = self._node.get(client.client, node)
                if other != node and other in alive:
                    reasons[node] = f"{client.client} is on two nodes; give each its own client-id"
                self.clients[client.client] = client
                self._node[client.client] = node
        for reason in reasons.values():
            log(WARNING, "%s", reason)
        return reasons

    def sample(self, round: int, grid: Grid) -> list[str]:
        """Return the clients of ``round``, sorted: ``fraction`` of all, of those that are there."""
        alive = set(grid.get_node_ids())
        available = sorted(client for client, node in self._node.items() if node in alive)
        wanted = self.federation.sampled(len(self.clients))
        if wanted >= len(available):
            return available
        draw = generator(self.seed, "sample clients", round)
        order = torch.randperm(len(available), generator=draw)
        return [available[i] for i in sorted(order[:wanted].tolist())]

    def messages(self, jobs: dict[str, Job], kind: str, round: Round) -> list[Message]:
        """Write ``jobs`` as messages and count their bytes."""
        cache: dict[int, ArrayRecord] = {}
        self._sent = []
        for client, job in jobs.items():
            content = encode_job(job, self.channels, cache)
            round.bytes_down[client] = round.bytes_down.get(client, 0) + wire_bytes(content)
            message = Message(content, self._node[client], kind, group_id=str(job.round))
            self._sent.append((message, job))
        return [message for message, _ in self._sent]

    def answers(self, replies: Iterable[Message], round: Round) -> list[tuple[Job, RecordDict]]:
        """Match replies with jobs, count their bytes; errors and silence become failures.

        By message id: the sender of an error reply can be the SuperLink instead of the client.
        """
        asked = {message.metadata.message_id: job for message, job in self._sent}
        answers = []
        for reply in replies:
            job = asked.pop(reply.metadata.reply_to_message_id, None)
            if job is None:
                continue  # not an answer to this exchange, or the second one
            if reply.has_error():
                round.failures[job.client] = _reason(reply)
                continue
            up = round.bytes_up.get(job.client, 0)
            round.bytes_up[job.client] = up + wire_bytes(reply.content)
            answers.append((job, reply.content))
        for job in asked.values():
            round.failures[job.client] = f"no reply within {self.federation.timeout:g} s"
        return answers


def _asked(reply: Message, messages: list[Message]) -> int:
    """Return the node that ``reply`` is about: the sender of an error may be the SuperLink."""
    about = reply.metadata.reply_to_message_id
    for message in messages:
        if message.metadata.message_id == about:
            return message.metadata.dst_node_id
    return reply.metadata.src_node_id


def _reason(reply: Message) -> str:
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
    return f"error {reply.error.code}: {lines[-1] if lines else 'no reason given'}"
