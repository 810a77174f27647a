"""A stopped run goes on as if it had not been, or says why it cannot."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from safetensors import safe_open
from safetensors.torch import load_file, save

from fedsparse_app import checkpoint, inprocess, journal, recipe, server_app
from fedsparse_app.checkpoint import load_checkpoint
from fedsparse_app.client_app import app as client_app
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.files import owned, sweep
from fedsparse_app.launch import Request
from fedsparse_app.resume import resumed
from fedsparse_app.server_app import app as real_server
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


def stop(options, round, **apps):
    """Run until a client is asked to train in ``round``; return the folder."""
    app = ClientApp()
    app.query()(client_app)
    app.evaluate()(client_app)

    @app.train()
    def train(message, context):
        if message.content.config_records["job"]["round"] == round:
            raise Stop
        return client_app(message, context)

    with pytest.raises(Stop):
        inprocess.run(options, client_app=app)
    if "run.resume" in options:
        return Path(options["run.resume"])
    (folder,) = Path(options["run.output-dir"]).iterdir()
    return folder


def go_on(folder, method="fedavg", **changed):
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in changed.items()}
    where = {"run.resume": str(folder)}
    return inprocess.run(toy.options(method, folder.parent) | where | named)


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
