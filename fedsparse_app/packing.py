"""Records of many arrays, sent as one.

Flower moves every array as an object of its own, which apps, SuperLink and SuperNodes hand on in a
request of its own: some hundreds for each client and round. Packed, a record is one object whatever
it holds; equal records are still equal, so that the SuperLink keeps one copy.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import array_record_from_proto, array_record_to_proto
from flwr.proto.recorddict_pb2 import ArrayRecord as Proto
from flwr.serverapp import Grid

__all__ = ["PackingGrid", "pack", "packing_mod", "unpack"]

KEY = "packed"
TYPE = "flwr.proto.ArrayRecord"  # of the one array; its bytes are Flower's own, never a pickle


def pack(content: RecordDict, done: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """Return ``content`` with every record of several arrays as one; ``done`` spares repetition."""
    done = {} if done is None else done
    packed = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and len(record) > 1:
            if id(record) not in done:
                data = array_record_to_proto(record).SerializeToString(deterministic=True)
                done[id(record)] = ArrayRecord({KEY: Array(TYPE, (len(data),), TYPE, data)})
            record = done[id(record)]
        packed[name] = record
    return packed


def unpack(content: RecordDict) -> RecordDict:
    """Return what ``pack`` was given; what is damaged stays as it is, to be refused when read."""
    unpacked = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and list(record) == [KEY] and record[KEY].stype == TYPE:
            with suppress(Exception):  # the bytes are another machine's
                record = array_record_from_proto(Proto.FromString(record[KEY].data))
        unpacked[name] = record
    return unpacked


class PackingGrid:
    """A grid whose messages travel packed; for the rest the grid that it is given."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages, whose contents are packed from now on."""
        return self._grid.push_messages(_packed(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        return _unpacked(self._grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send the messages and wait for the replies."""
        return _unpacked(self._grid.send_and_receive(_packed(messages), timeout=timeout))


def packing_mod(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Hand the message to the client unpacked and send its reply packed."""
    message.content = unpack(message.content)
    reply = app(message, context)
    if reply.has_content():
        reply.content = pack(reply.content)
    return reply


def _packed(messages: Iterable[Message]) -> list[Message]:
    messages, done = list(messages), dict[int, ArrayRecord]()
    kept = [message.content for message in messages]  # an id is one record's while that lives
    for message, content in zip(messages, kept, strict=True):
        message.content = pack(content, done)
    return messages


def _unpacked(replies: Iterable[Message]) -> list[Message]:
    replies = list(replies)
    for reply in replies:
        if reply.has_content():
            reply.content = unpack(reply.content)
    return replies
