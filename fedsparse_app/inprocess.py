"""The same ServerApp and ClientApp in one process, without SuperLink and Ray.

For tests, debugging and sweeps: the start costs nothing and a debugger sees both sides. Messages
are serialised as on the wire, so nothing is shared by accident and the numbers are those of
`flwr run`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsparse_app.client_app import CLIENT_RAISED
from fedsparse_app.client_app import app as default_client_app
from fedsparse_app.config import read
from fedsparse_app.overrides import Scalar
from fedsparse_app.server_app import app as default_server_app

__all__ = ["InProcessGrid", "run"]

NODE_UNAVAILABLE = 5
"""Flower's error code for a node that is gone."""


class InProcessGrid(Grid):
    """A Grid whose nodes are function calls, one after the other.

    Parameters
    ----------
    client_app : ClientApp
        What every node runs.
    nodes : int
        Number of nodes; node p has ``partition-id`` p.
    run_config : mapping
        Flat run config of every node.
    run_id : int
        Of the one run.
    node_configs : sequence of mapping
        What the nodes' configs hold beside ``partition-id`` and ``num-partitions``; those of
        nodes beyond its end nothing.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int,
        run_config: Mapping[str, Scalar],
        run_id: int,
        node_configs: Sequence[Mapping[str, Scalar]] = (),
    ) -> None:
        self.client_app, self._run = client_app, Run.create_empty(run_id)
        self.contexts = {
            # Ids unlike the partition ids, so that nothing can mistake one for the other.
            1000 + 7 * p: Context(
                run_id=run_id,
                node_id=1000 + 7 * p,
                node_config={"partition-id": p, "num-partitions": nodes, **own},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for p, own in zip(range(nodes), chain(node_configs, repeat({})), strict=False)
        }
        self._replies: dict[str, MessageProto] = {}
        self._count = 0

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes handle the messages now; return the message ids."""
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"message-{self._count}"
            ids.append(message.metadata.message_id)
            reply = self._handle(message)
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to ``message_ids`` that there are."""
        return [message_from_proto(self._replies.pop(i)) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, then pull."""
        return self.pull_messages(self.push_messages(messages))

    def _handle(self, message: Message) -> MessageProto | None:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            gone = Error(NODE_UNAVAILABLE, "Node Unavailable: it is gone")
            return message_to_proto(Message(gone, reply_to=message))
        try:
            reply = self.client_app(message_from_proto(message_to_proto(message)), context)
            return None if reply is None else message_to_proto(reply)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return message_to_proto(Message(Error(CLIENT_RAISED, reason), reply_to=message))


def run(
    overrides: Mapping[str, Any],
    *,
    server_app: ServerApp | None = None,
    client_app: ClientApp | None = None,
    node_configs: Sequence[Mapping[str, Scalar]] = (),
) -> Path:
    """Run with ``overrides`` of the default options in this process; return the run folder.

    ``server_app`` and ``client_app`` replace the project's own, for tests; ``node_configs`` are
    those of `InProcessGrid`.

    Raises
    ------
    ConfigError
        An option cannot be used.
    RuntimeError
        The run failed; the message says why.
    """
    config, run_id = read(overrides), time.time_ns() // 1_000_000
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, 1, 1
    grid = InProcessGrid(
        client_app or default_client_app,
        config.federation.clients,
        overrides,
        run_id,
        node_configs,
    )
    context = Context(run_id, 1, {}, RecordDict(), dict(overrides))
    (server_app or default_server_app)(grid, context)
    return config.run_folder(run_id)
