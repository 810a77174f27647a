"""Packed records are the same records, in fewer objects."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from fedsparse_app.packing import KEY, TYPE, PackingGrid, pack, packing_mod, unpack


def record(scale: float = 1.0) -> ArrayRecord:
    arrays = [np.arange(6.0).reshape(2, 3) * scale, np.asarray(3), np.zeros((0, 4), np.float16)]
    return ArrayRecord({f"t{i}": Array(array) for i, array in enumerate(arrays)})


def content() -> RecordDict:
    return RecordDict(
        {
            "state": record(),
            "one": ArrayRecord({"mask": Array(np.ones(3, np.uint8))}),
            "none": ArrayRecord(),
            "numbers": MetricRecord({"loss": 0.5}),
            "job": ConfigRecord({"client": "c"}),
        }
    )


def test_what_was_packed_is_unpacked_as_it_was_and_in_order() -> None:
    again = unpack(pack(content()))
    assert again == content()
    assert list(again) == list(content())
    assert unpack(again) == content()  # what is not packed stays


def test_a_record_of_many_arrays_is_one_array_on_the_wire() -> None:
    packed = pack(content())
    assert list(packed.array_records["state"]) == [KEY]
    assert packed["one"] == content()["one"]
    arrays = [o for o in get_all_nested_objects(packed).values() if isinstance(o, Array)]
    assert len(arrays) == 2


def test_equal_records_are_the_same_object_for_the_superlink() -> None:
    one, other, third = (pack(RecordDict({"state": record(s)})) for s in (1.0, 1.0, 2.0))
    assert one["state"].object_id == other["state"].object_id != third["state"].object_id


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x0a\x05abc"])
def test_damaged_bytes_stay_as_they_came(data: bytes) -> None:
    damaged = RecordDict({"state": ArrayRecord({KEY: Array(TYPE, (len(data),), TYPE, data)})})
    state = unpack(damaged).array_records["state"]
    assert not state or state == damaged["state"]


class Echo:
    """A grid on which each client answers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[RecordDict] = []

    def push_messages(self, messages):
        self.replies = {}
        for number, message in enumerate(messages):
            self.sent.append(message.content)
            message.metadata.__dict__["_message_id"] = str(number)
            reply = packing_mod(Message(message.content, 1, "train"), None, answer)
            self.replies[str(number)] = reply
        return list(self.replies)

    def pull_messages(self, message_ids):
        return [self.replies[i] for i in message_ids]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self):
        return [1]


def answer(message, context):
    assert message.content == content()  # the client sees no packing
    return Message(message.content, 1, "train")


def test_neither_server_nor_client_sees_the_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    inner = Echo()
    grid = PackingGrid(inner)
    shared = content()
    messages = [Message(shared, 1, "train"), Message(shared, 1, "train")]
    replies = grid.send_and_receive(messages, timeout=1.0)
    assert [reply.content for reply in replies] == [content(), content()]
    assert all(list(sent.array_records["state"]) == [KEY] for sent in inner.sent)
    assert inner.sent[0]["state"] is inner.sent[1]["state"]  # written once
    assert [m.metadata.message_id for m in messages] == ["0", "1"]
    assert next(iter(grid.pull_messages(["0"]))).content == content()
    assert grid.get_node_ids() == [1]
