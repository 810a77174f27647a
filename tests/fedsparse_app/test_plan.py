import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fedsparse_app.capacity import carried, measured_speed, with_capacity
from fedsparse_app.cli import app
from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError
from fedsparse_app.fleet import parse_fleet, planned
from fedsparse_app.plan import Planner, document
from fedsparse_app.workload import Workload
from strategies import FederationOptions
from strategies.hello import Hello
from strategies.privacy import PrivacyOptions
from task.train import TrainingOptions
from tests.strategies.federation import CLASSES, DOMAINS, Federation

KEEPS = {"client-00": 0.25, "client-01": 0.5, "client-02": 1.0}
TINY = {"federation.clients": 3, "data.name": "digits", "train.epochs": 1}


def toy(method, rounds, **options):
    """Return a toy federation that has run and the planner of it."""
    run = Federation(method, keeps=KEEPS, **options)
    names = {"domains": tuple(map(str, range(DOMAINS))), "classes": tuple("abcd"[:CLASSES])}
    data = SimpleNamespace(**names)
    work = Workload(data, run.model, run.channels, torch.randn(2, 2, 6, 6))
    for half in run.halves.values():
        half.me = replace(half.me, costs=work.costs)
    run.run(rounds)
    assert all(not round.failures for round in run.rounds)
    config = read({"train.epochs": 1, "train.batch-size": 8, "run.rounds": rounds})
    config = replace(config, federation=run.server.federation, privacy=run.server.privacy)
    return run, Planner(config, work, run.server)


JUDGES = FederationOptions(clients=4, wait=1.0, evaluate_on="clients")
METHODS = [
    ("fedavg", {"keep": 0.25}),
    ("subflot", {"rate_mode": "dynamic", "importance": "cost"}),
    ("subflot", {"bn_local": True}),
    ("fedfip", {"keep": 0.75, "phi": math.inf, "fisher_refresh": 0, "federation": JUDGES}),
    ("fedfip", {"keep": 0.5, "phi": math.inf, "fisher_refresh": 0, "sa": False, "dsr": False}),
]


@pytest.mark.parametrize(("method", "options"), METHODS, ids=str)
def test_what_was_predicted_is_what_was_sent_and_computed(method, options):
    run, planner = toy(method, 3, **options)
    for round in run.rounds[1:]:
        forecast = planner.forecast(round.jobs, round.number)
        assert forecast.keys() == {u.client for u in round.updates}
        for update in round.updates:
            row = forecast[update.client]
            assert row.parameters == update.costs["parameters"]
            assert row.flops == update.costs["flops"]
            assert row.train_flops == update.costs["train-flops"]
            assert row.round_flops == 26 * row.train_flops  # the toy does not say what it trains on
            assert abs(row.bytes_down - round.bytes_down[update.client]) <= 8
            assert abs(row.bytes_up - round.bytes_up[update.client]) <= 8
            assert row.seconds is None


@pytest.mark.parametrize(("method", "keep"), [("fedavg", 0.25), ("fedfip", 0.75)])
def test_noise_is_in_the_plan_and_what_it_hides_is_not(method, keep):
    own = {"phi": math.inf, "fisher_refresh": 0} if method == "fedfip" else {}
    private = PrivacyOptions(0.1, delta=0.1, noise="seeded")
    run, planner = toy(method, 3, keep=keep, privacy=private, **own)
    for round in run.rounds[1:]:
        forecast = planner.forecast(round.jobs, round.number)
        for client in round.jobs:  # narrow ones, which send no signatures, among them
            assert abs(forecast[client].bytes_down - round.bytes_down[client]) <= 8
            assert abs(forecast[client].bytes_up - round.bytes_up[client]) <= 8
            assert (forecast[client].round_flops, forecast[client].seconds) == (None, None)
    json.dumps(document(planner))


def test_a_plan_of_a_private_run_knows_the_samples_of_who_makes_it():
    fleet = parse_fleet("a: keep=0.5, b: keep=1 samples=800")
    options = TINY | {"fedfip.phi": math.inf, "privacy.delta": 0.1}
    plain, private = (
        {row["client"]: row for row in planned(read(options | own), fleet)["clients"]}
        for own in ({}, {"privacy.noise-multiplier": 0.1})
    )
    for client in ("a", "b"):
        assert private[client]["round_flops"] == plain[client]["round_flops"] > 0
    assert private["b"]["bytes_up"] != plain["b"]["bytes_up"]


ELSEWHERE = {
    "data.name": "folder",
    "data.classes": "a,b",
    "data.size": 32,
    "federation.evaluate-on": "clients",
}


def test_a_plan_over_folders_on_devices_takes_the_samples_that_are_stated():
    fleet = parse_fleet("phone: keep=0.5 samples=100, hub: samples=200")
    plan = planned(read(ELSEWHERE | {"strategy.name": "subflot", "subflot.rates": "0.0"}), fleet)
    phone, hub = plan["clients"][1], plan["clients"][0]
    assert (phone["client"], phone["keep"]) == ("phone", 0.5)
    assert hub["round_flops"] == 200 * 2 * hub["train_flops"]
    for unknown in (None, parse_fleet("phone: keep=0.5")):
        with pytest.raises(ConfigError, match=r"^data.dir = '': .*--clients"):
            planned(read(ELSEWHERE), unknown)


def test_a_fleet_too_small_for_the_merge_is_refused_by_its_option():
    trimmed = read(TINY | {"federation.clients": 5, "federation.merge": "trimmed"})
    with pytest.raises(ConfigError, match=r"^federation.trim = 0.2"):
        planned(trimmed, parse_fleet("a: keep=1, b: keep=1"))


