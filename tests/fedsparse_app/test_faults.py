"""Faults in whole runs: the reason is in the files, and a client that moves is itself again."""

import json

import pytest
from flwr.app import Context, Message, RecordDict

from fedsparse_app import inprocess
from fedsparse_app.client_app import app as client_app
from strategies import STRATEGIES
from tests.fedsparse_app.faulty import faulty

pytestmark = pytest.mark.app

OPTIONS = {
    "federation.clients": 3,
    "federation.evaluate-on": "clients",
    "train.epochs": 1,
    "train.batch-size": 256,
    "fedfip.keep": 0.5,
    "fedfip.phi": 0.0,
    "fedfip.react-max": 0.25,
    "fedfip.fisher-samples": 8,
    "fedfip.dsr": False,
}


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def raising(message, context):
    raise MemoryError("out of memory on the device")


@pytest.mark.parametrize("method", STRATEGIES)
def test_the_reason_is_in_metrics_and_the_run_goes_on(method, tmp_path):
    options = {"strategy.name": method, "run.rounds": 1, "run.output-dir": str(tmp_path)}
    folder = inprocess.run(OPTIONS | options, client_app=faulty(raising, "client-01"))
    row = rows(folder)[1]
    reason = "error 2: MemoryError: out of memory on the device"
    assert row["failures"] == [{"client": "client-01", "reason": reason}]
    assert (row["replies"], row["merged"]) == (2, True)
    failed = {c["client"]: c["failure"] for c in rows(folder, "clients.jsonl")}
    assert failed == {"client-00": None, "client-01": reason, "client-02": None}


def test_a_run_without_enough_replies_fails_with_the_reason(tmp_path):
    options = {"federation.patience": 1, "run.rounds": 1, "run.output-dir": str(tmp_path)}
    with pytest.raises(RuntimeError, match=r"min-replies = 2.*client-00: error 2: MemoryError"):
        inprocess.run(OPTIONS | options, client_app=faulty(raising, "client-00", "client-01"))


def test_nodes_that_restart_under_new_ids_change_nothing(tmp_path, monkeypatch):
    def run(folder):
        options = {"strategy.name": "fedfip", "run.rounds": 2, "run.output-dir": str(folder)}
        return inprocess.run(OPTIONS | options)

    stayed = run(tmp_path / "stayed")
    push = inprocess.InProcessGrid.push_messages

    def restarted(grid, messages):
        ids = push(grid, messages)
        if messages[0].metadata.message_type == "evaluate":
            grid.contexts = {node + 1: context for node, context in grid.contexts.items()}
        return ids

    monkeypatch.setattr(inprocess.InProcessGrid, "push_messages", restarted)
    moved = run(tmp_path / "moved")
    assert (moved / "metrics.jsonl").read_bytes() == (stayed / "metrics.jsonl").read_bytes()
    private = rows(moved)[2]["strategy"]["private"]
    assert all(number > 0 for number in private.values())


def test_the_client_app_answers_a_malformed_job_with_an_error():
    node = {"partition-id": 0, "num-partitions": 3}
    context = Context(1, 1007, node, RecordDict(), dict(OPTIONS))
    message = Message(RecordDict(), 1007, "train")
    message.metadata.__dict__["_message_id"] = "message-1"
    reply = client_app(message, context)
    assert reply.error.code == 2
    assert reply.error.reason == "ShapeError: job: missing or not readable: 'job'"
