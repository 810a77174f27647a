"""Clients with images of their own: who they are, what they hold, and whole runs over them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsparse_app import inprocess, plots
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.report import markdown
from fedsparse_app.run_folder import read_run
from fedsparse_app.shares import attended, served, with_test_set
from fedsparse_app.summary import summarise
from fedsparse_app.workload import workload
from task.errors import DataError

FOLDER = {
    "data.name": "folder",
    "data.classes": "cat, dog",
    "data.domains": "photo,sketch",
    "data.size": 8,
    "data.channels": 1,
    "federation.evaluate-on": "clients",
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("fedsparse_app.server_app._report", lambda _: None)  # plots take seconds


def tree(root: Path, seed=0, domains=("photo", "sketch"), classes=("cat", "dog"), each=5) -> Path:
    """Write ``each`` images per class and domain; a dog is brighter than a cat."""
    draw = np.random.default_rng(seed)
    for domain in domains:
        for label in classes:
            place = root / domain / label
            place.mkdir(parents=True, exist_ok=True)
            for i in range(each):
                low = 120 * (label == "dog")
                pixels = draw.integers(low, low + 120, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return root


@pytest.fixture
def clients(tmp_path):
    for i, name in enumerate(("ann", "bob", "cyd")):
        tree(tmp_path / "clients" / name, i)
    tree(tmp_path / "clients" / "test", 9, each=3)
    (tmp_path / "clients" / ".hidden").mkdir()
    return tmp_path / "clients"


def config(clients=None, **options):
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in options.items()}
    place = {} if clients is None else {"data.dir": str(clients)}
    return read({**FOLDER, **place, **named})


def test_a_node_says_whose_images_it_has_and_where(clients):
    node = {"client-id": "phone", "data-dir": str(clients / "bob")}
    for options in (config(), config(clients)):  # node config wins over data.dir
        (name, load), *others = served(options, node).items()
        assert (name, others) == ("phone", [])
        assert len(load().train) + len(load().test) == 20


def test_without_data_dir_it_is_the_clients_folder_in_data_dir(clients):
    (load,) = served(config(clients), {"client-id": "cyd"}).values()
    assert torch.equal(load().train.x, own(config(), "cyd", clients / "cyd").train.x)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_in_simulation_clients_are_dealt_over_the_nodes(clients, nodes):
    dealt = [
        name
        for i in range(nodes)
        for name in served(config(clients), {"partition-id": i, "num-partitions": nodes})
    ]
    assert sorted(dealt) == ["ann", "bob", "cyd"]


def test_no_more_clients_than_asked_for_take_part(clients):
    two = config(clients, federation__clients=2)
    assert list(served(two, {"partition-id": 0, "num-partitions": 1})) == ["ann", "bob"]
    assert attended(two).federation.clients == 2
    assert attended(config(clients)).federation.clients == 3


@pytest.mark.parametrize(
    "node", [{}, {"data-dir": "/data"}, {"client-id": "c1"}, {"partition-id": 0}]
)
def test_a_node_that_does_not_say_it_is_told_how(node):
    with pytest.raises(ConfigError, match=r"--node-config 'data-dir=\"/data\" client-id=\"c1\"'"):
        served(config(), node)


def test_a_relative_data_dir_is_refused():
    with pytest.raises(ConfigError, match=r"data-dir = 'data': must be an absolute path"):
        served(config(), {"client-id": "c1", "data-dir": "data"})


def test_a_data_dir_without_clients_is_refused(clients, tmp_path):
    (tmp_path / "none/test").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"data\.dir = .*none.*holds no client's folder"):
        attended(config(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"federation\.min-replies = 4: must be at most 3"):
        attended(config(clients, federation__min_replies=4))


def own(options, client, root):
    (load,) = served(options, {"client-id": client, "data-dir": str(root)}).values()
    return load()


def test_a_clients_test_share_has_every_domain_and_class_in_proportion(clients):
    share = own(config(partition__test_fraction=0.4), "ann", clients / "ann")
    assert torch.bincount(share.test.domain * 2 + share.test.y).tolist() == [2, 2, 2, 2]
    assert torch.bincount(share.train.domain * 2 + share.train.y).tolist() == [3, 3, 3, 3]


def test_a_split_depends_on_name_and_seed_and_not_on_the_place(clients, tmp_path):
    def judged(options, client, root):
        return own(options, client, root).test.x

    first = judged(config(), "ann", clients / "ann")
    moved = (clients / "ann").rename(tmp_path / "moved")
    assert torch.equal(first, judged(config(), "ann", moved))
    assert not torch.equal(first, judged(config(), "eve", moved))
    assert not torch.equal(first, judged(config(partition__seed=2), "ann", moved))


def test_too_few_images_are_refused(clients, tmp_path):
    small = tree(tmp_path / "small", each=1)
    with pytest.raises(DataError, match=r"small: 4 images, partition\.min-samples = 8"):
        own(config(), "eve", small)
    least = config(partition__min_samples=2)
    pair = tree(tmp_path / "pair", classes=("cat",), each=1)
    with pytest.raises(DataError, match=r"pair: .*leaves none to test on"):
        own(least, "eve", pair)


def test_a_hello_tells_samples_per_domain_and_class_and_files_skipped(clients):
    (clients / "bob/photo/cat/bad.png").write_bytes(b"?")
    options = config()
    hello = own(options, "bob", clients / "bob").hello("bob", workload(options).data)
    assert (hello.client, hello.domains) == ("bob", {"photo": 10, "sketch": 10})
    assert (hello.classes, hello.skipped) == ([10, 10], 1)


def test_the_servers_own_images_judge_where_they_are_given(clients):
    options = config(federation__evaluate_on="server", data__test_dir=str(clients / "test"))
    assert len(with_test_set(workload(options), options).data.test) == 12
    assert len(with_test_set(workload(config()), config()).data.test) == 0
    gone = config(federation__evaluate_on="server", data__test_dir="/nowhere")
    with pytest.raises(DataError, match=r"data\.test-dir: /nowhere: No such file"):
        with_test_set(workload(gone), gone)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"federation.evaluate-on": "server"}, ["data.test-dir", "evaluate-on='clients'"]),
        ({"data.classes": ""}, ["data.classes = ''", "two or more"]),
        ({"data.classes": "cat,cat"}, ["'cat' must occur once"]),
        ({"data.domains": "cat"}, ["'cat' must occur once"]),
        ({"data.classes": "a/b,c"}, ["'a/b' must"]),
        ({"data.dir": "clients"}, ["data.dir = 'clients'", "absolute"]),
        ({"data.test-dir": "test"}, ["data.test-dir = 'test'", "absolute"]),
        ({"data.channels": 2}, ["data.channels = 2", "1 (grey) or 3 (colour)"]),
        ({"data.size": 4}, ["data.size = 4", ">= 8"]),
        ({"data.name": "folders"}, ["did you mean 'folder'"]),
    ],
)
def test_an_agreement_that_cannot_be_is_refused_before_anything_starts(options, words):
    with pytest.raises(ConfigError) as caught:
        read({**FOLDER, **options})
    for word in words:
        assert word in str(caught.value)


RUN = {**FOLDER, "strategy.name": "fedavg", "run.rounds": 1, "train.epochs": 1, "train.lr": 0.01}


@pytest.mark.app
def test_a_run_over_client_folders_scores_on_the_servers_images(clients, tmp_path):
    (clients / "bob/photo/cat/bad.png").write_bytes(b"?")
    judged = {"federation.evaluate-on": "server", "data.test-dir": str(clients / "test")}
    place = {"data.dir": str(clients), "run.output-dir": str(tmp_path / "runs")}
    folder = inprocess.run({**RUN, **judged, **place})
    table = json.loads((folder / "partition.json").read_text())
    assert (table["domains"], table["classes"]) == (["photo", "sketch"], ["cat", "dog"])
    assert {name: held["skipped"] for name, held in table["clients"].items()} == {
        "ann": 0,
        "bob": 1,
        "cyd": 0,
    }
    assert table["clients"]["ann"]["domains"] == {"photo": 10, "sketch": 10}
    run = read_run(folder)
    assert run.options["federation.clients"] == 3
    assert set(run.rounds[-1]["global"]["accuracy"]) == {"photo", "sketch"}
    assert set(run.rounds[-1]["personal"]["clients"]) == {"ann", "bob", "cyd"}
    assert summarise(run).failures == 0


@pytest.mark.app
def test_a_run_over_client_folders_can_be_scored_by_the_clients(clients, tmp_path):
    place = {"data.dir": str(clients), "run.output-dir": str(tmp_path / "runs")}
    folder = inprocess.run({**RUN, **place})
    first, last = read_run(folder).rounds
    assert first["global"] is None
    assert set(last["global"]["accuracy"]) == {"photo", "sketch"}


@pytest.mark.app
def test_a_run_over_client_folders_with_noise_tells_nothing_of_them_and_has_a_report(
    clients, tmp_path
):
    judged = {"federation.evaluate-on": "server", "data.test-dir": str(clients / "test")}
    place = {"data.dir": str(clients), "run.output-dir": str(tmp_path / "runs")}
    private = {"privacy.noise-multiplier": 0.1, "privacy.delta": 0.01}
    folder = inprocess.run({**RUN, **judged, **place, **private})
    assert json.loads((folder / "partition.json").read_text())["clients"] == {}
    text = markdown(run := read_run(folder))
    assert f"epsilon {run.rounds[-1]['privacy']['epsilon']:.4g} against" in text
    assert "| ann |  | – | – | 1.000 |" in text
    assert "partition.png" not in {path.name for path in plots.draw(run)}
    assert all(row["round_flops"] is None for row in run.clients)


@pytest.mark.app
def test_a_resumed_run_says_whose_images_have_changed(clients, tmp_path, caplog):
    place = {"data.dir": str(clients), "run.output-dir": str(tmp_path / "runs")}
    folder = inprocess.run({**RUN, **place})
    tree(clients / "bob", 5, domains=("photo",), each=7)
    resumed = {**RUN, **place, "run.resume": str(folder), "run.rounds": 2}
    with caplog.at_level("WARNING", logger="flwr"):
        assert inprocess.run(resumed) == folder
    said = [r.getMessage() for r in caplog.records if "other images" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("bob: holds other images than before: {'domains': {'photo': 14,")
    table = json.loads((folder / "partition.json").read_text())
    assert table["clients"]["bob"]["domains"] == {"photo": 14, "sketch": 10}


@pytest.mark.app
def test_clients_with_unknown_classes_are_named_before_round_1(clients, tmp_path):
    for name in ("bob", "cyd"):
        tree(clients / name, classes=("cow",))
    place = {"data.dir": str(clients), "run.output-dir": str(tmp_path)}
    with pytest.raises(RuntimeError, match=r"bob: .*'cow' is no class of .*cyd: .*'cow' is no"):
        inprocess.run({**RUN, **place})
    assert not list(tmp_path.glob("*/metrics.jsonl"))
