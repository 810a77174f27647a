"""Exported networks: the very ones that were scored, and files that stand alone."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from fedsparse_app import export as exporting
from fedsparse_app import inprocess, workload
from fedsparse_app.cli import app
from fedsparse_app.config import read
from strategies import STRATEGIES
from strategies.local import ClientHalf
from task import exported
from task.train import evaluate
from tests.fedsparse_app.small import SMALL, small_tables

pytestmark = pytest.mark.app


@pytest.fixture(scope="module", autouse=True)
def tables():
    with small_tables() as patch:
        patch.setattr(ClientHalf, "update", remembering(ClientHalf.update))
        yield


TRAINED = {}  # (method, client) -> tensors of the network that was scored last


def remembering(update):
    def remember(half, job, model, *args, **kwargs):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        TRAINED[type(half).__name__, half.me.id] = state
        return update(half, job, model, *args, **kwargs)

    return remember


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a method once and gives its folder."""
    folders = {}

    def once(method, **options):
        key = method, *options.items()
        if key not in folders:
            named = {k if "." in k else f"{method}.{k}": v for k, v in options.items()}
            options = {k.replace("_", "-"): v for k, v in named.items()}
            place = {"run.output-dir": str(tmp_path_factory.mktemp(method))}
            folders[key] = inprocess.run({**SMALL, "strategy.name": method, **options, **place})
        return folders[key]

    return once


def rows(folder, name="clients.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def about(file):
    with safe_open(file, "pt") as opened:
        return {key: json.loads(text) for key, text in opened.metadata().items()}


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedfip", {}), ("subflot", {}), ("subflot", {"bn_local": True})],
    ids=["fedfip", "subflot", "subflot-local-norms"],
)
def test_the_personal_network_is_the_one_that_was_scored(run, method, options):
    folder = run(method, **options)
    config = read({**SMALL, "strategy.name": method})
    last = [row for row in rows(folder) if row["round"] == 2]
    widths = set()
    for index, row in enumerate(last):
        request = exporting.Request(folder, row["client"], "safetensors", repeats=1)
        written = exporting.export(request)
        network = exported.load(written.file)
        scores = evaluate(network, workload.client_share(config, index)[1], 2, 3)
        scored = TRAINED[STRATEGIES[method].client.__name__, row["client"]]
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, scored[name]), name
        assert int(scores.correct.sum()) == row["accuracy"]["correct"]
        assert int(scores.total.sum()) == row["accuracy"]["total"]
        assert sum(p.numel() for p in network.parameters()) == row["parameters"]
        assert written.parameters[0] == row["parameters"] < written.parameters[1]
        widths.add(str(about(written.file)["kept"]))
    shared = exporting.export(exporting.Request(folder, None, "safetensors", repeats=1))
    assert str(about(shared.file)["kept"]) not in widths


def test_the_global_network_is_the_saved_model(run):
    folder = run("fedfip")
    written = exporting.export(exporting.Request(folder, None, "safetensors", repeats=1))
    with (
        safe_open(written.file, "pt") as ours,
        safe_open(folder / "model.safetensors", "pt") as run_s,
    ):
        assert json.loads(ours.metadata()["kept"]) == json.loads(run_s.metadata()["kept"])
        assert set(ours.keys()) == set(run_s.keys())
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), run_s.get_tensor(name)), name


def test_the_file_says_what_it_is(run):
    folder = run("fedfip")
    written = exporting.export(exporting.Request(folder, "client-01", "safetensors", repeats=1))
    said = about(written.file)
    assert (said["run"], said["client"], said["round"]) == (folder.name, "client-01", 2)
    assert (said["shape"], said["classes"]) == ([1, 8, 8], ["a", "b", "c"])
    assert said["normalisation"] == "byte / 127.5 - 1"
    assert said["recipe"]["fedfip.keep"] == 0.5
    assert sum(map(len, said["kept"].values())) == written.channels[0]


def test_torch_export_runs_without_the_project_at_any_batch(run, tmp_path):
    folder, out = run("fedfip"), tmp_path / "deep" / "net.pt2"
    result = CliRunner().invoke(
        app, ["export", str(folder), "--client", "client-01", "--out", str(out), "--repeats", "2"]
    )
    assert result.exit_code == 0, result.output
    for word in ("as trained in round 2", "latency", "dense", "test samples right", str(out)):
        assert word in result.output
    said = {"about.json": ""}
    program = torch.export.load(out, extra_files=said)
    assert json.loads(said["about.json"])["client"] == "client-01"
    twin = exporting.export(exporting.Request(folder, "client-01", "safetensors", repeats=1))
    x = torch.randn(7, 1, 8, 8)
    torch.testing.assert_close(program.module()(x), exported.load(twin.file)(x))


