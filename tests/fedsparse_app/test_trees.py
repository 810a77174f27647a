"""A data set written as folders comes back as it was."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedsparse_app import trees
from fedsparse_app.cli import app
from fedsparse_app.config import read
from fedsparse_app.overrides import parse_overrides
from fedsparse_app.shares import served, with_test_set
from fedsparse_app.workload import workload
from task.data.dataset import DataSet, Samples
from task.errors import DataError


def samples(n, seed, channels=3):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (n, channels, 8, 8), generator=draw, dtype=torch.uint8)
    return Samples(x, torch.arange(n) % 2, torch.arange(n) // 2 % 2)


@pytest.fixture(params=[1, 3])
def tiny(request, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "cache"))
    data = DataSet(
        "tiny", ("old", "new"), ("0", "1"), *(samples(n, n, request.param) for n in (40, 12))
    )
    monkeypatch.setattr("task.data.load", lambda name: data)

    def halves(samples, options, clients):  # the real partitioners take seconds to import
        return np.array_split(np.arange(len(samples)), clients)

    monkeypatch.setattr(trees, "partition", halves)
    return data


def images(samples):
    return sorted(
        (int(d), int(y), x.numpy().tobytes())
        for x, y, d in zip(samples.x, samples.y, samples.domain, strict=True)
    )


def test_what_is_printed_runs_on_the_very_images_and_each_client_has_its_part(tiny, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # empty
    done = CliRunner().invoke(app, ["data", "tiny", "--out", str(out), "--clients", "2"])
    assert done.exit_code == 0, done.output
    assert f"{out}/client-000: 20 images (old 10, new 10)" in done.output
    assert f"{out}/test: 12 images (old 6, new 6)" in done.output
    simulated, deployed = (
        read(parse_overrides([line.split('-c "')[1].removesuffix('"')]))
        for line in done.output.splitlines()
        if "flwr run" in line
    )
    nodes = [
        parse_overrides([line.split("--node-config '")[1].removesuffix("'")])
        for line in done.output.splitlines()
        if "flower-supernode" in line
    ]
    assert simulated.federation.clients == len(nodes) == 2
    dealt = served(simulated, {"partition-id": 0, "num-partitions": 1})
    for i, node in enumerate(nodes):
        ((name, load),) = served(deployed, node).items()
        share = load()
        both = images(share.train) + images(share.test)
        assert sorted(both) == images(tiny.train.take(np.arange(20 * i, 20 * i + 20)))
        assert torch.equal(dealt[name]().test.x, share.test.x)
    judge = with_test_set(workload(deployed), deployed).data
    assert images(judge.test) == images(tiny.test)
    assert (judge.domains, judge.classes, judge.shape) == (tiny.domains, tiny.classes, tiny.shape)


def test_a_folder_that_holds_something_is_left_alone(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    kept = tmp_path / "out/kept.txt"
    kept.write_text("mine")
    done = CliRunner().invoke(app, ["data", "tiny", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "is there and not empty; give a new folder" in done.output
    assert [path.name for path in kept.parent.iterdir()] == ["kept.txt"]


def test_a_write_that_fails_leaves_nothing(tiny, tmp_path, monkeypatch):
    real, written = trees._write, []

    def full(root, *rest):
        if written:
            raise OSError("No space left on device")
        written.append(root)
        real(root, *rest)

    monkeypatch.setattr(trees, "_write", full)
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(OSError, match="No space left"):
        trees.write_trees(place / "out", tiny, read({"federation.clients": 2}))
    assert written
    assert list(place.iterdir()) == []


def test_a_path_that_cannot_be_typed_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(DataError, match="quotes"):
        trees.write_trees(tmp_path / "it's", tiny, read({"federation.clients": 2}))
    assert not (tmp_path / "it's").exists()
