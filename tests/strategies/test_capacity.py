"""Devices of different sizes under every method: who gets what, and what becomes of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from strategies.hello import Hello, read_hello
from strategies.ops.select import nested
from strategies.records import decode_hellos, encode_hellos
from strategies.signatures import unpack_mask
from tests.strategies.federation import Federation
from tests.strategies.test_fedfip import naive_shared

KEEPS = {"client-00": 0.25, "client-01": 0.5, "client-02": 1.0}  # client-03 says nothing


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def spy_on_merge(run):
    """Record the server's state and mask as they were before every merge."""
    before, merge = {}, run.server.merge

    def merged(round, updates):
        state = {name: tensor.clone() for name, tensor in run.server.state.items()}
        before[round] = state, run.server.mask.copy()
        return merge(round, updates)

    run.server.merge = merged
    return before


@pytest.fixture(scope="module")
def mixed():
    options = {"keep": 0.75, "fisher_refresh": 1, "phi": 0.0, "react_max": 0.5, "lambda_con": 0.1}
    run = Federation("fedfip", keeps=KEEPS, **options)
    run.before = spy_on_merge(run)
    run.run(rounds=3)
    assert all(not round.failures for round in run.rounds)
    return run


# Who takes part ----------------------------------------------------------------------------------


def test_fedavg_refuses_a_device_too_small_before_round_1_and_says_what_to_do():
    run = Federation("fedavg", keeps=KEEPS, keep=0.5)
    with pytest.raises(
        RuntimeError, match=r"client-00: the device carries keep = 0\.25, fedavg"
    ) as e:
        run.run(rounds=1)
    assert "fedavg.keep=0.25" in str(e.value)
    assert "'subflot' or 'fedfip'" in str(e.value)
    assert "client-01" not in str(e.value)
    assert run.rounds == []


def test_fedavg_trains_what_every_device_carries():
    run = Federation("fedavg", clients=2, keeps=KEEPS, keep=0.25)
    run.run(rounds=1)
    assert len(run.rounds[1].updates) == 2


@pytest.mark.parametrize("method", ["fedavg", "fedfip", "subflot"])
def test_a_client_that_cannot_take_part_ends_the_run_with_its_reason(method, monkeypatch):
    run = Federation(method, clients=2)
    said = "budget-mflops = 1: no network fits"
    monkeypatch.setattr(
        "tests.strategies.federation.Hello",
        lambda n, *rest: Hello(n, *rest, refusal=said if n == "client-01" else ""),
    )
    with pytest.raises(RuntimeError, match=f"^client-01: {said}$"):
        run.run(rounds=1)


def test_a_device_too_small_that_appears_later_is_left_out_and_the_run_goes_on():
    run = Federation("fedavg", clients=2, keeps={"client-01": 0.25}, keep=0.5)
    one = replace(run.server.federation, clients=1, min_replies=1)
    run.server.federation = run.server.exchange.federation = one
    late = run.grid.contexts.popitem()
    seen = run.server.on_round
    run.server.on_round = lambda round: (seen(round), run.grid.contexts.update([late]))
    run.run(rounds=2)
    assert [list(round.jobs) for round in run.rounds] == [[], ["client-00"], ["client-00"]]
    assert "fedavg.keep=0.25" in run.server.exchange.refused["client-01"]


def test_an_introduction_arrives_as_it_was_sent_and_nonsense_does_not():
    hello = Hello("a", {"x": 3}, 0.5, trained=2, speed=1e9, refusal="too small")
    assert decode_hellos(encode_hellos([hello]), 1) == [hello]
    for bad in ({"trained": 0}, {"speed": -1.0}, {"keep": 1.5}, {"refusal": 3}, {"width": 1}):
        fields = {"client": "a", "domains": {"x": 3}} | bad
        with pytest.raises((TypeError, ValueError)):
            read_hello(json.dumps(fields))


# FEDFIP ------------------------------------------------------------------------------------------


def test_nested_takes_the_best_of_the_mask_and_the_leading_ones_of_equals(mixed):
    channels = mixed.channels
    importance = torch.rand(channels.size)
    importance[::5] = torch.nan
    mask = torch.rand(channels.size).numpy() < 0.6
    most = dict.fromkeys(channels.groups, 3)
    chosen, start = nested(importance, mask, channels, most), 0
    for width in channels.groups.values():
        inside = [j for j in range(start, start + width) if mask[j]]
        rank = sorted(inside, key=lambda j: (-importance[j].nan_to_num(-1.0).item(), j))
        assert sorted(rank[:3]) == [j for j in range(start, start + width) if chosen[j]]
        start += width
    assert (nested(importance, mask, channels, channels.groups) == mask).all()
    leading = nested(None, np.ones_like(mask), channels, most)
    assert (leading == channels.mask({g: np.arange(3) for g in channels.groups})).all()


