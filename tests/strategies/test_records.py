import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.errors import ShapeError
from strategies.records import (
    Hello,
    Job,
    Update,
    decode_hellos,
    decode_job,
    decode_scores,
    decode_update,
    encode_hellos,
    encode_job,
    encode_scores,
    encode_update,
    wire_bytes,
)
from task.channels import ChannelMap
from task.train import Scores

CHANNELS = ChannelMap(groups={"a": 5, "b": 7}, axes={}, gates=(), exact={}, pinned={})
KEPT = {"a": np.array([0, 3]), "b": np.array([1, 2, 6])}


def over_the_wire(content):
    return recorddict_from_proto(recorddict_to_proto(content))


def scores():
    return Scores(
        torch.tensor([[1, 2]]), torch.tensor([[3, 2]]), torch.tensor([0.5], dtype=torch.float64)
    )


def update():
    return Update(
        client="client-01",
        round=4,
        state={"w": torch.randn(2, 3), "n": torch.tensor(7), "h": torch.randn(3).half()},
        samples=11,
        steps=3,
        loss=0.25,
        extras={"fisher": torch.rand(12)},
        scores=scores(),
        costs={"flops": 1e9, "seconds": 0.5},
    )


def same(a, b):
    assert a.keys() == b.keys()
    assert all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_hellos_survive_the_wire():
    hellos = [Hello("client-00", {"mnist": 5, "syn": 7}), Hello("ø", {})]
    hellos.append(Hello("client-01", {"mnist": 5}, classes=[2, 0, 3], skipped=1))
    assert decode_hellos(over_the_wire(encode_hellos(hellos)), 3) == hellos


@pytest.mark.parametrize(
    "said", [{"classes": [2, -1]}, {"classes": "23"}, {"classes": [True]}, {"skipped": 0.5}]
)
def test_a_hello_whose_counts_are_none_is_refused(said):
    with pytest.raises(ShapeError, match="client-01 are no counts"):
        decode_hellos(encode_hellos([Hello("client-01", {"mnist": 5}, **said)]), 1)


@given(st.lists(st.booleans(), min_size=12, max_size=12), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=30)
def test_a_job_survives_the_wire_with_its_channels(mask, more):
    mask[0] = mask[5] = True  # a group never loses all its channels
    kept = CHANNELS.kept(np.array(mask))
    sent = CHANNELS.full() if more else kept
    job = Job(
        "client-02", 3, kept, {"w": torch.randn(2, 2)}, sent, {"p": torch.rand(2).half()}, False
    )
    back = decode_job(over_the_wire(encode_job(job, CHANNELS, {})), CHANNELS)
    assert (back.client, back.round, back.evaluate) == ("client-02", 3, False)
    assert np.array_equal(CHANNELS.mask(back.kept), np.array(mask))
    assert np.array_equal(CHANNELS.mask(back.sent), CHANNELS.mask(sent))
    assert (back.sent is back.kept) == (not more)
    same(back.state, job.state)
    same(back.extras, job.extras)


def test_jobs_with_the_same_state_share_its_record():
    state, cache = {"w": torch.randn(4)}, {}
    jobs = [Job(name, 1, KEPT, state, KEPT) for name in ("x", "y")]
    first, second = (encode_job(job, CHANNELS, cache)["state"] for job in jobs)
    assert first is second


def test_an_update_survives_the_wire():
    sent = update()
    back = decode_update(over_the_wire(encode_update(sent)))
    same(back.state, sent.state)
    same(back.extras, sent.extras)
    assert (back.client, back.round, back.samples, back.steps, back.loss) == (
        "client-01",
        4,
        11,
        3,
        0.25,
    )
    assert back.costs == sent.costs
    assert torch.equal(back.scores.total, sent.scores.total)


def test_received_tensors_can_be_written_to():
    back = decode_update(over_the_wire(encode_update(update())))
    back.state["w"].add_(1)
    assert torch.isfinite(back.state["w"]).all()


def test_wire_bytes_are_those_of_the_serialised_message():
    content = encode_update(update())
    assert wire_bytes(content) == len(recorddict_to_proto(content).SerializeToString())


def test_wire_bytes_grow_by_exactly_the_bytes_of_the_tensor():
    small = Job("x", 1, KEPT, {"w": torch.zeros(100)}, KEPT)
    large = Job("x", 1, KEPT, {"w": torch.zeros(1000)}, KEPT)
    grown = wire_bytes(encode_job(large, CHANNELS, {})) - wire_bytes(
        encode_job(small, CHANNELS, {})
    )
    assert 3600 <= grown <= 3610


@pytest.mark.parametrize("record", ["numbers", "update", "state", "extras"])
def test_an_update_without_one_of_its_records_is_refused(record):
    content = encode_update(update())
    del content[record]
    with pytest.raises(ShapeError, match=record):
        decode_update(content)


@pytest.mark.parametrize(
    "clients",
    [
        ["not json"],
        [json.dumps({"client": "x"})],
        [json.dumps([1])],
        ["3"],
        [json.dumps({"client": ["x"], "domains": {}})],
        [json.dumps({"client": "x", "domains": 3})],
        [json.dumps({"client": "x", "domains": {"a": "many"}})],
        [json.dumps({"client": "x", "domains": {"a": 0}})],
    ],
)
def test_a_hello_that_is_none_is_refused(clients):
    content = RecordDict({"hello": ConfigRecord({"clients": clients})})
    with pytest.raises(ShapeError, match="hello"):
        decode_hellos(content, 2)
    with pytest.raises(ShapeError, match="hello"):
        decode_hellos(RecordDict({"numbers": MetricRecord({"a": 1})}), 2)


@pytest.mark.parametrize(
    ("correct", "total", "loss"),
    [
        (torch.tensor([[4]]), torch.tensor([[3]]), torch.zeros(1)),
        (torch.tensor([[-1]]), torch.tensor([[3]]), torch.zeros(1)),
        (torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.zeros(1)),
        (torch.tensor([1]), torch.tensor([3]), torch.zeros(1)),
        (torch.tensor([[1, 1]]), torch.tensor([[3]]), torch.zeros(1)),
        (torch.tensor([[1]]), torch.tensor([[3]]), torch.zeros(2)),
        (torch.tensor([[1]]), torch.tensor([[3]]), torch.tensor([float("nan")])),
        (torch.tensor([[0]]), torch.tensor([[0]]), torch.zeros(1)),
    ],
)
def test_scores_that_cannot_be_counts_are_refused(correct, total, loss):
    with pytest.raises(ShapeError, match="scores"):
        decode_scores(encode_scores(Scores(correct, total, loss)))


def test_scores_without_arrays_are_refused():
    with pytest.raises(ShapeError, match="scores"):
        decode_scores(RecordDict({"scores": ArrayRecord()}))