def test_onnx_runs_in_onnxruntime_at_any_batch(run):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    written = exporting.export(exporting.Request(run("fedavg"), None, "onnx", repeats=1))
    session = onnxruntime.InferenceSession(written.file)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["a", "b", "c"]
    x = torch.randn(7, 1, 8, 8)
    twin = exporting.export(exporting.Request(run("fedavg"), None, "safetensors", repeats=1))
    (found,) = session.run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), exported.load(twin.file)(x))


def failing(folder, *options):
    result = CliRunner().invoke(app, ["export", str(folder), "--format", "safetensors", *options])
    assert result.exit_code == 1
    return result.output + result.stderr


def test_a_file_whose_outputs_differ_is_not_written(run, tmp_path, monkeypatch):
    weights = exported.FORMATS["safetensors"]

    def off_by_a_little(content):
        network = weights.read(content)
        return lambda x: network(x) * 1.001

    monkeypatch.setitem(
        exported.FORMATS, "safetensors", exported.Format(".s", weights.write, off_by_a_little)
    )
    said = failing(run("fedfip"), "--out", str(tmp_path / "x"))
    assert "outputs differ by 1.0e-03" in said
    assert not list(tmp_path.iterdir())


def test_an_unknown_client_lists_the_known_ones(run):
    said = failing(run("fedfip"), "--client", "client-9")
    assert "client-00, client-01, client-02" in said


def test_what_is_no_run_with_a_finished_round_is_said(run, tmp_path):
    assert "checkpoint.safetensors" in failing(tmp_path)
    assert "no such folder" in failing(tmp_path / "gone")
    whole = (run("fedfip") / "checkpoint.safetensors").read_bytes()
    (tmp_path / "checkpoint.safetensors").write_bytes(whole[:-100])
    assert "checkpoint.safetensors: damaged" in failing(tmp_path)


def test_a_missing_package_names_the_extra(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "fedsparse[export]" in failing(run("fedfip"), "--format", "onnx")


def test_a_device_keeps_its_arrays_where_state_dir_says(run, tmp_path):
    folder = run("fedfip")
    said = failing(folder, "--client", "client-00", "--state-dir", str(tmp_path))
    assert "--state-dir" in said
    assert str(tmp_path / folder.name / "client-00") in said
    (tmp_path / folder.name).symlink_to(folder / "clients")
    request = exporting.Request(
        folder, "client-00", "safetensors", tmp_path / "net", tmp_path, repeats=1
    )
    assert exporting.export(request).file.is_file()


def test_where_a_method_keeps_nothing_personal_that_is_said(run):
    folder = run("fedavg")
    result = CliRunner().invoke(
        app, ["export", str(folder), "--client", "client-02", "--format", "safetensors"]
    )
    assert result.exit_code == 0, result.output
    assert "keeps no network of client-02 alone" in result.output


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedfip", {"fedfip.phi": float("inf")}), ("subflot", {"subflot.otp": False})],
)
def test_where_the_global_network_stands_in_it_is_cut_to_the_device(method, options, tmp_path):
    place = {"run.output-dir": str(tmp_path), "strategy.name": method}
    folder = inprocess.run({**SMALL, **options, **place}, node_configs=({"keep": 0.25},))
    request = exporting.Request(folder, "client-00", "safetensors", repeats=1)
    small = exporting.export(request)
    assert "cut to what the device carries: " in small.what
    carried = next(row for row in rows(folder)[::-1] if row["client"] == "client-00")
    assert small.parameters[0] == carried["parameters"]


def test_a_client_of_subflot_that_never_answered_has_no_network(run, tmp_path):
    folder = shutil.copytree(run("subflot"), tmp_path / "run")
    shutil.rmtree(folder / "histories" / "client-01")
    assert "it never answered" in failing(folder, "--client", "client-01")


def test_what_was_scored_on_validation_samples_is_called_so(run):
    folder = run("subflot", **{"partition.validation_fraction": 0.3})
    request = exporting.Request(folder, "client-00", "safetensors", repeats=1)
    assert "validation samples right" in exporting.export(request).what