def test_no_device_gets_more_than_it_carries(mixed):
    channels = mixed.channels
    for round in mixed.rounds[1:]:
        _, mask = mixed.before[round.number]
        for client, keep in KEEPS.items():
            job, most = round.jobs[client], channels.prefix(keep)
            mine = channels.mask(job.kept)
            assert not (mine & ~mask).any(), "not within the mask"
            for group, index in job.kept.items():
                inside = channels.kept(mask)[group]
                assert len(index) == min(len(inside), len(most[group]))
            if keep < 1:
                assert job.sent is job.kept
                assert not job.extras["refresh"]


def test_only_who_carries_the_whole_mask_has_signatures_prototypes_and_refreshes(mixed):
    last = mixed.rounds[3]
    for update in last.updates:
        whole = update.client in ("client-02", "client-03")
        assert ("signatures" in update.extras) == whole
        assert ("prototypes" in last.jobs[update.client].extras) == whole
        assert bool(last.jobs[update.client].extras["refresh"]) == whole
        measured = ~update.extras["fisher"].isnan().numpy()
        mine = mixed.channels.mask(last.jobs[update.client].kept)
        assert measured.all() if whole else (measured == mine).all()


def test_before_the_first_mask_a_device_trains_the_leading_channels_and_then_the_best(mixed):
    first, second = (mixed.rounds[i].jobs["client-00"].kept for i in (1, 2))
    assert all((first[g] == index).all() for g, index in mixed.channels.prefix(0.25).items())
    fisher = [(u.extras["fisher"].double(), u.samples) for u in mixed.rounds[1].updates]
    start = 0
    for group, width in mixed.channels.groups.items():
        score = []
        for j in range(start, start + width):
            known = [(f[j].item(), n) for f, n in fisher if not torch.isnan(f[j])]
            score.append(sum(f * n for f, n in known) / sum(n for _, n in known))
        best = sorted(range(width), key=lambda j: (-score[j], j))[: len(second[group])]
        assert sorted(best) == second[group].tolist()
        start += width


def test_an_entry_is_the_mean_over_those_that_hold_it(mixed):
    for number in (1, 2):
        old, mask = mixed.before[number]
        jobs, updates = mixed.rounds[number].jobs, mixed.rounds[number].updates
        new = mixed.before[number + 1][0]
        for name, tensor in new.items():
            if not tensor.is_floating_point():
                continue
            total, weight = torch.zeros_like(tensor), torch.zeros_like(tensor)
            for update in updates:
                held = mixed.channels.mask(jobs[update.client].kept)
                where = naive_shared(mixed.channels, name, tuple(tensor.shape), held)
                total[where] += update.samples * update.state[name].flatten()
                weight[where] += update.samples
            expected = torch.where(weight > 0, total / weight, old[name])
            assert torch.allclose(tensor, expected, atol=1e-6), name
        assert mask.sum() == mixed.channels.size * (1.0 if number == 1 else 0.75)


def test_private_channels_stay_within_what_the_device_carries():
    options = {"keep": 0.5, "phi": 0.0, "react_max": 0.5, "dsr": False, "fisher_refresh": 0}
    run = Federation("fedfip", clients=3, keeps={"client-00": 0.75, "client-01": 0.5}, **options)
    run.run(rounds=3)
    within, none, free = (int(u.costs["private"]) for u in run.rounds[3].updates)
    room = sum(len(i) for i in run.channels.prefix(0.75).values()) - int(run.server.mask.sum())
    assert 0 < within <= room
    assert none == 0
    assert free > 0


def test_a_channel_that_no_device_carries_is_never_in_the_mask():
    run = Federation("fedfip", clients=2, keeps={"client-00": 0.25, "client-01": 0.5}, keep=0.75)
    run.run(rounds=3)
    assert (run.server.mask == run.channels.mask(run.channels.prefix(0.5))).all()


@pytest.mark.parametrize("switch", ["sa", "dsfp"])
def test_the_ablations_run_on_small_devices_too(switch):
    run = Federation("fedfip", keeps=KEEPS, keep=0.75, phi=0.0, react_max=0.5, **{switch: False})
    run.run(rounds=3)
    assert [round.failures for round in run.rounds] == [{}, {}, {}, {}]
    job, update = run.rounds[3].jobs["client-00"], run.rounds[3].updates[0]
    assert all(len(job.kept[g]) == len(i) for g, i in run.channels.prefix(0.25).items())
    assert update.costs["private"] == 0
    if switch == "sa":
        held = unpack_mask(update.extras["held"], run.channels.size)
        assert (held == run.channels.mask(job.kept)).all()


def test_devices_that_carry_everything_change_nothing():
    plain = Federation("fedfip", keep=0.5, fisher_refresh=1)
    stated = Federation(
        "fedfip", keep=0.5, fisher_refresh=1, keeps=dict.fromkeys(plain.halves, 1.0)
    )
    assert equal(plain.run(rounds=2), stated.run(rounds=2))
    assert plain.rounds[2].bytes_down == stated.rounds[2].bytes_down
