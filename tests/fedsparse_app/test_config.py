import math

import pytest

from fedsparse_app.config import read
from fedsparse_app.errors import ConfigError

PRIVATE = {"privacy.noise-multiplier": 0.1}


def test_defaults_are_fedfip_on_digits_with_twenty_clients():
    config = read({})
    assert (config.strategy.name, config.data.name, config.federation.clients) == (
        "fedfip",
        "digits",
        20,
    )
    assert config.method.keep == 0.8
    assert (config.method.mu, config.method.lambda_con) == (0.4, 0.01)


def test_a_whole_number_is_accepted_where_a_number_is_asked():
    assert read({"train.lr": 1}).train.lr == 1.0


def test_phi_may_be_infinite():
    assert read({"fedfip.phi": math.inf}).method.phi == math.inf


def test_flat_gives_back_what_was_read_without_other_methods():
    config = read({"strategy.name": "fedavg", "run.seed": 7})
    flat = config.flat()
    assert flat["run.seed"] == 7
    assert not any(key.startswith("fedfip.") for key in flat)
    assert read(flat) == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"strategy.name": "fedfipp"},
            ["strategy.name", "fedfipp", "did you mean 'fedfip'", "fedavg"],
        ),
        ({"model.name": "resnet19"}, ["model.name", "resnet19", "did you mean 'resnet1"]),
        ({"data.name": "digit"}, ["data.name", "did you mean 'digits'"]),
        ({"run.rouns": 3}, ["run.rouns", "did you mean 'run.rounds'"]),
        ({"run.rounds": "ten"}, ["run.rounds", "'ten'", "whole number"]),
        ({"run.rounds": 2.5}, ["run.rounds", "2.5", "whole number"]),
        ({"run.rounds": True}, ["run.rounds", "True", "whole number"]),
        ({"run.rounds": 0}, ["run.rounds", "0", ">= 1"]),
        ({"fedfip.keep": 1.5}, ["fedfip.keep", "1.5", "(0, 1]"]),
        ({"fedfip.keep": 0}, ["fedfip.keep", "(0, 1]"]),
        ({"fedfip.scope": "layers"}, ["fedfip.scope", "layers", "layer, global"]),
        ({"fedfip.dsfp": 1}, ["fedfip.dsfp", "true or false"]),
        ({"train.lr": -0.1}, ["train.lr", "-0.1", "> 0"]),
        ({"partition.kind": "multidomain"}, ["partition.kind", "multi-domain"]),
        ({"federation.min-replies": 30}, ["federation.min-replies = 30", "at most 20", "fraction"]),
        ({"federation.fraction": 0.05}, ["min-replies = 2", "at most 1"]),
        ({"train.lr": float("inf")}, ["train.lr", "finite"]),
        ({"partition.test-fraction": 1.5}, ["partition.test-fraction", "1.5"]),
        ({"federation.merge": "trimmed", "federation.trim": 0.01}, ["trim = 0.01", "20", "1/20"]),
        ({"privacy.noise-multiplier": -1.0}, ["privacy.noise-multiplier", "-1", ">= 0"]),
        ({**PRIVATE, "strategy.name": "subflot"}, ["subflot needs", "own network", "0 switches"]),
        ({**PRIVATE, "fedfip.sa": False}, ["fedfip tells", "fedfip.sa = false", "private"]),
        ({**PRIVATE, "federation.merge": "median"}, ["federation.merge", "'median'", "'mean'"]),
        ({**PRIVATE, "federation.evaluate-on": "clients"}, ["scores without noise", "'server'"]),
        ({**PRIVATE, "privacy.delta": 0.1}, ["privacy.delta = 0.1", "below 0.05"]),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_accepted(options, words):
    with pytest.raises(ConfigError) as caught:
        read(options)
    for word in words:
        assert word in str(caught.value)
