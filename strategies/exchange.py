"""Who is there, and what was sent to whom: Flower nodes on one side, clients by name on the other.

Node ids are random and change when a SuperNode restarts, one node can serve several clients, and
replies come in any order; above this file there are clients and jobs only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from logging import WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from strategies.errors import ShapeError
from strategies.federation import FederationOptions
from strategies.records import Hello, Job, decode_hellos, encode_job, held_bytes, wire_bytes
from strategies.roster import Roster
from strategies.rounds import Round, one_line
from task.channels import ChannelMap
from task.seeding import generator

__all__ = ["Exchange", "receive"]

TRIES = 3
"""Hellos to a node that does not answer them: it must not hold up every round."""
SUPERLINK = 1
"""Flower's node id of the SuperLink, which answers with an error for a node that is gone."""
UNREADABLE = 4
"""Flower's error code of a reply that cannot be had."""


class Exchange:
    """The clients met so far and the messages of the exchange under way."""

    def __init__(
        self,
        federation: FederationOptions,
        channels: ChannelMap,
        seed: int,
        admit: Callable[[Hello], None] = lambda _: None,
    ) -> None:
        self.federation, self.channels, self.seed, self.admit = federation, channels, seed, admit
        self.roster = Roster(federation.bind_keys)
        self.refused: dict[str, str] = {}  # client that cannot take part to the reason
        self._met: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._sent: list[tuple[Message, Job]] = []

    @property
    def clients(self) -> dict[str, Hello]:
        """Every client met."""
        return self.roster.clients

    def recall(self, clients: Iterable[Hello]) -> None:
        """Know the clients that a stopped run had met."""
        self.roster.clients = {client.client: client for client in clients}

    def await_clients(self, grid: Grid) -> None:
        """Say hello until ``clients`` are there, or all that a stopped run had met.

        A stopped run had begun: after ``wait`` seconds it goes on with those that are there.

        Raises
        ------
        RuntimeError
            Too few are there after ``wait`` seconds, or one of them cannot take part.
        """
        begin, known = time.monotonic(), set(self.clients)
        reasons: dict[int, str] = {}
        while True:
            reasons |= self.greet(grid)
            if self.refused:
                raise RuntimeError("; ".join(f"{c}: {why}" for c, why in self.refused.items()))
            present, absent = len(self.roster.node), sorted(known - self.roster.node.keys())
            if (not absent) if known else present >= self.federation.clients:
                return
            waited = time.monotonic() - begin
            tried = self._tries.values()
            hopeless = reasons and not present and tried and min(tried) >= TRIES
            if waited > self.federation.wait or hopeless:
                if known and present >= self.federation.min_replies:
                    log(WARNING, "going on without %s", ", ".join(absent))
                    return
                why = [*reasons.values(), *self.roster.refused.values()]
                raise RuntimeError(
                    f"{present} of {len(known) or self.federation.clients} clients after "
                    f"{waited:.0f} s: start more SuperNodes or lower federation.clients"
                    + "".join(f"; {reason}" for reason in why[:1])
                )
            time.sleep(0.1)

    def greet(self, grid: Grid) -> dict[int, str]:
        """Say hello to nodes not met before, a few times each; return what went wrong, by node."""
        # A grid without keys binds to the node id.
        alive = {n.node_id: n.public_key or str(n.node_id).encode() for n in grid.get_nodes()}
        self._met &= alive.keys()  # a node that comes back may have changed
        for gone in self._tries.keys() - alive.keys():
            del self._tries[gone]
        nodes = sorted(n for n in alive.keys() - self._met if self._tries[n] < TRIES)
        reasons = self._introductions(grid, nodes) if nodes else {}
        self.roster.settle(alive)
        for reason in [*reasons.values(), *(self.roster.refused.values() if nodes else ())]:
            log(WARNING, "%s", reason)
        return reasons

    def _introductions(self, grid: Grid, nodes: list[int]) -> dict[int, str]:
        self._tries.update(nodes)
        hello = RecordDict({"hello": ConfigRecord({})})
        messages = [Message(hello, node, MessageType.QUERY) for node in nodes]
        replies, _ = paired(messages, receive(grid, messages, self.federation.wait))
        reasons = {}
        for message in messages:  # in the order of nodes, so that it decides who was first
            node, reply = message.metadata.dst_node_id, replies.get(message.metadata.message_id)
            try:
                if reply is None or reply.has_error():
                    raise ShapeError("no reply" if reply is None else _reason(reply))
                hellos = decode_hellos(reply.content, self.federation.clients)
                self.roster.introduce(node, [hello for hello in hellos if self._admits(hello)])
                self._met.add(node)
            except ShapeError as error:
                reasons[node] = f"hello failed: {one_line(str(error))}"
        return reasons

    def _admits(self, client: Hello) -> bool:
        """Tell whether ``client`` can take part, by its own word and by the method's."""
        self.refused.pop(client.client, None)
        refusal = client.refusal
        try:
            self.admit(client)
        except ShapeError as error:
            refusal = str(error)
        if refusal:
            self.refused[client.client] = one_line(refusal)
            log(WARNING, "%s does not take part: %s", client.client, one_line(refusal))
        return not refusal

    def sample(self, round: int, grid: Grid) -> list[str]:
        """Return the clients of ``round``, sorted: ``fraction`` of all, of those that are there."""
        alive = set(grid.get_node_ids())
        available = sorted(client for client, node in self.roster.node.items() if node in alive)
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
            message = Message(content, self.roster.node[client], kind, group_id=str(job.round))
            self._sent.append((message, job))
        return [message for message, _ in self._sent]

    def answers(
        self, replies: Iterable[Message], round: Round, most: Callable[[Job], int]
    ) -> list[tuple[Job, RecordDict]]:
        """Match replies with jobs, count their bytes; errors and silence become failures.

        ``most`` says how many bytes the answer to a job can have; larger ones are not looked into.
        """
        matched, forged = paired([message for message, _ in self._sent], replies)
        answers = []
        for message, job in self._sent:
            about = message.metadata.message_id
            reply = matched.get(about)
            if reply is None:
                silence = f"no reply within {self.federation.timeout:g} s"
                round.fail(job.client, "answered by another node" if about in forged else silence)
            elif reply.has_error():
                round.fail(job.client, _reason(reply))
            elif (held := held_bytes(reply.content)) > most(job):
                round.fail(job.client, f"{held} bytes, at most {most(job)} can be an answer")
            else:
                try:
                    up = wire_bytes(reply.content)
                except Exception as error:  # what cannot be serialised never was on a wire
                    round.fail(job.client, f"not a message ({type(error).__name__}: {error})")
                    continue
                round.bytes_up[job.client] = round.bytes_up.get(job.client, 0) + up
                answers.append((job, reply.content))
        return answers


