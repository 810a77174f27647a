"""A stopped run goes on as if it had not been, or says why it cannot."""

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from safetensors import safe_open
from safetensors.torch import load_file, save

from fedsparse_app import inprocess, journal, resume, server_app
from fedsparse_app.checkpoint import load_checkpoint
from fedsparse_app.client_app import app as client_app
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.files import owned
from fedsparse_app.launch import Request
from fedsparse_app.recorder import Recorder
from fedsparse_app.resume import resumed
from fedsparse_app.state import ClientState
from fedsparse_app.workload import make_strategy, workload
from tests.fedsparse_app import toy

ROOT = Path(__file__).parents[2]


class Stop(BaseException):
    """What no part of the program catches."""


@pytest.fixture(autouse=True, scope="module")
def _toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "_report", lambda recorder: None)
        toy.install()
        yield
        toy.remove()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the folder of a FedAvg run that was stopped in round 3 of 4."""
    return stop(toy.options("fedavg", tmp_path_factory.mktemp("stopped")), 3)


@pytest.fixture
def copy(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / stopped.name)


def stop(options, round):
    """Run until a client is asked to train in ``round``; return the folder."""
    app = ClientApp()
    app.query()(client_app)

    @app.train()
    def train(message, context):
        if message.content.config_records["job"]["round"] == round:
            raise Stop
        return client_app(message, context)

    with pytest.raises(Stop):
        inprocess.run(options, client_app=app)
    (folder,) = Path(options["run.output-dir"]).iterdir()
    return folder


def described(folder, **changed):
    """Return the options that go on with the FedAvg run in ``folder``, but for ``changed``."""
    named = {key.replace("__", "."): value for key, value in changed.items()}
    return toy.options("fedavg", folder.parent) | {"run.resume": str(folder)} | named


def go_on(folder, **changed):
    return inprocess.run(described(folder, **changed))


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_arrays(one, other):
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    out = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fedsparse_app.killing", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.app
@pytest.mark.parametrize(
    ("method", "how"),
    [*((method, "killed") for method in toy.METHODS), ("fedfip", "killed-from-outside")],
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(killed, method, how):
    (whole,), (ended,) = ((killed / method / kind).iterdir() for kind in ("whole", how))
    assert (ended / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    arrays = {p.relative_to(whole) for p in whole.rglob("*.safetensors")}
    assert arrays == {p.relative_to(ended) for p in ended.rglob("*.safetensors")}
    for path in arrays:  # the model, the checkpoint, histories, what the clients keep
        assert same_arrays(whole / path, ended / path), path
    assert not list(ended.rglob(".*"))
    one, other = load_checkpoint(whole), load_checkpoint(ended)
    assert (one.round, one.clients, one.starved) == (other.round, other.clients, other.starved)
    assert one.recorder == other.recorder
    for name in ("timing.jsonl", "clients.jsonl"):
        expected, found = rows(whole, name), rows(ended, name)
        timed = {"seconds", "train_seconds", "evaluate_seconds"}
        assert [{k: v for k, v in row.items() if k not in timed} for row in found] == [
            {k: v for k, v in row.items() if k not in timed} for row in expected
        ]


@pytest.mark.app
def test_what_lives_longer_than_a_round_is_in_those_runs(killed):
    (fedfip,), (subflot,) = ((killed / m / "whole").iterdir() for m in ("fedfip", "subflot"))
    last = rows(fedfip)[-1]["strategy"]
    assert sum(last["private"].values()) > 0
    assert last["prototype_share"]
    assert any(row["strategy"]["refresh"] for row in rows(fedfip)[1:])
    assert len(list(subflot.glob("histories/*"))) == 4
    removed = [row["strategy"]["removed"] for row in rows(subflot)[1:]]
    assert len({round["client-00"] for round in removed if "client-00" in round}) > 1


@pytest.mark.app
@pytest.mark.parametrize("round", [1, 3])
def test_a_run_goes_on_for_more_rounds_than_it_was_asked_for(tmp_path, round):
    begun = stop(toy.options("fedavg", tmp_path / "stopped"), round)
    more = toy.options("fedavg", tmp_path / "whole") | {"run.rounds": 5}
    assert go_on(begun, run__rounds=5) == begun
    assert (begun / "metrics.jsonl").read_bytes() == (
        inprocess.run(more) / "metrics.jsonl"
    ).read_bytes()
    assert 'run.rounds" = 5' in (begun / "config.toml").read_text()
    assert 'run.resume" = ""' in (begun / "config.toml").read_text()


@pytest.mark.app
def test_what_may_differ_is_accepted(copy):
    changed = {"federation__patience": 9, "federation__timeout": 9.0, "federation__wait": 9.0}
    assert go_on(copy, run__threads=1, run__device="cpu", **changed) == copy
    assert [row["round"] for row in rows(copy)] == [0, 1, 2, 3, 4]


@pytest.mark.app
def test_a_finished_run_is_refused_and_one_that_lacks_its_model_gets_it(copy):
    go_on(copy)
    before = contents(copy)
    with pytest.raises(ConfigError, match=r"run\.rounds = 4: .*done 4 rounds.*above 4"):
        go_on(copy)
    with pytest.raises(ConfigError, match=r"run\.rounds = 3: .*done 4 rounds"):
        go_on(copy, run__rounds=3)
    assert contents(copy) == before
    model = (copy / "model.safetensors").rename(copy.parent / "model.safetensors")
    go_on(copy)
    assert same_arrays(copy / "model.safetensors", model)
    assert len(rows(copy)) == 5


@pytest.mark.app
def test_the_model_of_an_earlier_end_does_not_count(copy, monkeypatch):
    go_on(copy)
    earlier = shutil.copy(copy / "model.safetensors", copy.parent)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "close", raises)
        with pytest.raises(Stop):
            go_on(copy, run__rounds=5)
    go_on(copy, run__rounds=5)
    assert not same_arrays(copy / "model.safetensors", earlier)


def raises(*arguments):
    raise Stop


@pytest.mark.app
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"train__lr": 0.5, "run__seed": 7},
            [
                "train.lr = 0.5, the run began with 0.05",
                "run.seed = 7, the run began with 1",
                '-c "run.seed=1 train.lr=0.05"',
                "fedsparse run --resume",
            ],
        ),
        (
            {"strategy__name": "fedfip", "train__epochs": 2},
            [
                "strategy.name = 'fedfip', the run began with 'fedavg'",
                "strategy.name='fedavg' train.epochs=1\"",
            ],
        ),
        ({"fedavg__keep": 0.5}, ["fedavg.keep = 0.5, the run began with 1.0"]),
        ({"run__state-dir": "/x"}, ["run.state-dir = '/x', the run began with ''"]),
        ({"federation__fraction": 1.0}, ["federation.fraction = 1.0, the run began with 0.75"]),
    ],
)
def test_another_run_than_the_options_describe_is_refused(stopped, changed, words):
    before = contents(stopped)
    with pytest.raises(ConfigError) as caught:
        go_on(stopped, **changed)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "fedavg.keep" not in str(caught.value) or "fedavg__keep" in changed
    assert contents(stopped) == before


@pytest.mark.app
def test_a_run_that_is_still_being_written_is_left_alone(stopped):
    with owned(stopped), pytest.raises(ValueError, match="another run is still writing"):
        go_on(stopped)


@pytest.mark.app
def test_a_run_that_is_not_there_is_refused_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.resume = .*no folder .*17-fedavg-toy"):
        go_on(tmp_path / "17-fedavg-toy")
    assert not list(tmp_path.iterdir())


@pytest.mark.app
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_checkpoint_is_refused(copy, seed):
    path, draw = copy / "checkpoint.safetensors", random.Random(seed)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for end in (header, len(whole)):
        for _ in range(20):
            at, bit = draw.randrange(end), 1 << draw.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(ConfigError, match=r"checkpoint.*(damaged|of format).*new run"):
                load_checkpoint(copy)
        path.write_bytes(whole[: draw.randrange(end)])
        with pytest.raises(ConfigError, match="damaged"):
            load_checkpoint(copy)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="damaged"):
        go_on(copy)
    path.unlink()
    with pytest.raises(ConfigError, match="no round of this run was finished"):
        go_on(copy)


@pytest.mark.app
def test_a_checkpoint_of_another_format_is_refused(copy):
    path = copy / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata() | {"format": "99"}
    path.write_bytes(save(load_file(path), metadata))
    with pytest.raises(ConfigError, match="of format 99, and this version reads 1"):
        go_on(copy)


@pytest.mark.app
def test_a_checkpoint_of_another_version_is_refused(stopped, monkeypatch):
    old = replace(load_checkpoint(stopped), versions={"fedsparse": "0.0.9", "torch": "1"})
    monkeypatch.setattr(resume, "load_checkpoint", lambda folder: old)
    monkeypatch.setattr(resume, "versions", lambda: {"fedsparse": "0.1.0", "torch": "2"})
    with pytest.raises(ConfigError, match=r"by fedsparse 0\.0\.9, and this is 0\.1\.0"):
        go_on(stopped)


@pytest.mark.app
def test_another_network_or_split_under_the_same_name_is_refused(stopped):
    config = read(described(stopped))
    state = workload(config).model.state_dict()
    wider = state | {"0.weight": torch.zeros(9, 2, 3, 3)}
    with pytest.raises(ConfigError, match=r"0\.weight is \(8, 2, 3, 3\).*\(9, 2, 3, 3\)"):
        resumed(config, stopped, wider, None)
    with pytest.raises(ConfigError, match=r"partition\.json: the data or its split"):
        resumed(config, stopped, state, {"clients": {}})


@pytest.mark.app
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines[:1] + lines[2:], r"holds rounds \[0, 2\].*checkpoint is of round 2"),
        (lambda lines: [lines[0], b'{"rou', *lines[2:]], "line 2: damaged"),
        (lambda lines: [], r"holds rounds \[\]"),
    ],
)
def test_metrics_that_lack_a_round_are_refused(copy, damage, words):
    path = copy / "metrics.jsonl"
    path.write_bytes(b"\n".join(damage(path.read_bytes().split(b"\n"))))
    before = contents(copy)
    with pytest.raises(ValueError, match=words):
        go_on(copy)
    assert contents(copy) == before


def test_the_journal_is_cut_to_a_round_byte_by_byte(tmp_path):
    lines = [b'{"round": %d, "x":  %d}\n' % (i, i) for i in range(4)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "clients.jsonl").write_bytes(b"".join(lines)[:-9])
    journal.cut(tmp_path, 2)
    for name in ("metrics.jsonl", "clients.jsonl"):
        assert (tmp_path / name).read_bytes() == b"".join(lines[:3])
    assert not (tmp_path / "timing.jsonl").exists()


@pytest.mark.app
def test_the_recorder_takes_up_what_it_carried(stopped, tmp_path):
    config = read(described(stopped))
    work = workload(config)
    recorder = Recorder(tmp_path, config, work, make_strategy(config, work))
    carried = {"personal": {"client-07": 0.5}, "ratios": [0.25, 0.75]}
    recorder.resume(replace(load_checkpoint(stopped), recorder=carried))
    assert recorder.personal == {"client-07": 0.5}
    assert (recorder.upload_ratio, recorder.flops_ratio, recorder.first) == (0.25, 0.75, 2)


@pytest.mark.app
def test_what_was_saved_after_the_round_and_drafts_are_taken_back(copy):
    for root in ("histories", "clients"):
        for round in (1, 3):
            ClientState(copy / root, "client-00").save(round, {"x": torch.tensor(round)})
    (copy / "clients" / "client-00" / ".round-000003.safetensors.77").touch()
    (copy / ".checkpoint.safetensors.77").touch()
    (copy / ".mine").touch()
    config = read(described(copy))
    partition = json.loads((copy / "partition.json").read_text())
    resumed(config, copy, workload(config).model.state_dict(), partition)
    assert {p.name for p in copy.rglob("round-*")} == {"round-000001.safetensors"}
    assert [p.name for p in copy.rglob(".*")] == [".mine"]


def test_a_resumed_run_writes_where_it_began(tmp_path):
    (tmp_path / "7-fedavg-digits").mkdir()
    there = str(tmp_path / "7-fedavg-digits")

    def folder(resume, output_dir):
        return read({"run.resume": resume, "run.output-dir": str(output_dir)}).run_folder(99)

    assert folder(there, "/elsewhere") == Path(there)
    assert folder("7-fedavg-digits", tmp_path) == Path(there)
    # On a device the server's path does not exist, but the run has the same name there.
    assert folder("/of/the/server/7-fedavg-digits", tmp_path) == Path(there)
    assert folder("", tmp_path) == tmp_path / "99-fedfip-digits"


@pytest.mark.app
def test_the_command_line_takes_the_options_of_the_run(stopped):
    request = Request(config=("run.threads=2",), rounds=9, resume=stopped)
    options = request.overrides()
    assert options["federation.fraction"] == 0.75
    assert (options["run.rounds"], options["run.threads"]) == (9, 2)
    assert options["run.resume"] == str(stopped)
    assert options["run.output-dir"] == str(stopped.parent)
    assert read(options).strategy.name == "fedavg"
    with pytest.raises(ValueError, match="leave out --output-dir"):
        Request(output_dir=stopped, resume=stopped).overrides()
    with pytest.raises(ValueError, match=r"nothing/config\.toml"):
        Request(resume=stopped / "nothing").overrides()