def test_private_channels_and_refreshes_of_fedfip_come_on_top():
    run, planner = toy("fedfip", 2, keep=0.5, phi=0.0, react_max=0.25, fisher_refresh=1)
    row = planner.forecast(run.rounds[2].jobs, 2)["client-02"]
    real = next(u for u in run.rounds[2].updates if u.client == "client-02")
    assert real.costs["private"] > 0
    assert real.costs["train-flops"] > row.train_flops
    assert run.rounds[2].bytes_down["client-02"] > 1.5 * row.bytes_down


def test_the_plan_of_a_run_does_not_change_the_run():
    run, planner = toy("fedfip", 2, keep=0.5)
    before = run.server.memory()
    planner.forecast(KEEPS, 2)
    after = run.server.memory()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before.keys() == after.keys()


def test_totals_and_ratios_add_up_and_dense_fedavg_is_one():
    _, planner = toy("fedavg", 1, keep=0.25)
    plan = document(planner)
    assert plan["total"]["bytes_up"] == sum(row["bytes_up"] for row in plan["clients"])
    assert 0 < plan["ratio"]["parameters"] < 0.2
    dense = planner.dense(KEEPS)
    assert {row.keep for row in dense.values()} == {1.0}
    wide = {row.bytes_up for row in dense.values()}
    assert plan["dense_fedavg"]["bytes_up"] == 4 * wide.pop()
    json.dumps(plan)


# What devices state --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work():
    run = Federation("fedavg", clients=2)
    data = SimpleNamespace(domains=("0",), classes=tuple("abcd"))
    return Workload(data, run.model, run.channels, torch.randn(2, 2, 6, 6))


def test_a_capacity_comes_from_node_config(work):
    assert carried({"partition-id": 0}, work) is None
    assert carried({"keep": 1}, work) == 1.0
    assert carried({"keep": 0.5, "budget-mparams": 1}, work) == 0.5
    assert 0 < carried({"keep": 0.5, "budget-mparams": 0.0002}, work) < 0.5
    for bad in ({"keep": 1.5}, {"keep": "half"}, {"budget-mflops": 0}, {"budget-mflops": 1e-9}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            carried(bad, work)


def test_a_device_that_cannot_take_part_says_so_instead_of_failing(work, monkeypatch):
    monkeypatch.setattr("fedsparse_app.capacity.workload", lambda config: work)
    hello, config = Hello("a", {"0": 26}), read({})
    small = with_capacity(hello, {"budget-mflops": 1e-9}, config)
    assert small.refusal.startswith("budget-mflops = 1e-09: not even the narrowest network fits")
    assert with_capacity(hello, {"partition-id": 0}, config) == hello
    assert with_capacity(hello, {"keep": 0.5, "probe": True}, config).speed > 0


def test_a_probe_measures_and_leaves_the_network_as_it_was(work):
    before = {name: t.clone() for name, t in work.model.state_dict().items()}
    speed = measured_speed(work, 1.0, TrainingOptions(batch_size=5), torch.device("cpu"))
    assert 0 < speed < 1e15
    assert all(torch.equal(t, before[name]) for name, t in work.model.state_dict().items())


# The command ---------------------------------------------------------------------------------


def test_a_fleet_is_read_from_text_or_file(tmp_path):
    text = "a: keep=0.5, b: budget-mflops=3 samples=80, c"
    fleet = {"a": {"keep": 0.5}, "b": {"budget-mflops": 3, "samples": 80}, "c": {}}
    assert parse_fleet(text) == fleet
    file = tmp_path / "fleet.toml"
    file.write_text("[a]\nkeep = 0.5\n[b]\nbudget-mflops = 3\nsamples = 80\n[c]\n")
    assert parse_fleet(str(file)) == fleet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: kep=0.5", "'a': kep: write for example"),
        ("", "names no client"),
        ("a: keep=1, a: keep=0.5", "a is there twice"),
        (": keep=1", "no name"),
        ("nowhere.toml", "cannot be read as TOML"),
    ],
)
def test_a_fleet_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_fleet(text)


def test_the_command_names_who_cannot_take_part_and_exits_with_2(tmp_path, monkeypatch):
    fleet = "phone: keep=0.5, board: budget-mparams=0.00001, hub: samples=100"
    overrides = "train.epochs=1 strategy.name='subflot'"
    out = tmp_path / "plan.json"
    arguments = ["plan", "-c", overrides, "--clients", fleet, "--json", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert "error: board: budget-mparams = 1e-05: not even the narrowest network" in done.output
    plan = json.loads(out.read_text())
    rows = {row["client"]: row for row in plan["clients"]}
    assert set(rows) == {"phone", "hub"}
    assert set(plan["refused"]) == {"board"}
    assert rows["phone"]["keep"] == pytest.approx(0.5, abs=0.01)
    assert rows["hub"]["round_flops"] == 100 * rows["hub"]["train_flops"]
    assert rows["hub"]["seconds"] > 0
    for line in ("phone", "hub", "dense FedAvg", "ratio"):
        assert line in done.output


def test_a_method_refuses_in_the_plan_as_in_the_run():
    config = read({"strategy.name": "fedavg", "train.epochs": 1})
    plan = planned(config, parse_fleet("a: keep=0.5, b: keep=1"))
    assert "fedavg.keep=0.5 or less" in plan["refused"]["a"]
    assert [row["client"] for row in plan["clients"]] == ["b"]