def receive(grid: Grid, messages: list[Message], timeout: float) -> list[Message]:
    """Send ``messages`` and wait for their replies, at most ``timeout`` seconds.

    One at a time, because Flower reads a reply when it is pulled: one that it cannot read would
    take with it all that are pulled together. It becomes an error reply of its sender.
    """
    sent = set(grid.push_messages(messages))
    waiting = {m.metadata.message_id: m for m in messages if m.metadata.message_id in sent}
    begin, replies = time.monotonic(), []
    while True:
        for about, message in list(waiting.items()):
            try:
                found = list(grid.pull_messages([about]))
            except Exception as error:
                list(grid.get_node_ids())  # raises itself when it is the SuperLink that is gone
                reason = f"Flower cannot read the reply ({type(error).__name__}: {error})"
                found = [Message(Error(UNREADABLE, reason), reply_to=message)]
            if found:
                replies += found
                del waiting[about]
        waited = time.monotonic() - begin
        if not waiting or waited >= timeout:
            return replies
        time.sleep(min(3.0, max(0.1, 0.03 * waited), timeout - waited))


def paired(
    messages: Iterable[Message], replies: Iterable[Message]
) -> tuple[dict[str, Message], set[str]]:
    """Match each message with its first reply, by message id; name those that others answered.

    Only the node that was asked can answer, and in its place the SuperLink with an error.
    """
    asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    matched: dict[str, Message] = {}
    forged: set[str] = set()
    for reply in replies:
        about, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        if about not in asked:
            continue
        if sender == asked[about] or (reply.has_error() and sender == SUPERLINK):
            matched.setdefault(about, reply)
        else:
            forged.add(about)
    return matched, forged


def _reason(reply: Message) -> str:
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
    return f"error {reply.error.code}: {lines[-1] if lines else 'no reason given'}"
