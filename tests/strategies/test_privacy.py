import json
import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

from strategies import FederationOptions, PrivacyOptions
from strategies.ops.gaussian import epsilon
from strategies.privacy import CHANGE_SHARE, Ledger, release
from strategies.records import Update
from task.channels import Kept
from task.submodel import extract
from tests.strategies.federation import DOMAINS, Federation

Z = 0.01
SEEDED = PrivacyOptions(noise_multiplier=Z, clip=0.5, noise="seeded")
PRUNED = {"keep": 0.5, "react_max": 0.25, "phi": 0.0}


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k].nan_to_num(nan=-1.0), b[k].nan_to_num(nan=-1.0)) for k in a
    )


def updates(run, round=1):
    return run.rounds[round].updates


# The mechanism ----------------------------------------------------------------------------------

ANCHOR = {
    "w": torch.linspace(-1, 1, 60_000).view(200, 300),
    "norm.running_var": torch.ones(200),
    "norm.num_batches_tracked": torch.tensor(7),
}


def answer(change=3.0):
    state = {n: t + change for n, t in ANCHOR.items()}
    return Update("client-00", 1, state, samples=3, steps=1, loss=0.0)


def released(options, vectors=None, seed=1, change=3.0):
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    return release(answer(change), ANCHOR, vectors or {}, options, draw)


def flat(update):
    return torch.cat(
        [(update.state[n].double() - ANCHOR[n]).flatten() for n in ("w", "norm.running_var")]
    )


def test_without_noise_the_change_of_all_tensors_together_is_at_the_bound():
    tiny = PrivacyOptions(noise_multiplier=1e-12, clip=2.0)
    change = flat(released(tiny))
    assert float(change.norm()) == pytest.approx(2.0, rel=1e-4)
    assert torch.allclose(change, change[0].expand_as(change), atol=1e-6)
    small = flat(released(tiny, change=1e-3))
    assert torch.allclose(small, torch.full_like(small, 1e-3), atol=1e-6)


@pytest.mark.parametrize(
    ("vectors", "share"),
    [({}, 1.0), ({"a": torch.ones(20_000)}, CHANGE_SHARE)],
    ids=["network alone", "with a vector"],
)
def test_noise_has_the_standard_deviation_of_the_formula(vectors, share):
    options = PrivacyOptions(noise_multiplier=0.5, clip=4.0)
    update = released(options, vectors, seed=5)
    centre = 4.0 / math.sqrt(60_200)
    noise = flat(update) - centre
    assert float(noise.std()) == pytest.approx(0.5 * 4.0 / math.sqrt(share), rel=0.02)
    assert abs(float(noise.mean())) < 0.06
    for vector in update.extras.values():
        noise = vector.double() - 1 / math.sqrt(len(vector))
        assert float(noise.std()) == pytest.approx(0.5 / math.sqrt(1 - share), rel=0.03)


def test_the_parts_of_an_update_spend_one_budget():
    """sum_p (C_p / sigma_p)^2 = 1 / z^2, measured."""
    options = PrivacyOptions(noise_multiplier=0.3, clip=0.1)
    vectors = {"a": torch.zeros(30_000), "b": torch.zeros(30_000)}
    update = released(options, vectors, change=0.0, seed=9)
    spent = (0.1 / float(flat(update).std())) ** 2
    spent += sum((1 / float(v.double().std())) ** 2 for v in update.extras.values())
    assert spent == pytest.approx(1 / 0.3**2, rel=0.03)


def test_counters_go_back_as_they_came_and_what_is_not_sent_stays_nan():
    vector = torch.tensor([3.0, torch.nan, 4.0])
    update = released(PrivacyOptions(noise_multiplier=1e-9), {"fisher": vector})
    assert update.state["norm.num_batches_tracked"] == 7
    assert update.extras["fisher"][[0, 2]].tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
    assert update.extras["fisher"].isnan().tolist() == [False, True, False]


def test_a_client_whose_training_diverged_sends_noise_alone():
    update = released(SEEDED, {"a": torch.tensor([math.inf, 1.0])}, change=math.nan)
    calm = released(SEEDED, {"a": torch.zeros(2)}, change=0.0)
    assert equal(update.state, calm.state)
    assert equal(update.extras, calm.extras)


def test_secret_noise_differs_every_time_and_seeded_noise_does_not():
    assert not equal(released(SEEDED, seed=None).state, released(SEEDED, seed=None).state)
    assert equal(released(SEEDED, seed=3).state, released(SEEDED, seed=3).state)


# A federation -----------------------------------------------------------------------------------


def test_without_noise_nothing_changes():
    for method, options in (("fedavg", {}), ("fedfip", PRUNED)):
        off = PrivacyOptions(noise_multiplier=0.0, clip=1e-3)
        plain, switched = Federation(method, **options), Federation(method, privacy=off, **options)
        assert equal(plain.run(2), switched.run(2))
        for a, b in zip(updates(plain, 2), updates(switched, 2), strict=True):
            assert equal(a.extras, b.extras)
            assert (a.loss, a.samples, a.steps) == (b.loss, b.samples, b.steps)
        assert "loss" in plain.result.train_metrics_clientapp[1]


@pytest.mark.parametrize(("method", "options"), [("fedavg", {}), ("fedfip", PRUNED)])
def test_what_a_client_sends_beside_the_noised_parts_is_the_same_for_all(method, options):
    run = Federation(method, privacy=SEEDED, **options)
    run.run(rounds=2)
    for round in run.rounds[1:]:
        assert round.merged
        assert not round.failures
        for update in round.updates:
            assert (update.samples, update.steps, update.loss) == (DOMAINS, 1, 0.0)
            assert update.scores is None
            assert set(update.costs) == {"parameters"}
        assert len({u.costs["parameters"] for u in round.updates}) == 1
        shapes = [
            {k: (t.shape, t.isnan().sum()) for k, t in u.extras.items()} for u in round.updates
        ]
        assert all(s == shapes[0] for s in shapes)
        assert set(shapes[0]) == ({"fisher", "signatures"} if method == "fedfip" else set())
    assert "loss" not in run.result.train_metrics_clientapp[1]
    assert all(t.isfinite().all() for t in run.server.state.values())


def test_training_leaves_only_a_bounded_change():
    """At a noise that is lost in rounding, the upload is the plain one with its change clipped."""
    whisper = PrivacyOptions(noise_multiplier=1e-9, clip=0.2, noise="seeded")
    quiet, plain = Federation("fedavg", privacy=whisper), Federation("fedavg")
    start = {n: t.clone() for n, t in quiet.model.state_dict().items()}
    quiet.run(1)
    plain.run(1)
    for a, b in zip(updates(quiet), updates(plain), strict=True):
        floats = [n for n, t in start.items() if t.is_floating_point()]
        sent, trained = (
            torch.cat([(u.state[n].double() - start[n]).flatten() for n in floats]) for u in (a, b)
        )
        assert trained.norm() > 0.2
        torch.testing.assert_close(sent, trained * 0.2 / trained.norm(), rtol=0, atol=1e-6)


def test_the_mean_is_over_clients_not_over_samples():
    run = Federation("fedavg", privacy=SEEDED)
    state = run.run(1)
    for name in ("0.weight", "7.bias"):
        mean = torch.stack([u.state[name] for u in updates(run)]).mean(0)
        torch.testing.assert_close(state[name], mean)


def test_fisher_and_signatures_are_summed_before_anything_that_is_not_linear():
    run = Federation("fedfip", privacy=SEEDED, keep=0.5)
    run.run(1)
    fisher = torch.stack([u.extras["fisher"].double() for u in updates(run)]).mean(0).clamp_min(0)
    torch.testing.assert_close(run.server.importance, fisher.float())
    assert any((u.extras["fisher"] < 0).any() for u in updates(run))
    rows = torch.stack([u.extras["signatures"] for u in updates(run)]).sum(0).clamp_min(0)
    mask = torch.from_numpy(run.server.mask)
    for k, prototype in run.server.prototypes.items():
        expected = rows[k] * mask
        torch.testing.assert_close(prototype, expected / expected.sum(), rtol=1e-4, atol=1e-6)


def test_little_noise_finds_the_mask_and_the_prototypes_of_none():
    whisper = PrivacyOptions(noise_multiplier=1e-6, clip=1e3, noise="seeded")
    quiet, plain = Federation("fedfip", privacy=whisper, keep=0.5), Federation("fedfip", keep=0.5)
    quiet.run(1)
    plain.run(1)
    assert (quiet.server.mask == plain.server.mask).mean() > 0.8
    for k, prototype in plain.server.prototypes.items():
        cosine = torch.nn.functional.cosine_similarity(prototype, quiet.server.prototypes[k], dim=0)
        assert cosine > 0.95


def test_noise_of_variances_cannot_make_them_negative():
    loud = PrivacyOptions(noise_multiplier=5.0, noise="seeded")
    run = Federation("fedavg", privacy=loud)
    state = run.run(2)
    low = min(float(u.state["1.running_var"].min()) for u in updates(run))
    assert low < 0
    assert all((t > 0).all() for n, t in state.items() if n.endswith("running_var"))


def test_noise_belongs_to_seed_client_and_round():
    first, again, other = (Federation("fedavg", seed=s, privacy=SEEDED) for s in (1, 1, 2))
    runs = [f.run(1) for f in (first, again, other)]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])
    noises = {
        tuple(first.halves[c].me.generator("dp noise", r).get_state().tolist())
        for c in first.halves
        for r in (1, 2)
    }
    assert len(noises) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t[:, 1:],
        lambda t: t.double(),
        lambda t: t * math.nan,
        lambda t: t[1:],
    ],
    ids=["channels", "type", "nan", "domains"],
)
def test_noised_signatures_that_do_not_fit_are_refused(wrong):
    def tamper(content):
        extras = content.array_records["extras"].to_torch_state_dict()
        extras["signatures"] = wrong(extras["signatures"])
        return RecordDict({**dict(content), "extras": ArrayRecord(extras)})

    run = Federation("fedfip", privacy=SEEDED, tamper={"client-01": tamper})
    run.run(1)
    assert "signatures" in run.rounds[1].failures["client-01"]
    assert len(updates(run)) == 3


def test_a_client_without_privacy_is_refused_by_a_server_with_it():
    run = Federation("fedfip", privacy=SEEDED)
    run.halves["client-01"] = Federation("fedfip").halves["client-01"]
    run.run(1)
    assert "privacy.noise-multiplier" in run.rounds[1].failures["client-01"]


# What it costs ----------------------------------------------------------------------------------


def test_the_ledger_follows_the_client_that_was_in_most_rounds():
    ledger = Ledger(PrivacyOptions(noise_multiplier=0.5, delta=1e-4))
    assert ledger.spent() == {"epsilon": 0.0, "epsilon_server": 0.0, "delta": 1e-4}
    for merged in (["a", "b"], ["a"], ["a", "c", "d"]):
        ledger.ask(["a", "b", "c"])
        ledger.merge(merged, len(merged))
    spent = ledger.spent()
    assert spent["epsilon"] == epsilon(math.sqrt(1 / 2 + 1 + 1 / 3) / 0.5, 1e-4)
    assert spent["epsilon_server"] == epsilon(2 * math.sqrt(3) / 0.5, 1e-4)
    assert ledger.planned(8, 20)["epsilon"] == epsilon(math.sqrt(8 / 20) / 0.5, 1e-4)


@pytest.mark.parametrize(("noise", "again"), [("secret", 1), ("seeded", 0)])
def test_a_ledger_that_is_taken_up_counts_the_round_that_is_done_again(noise, again):
    options = PrivacyOptions(noise_multiplier=0.5, noise=noise)
    before, after = Ledger(options), Ledger(options)
    before.ask(["a", "b"])
    before.merge(["a"], 3)
    after.recall(json.loads(json.dumps(before.saved())))
    assert after.asked == {"a": 1 + again, "b": 1 + again}
    assert after.spent()["epsilon"] == before.spent()["epsilon"]


def test_rounds_are_entered_as_they_happen():
    federation = FederationOptions(clients=4, fraction=0.5, wait=1.0)
    run = Federation("fedavg", privacy=SEEDED, federation=federation)
    run.run(4)
    rounds, ledger = run.rounds[1:], run.server.ledger
    for client in run.halves:
        assert ledger.asked.get(client, 0) == sum(client in r.jobs for r in rounds)
        assert ledger.merged.get(client, 0) == pytest.approx(
            sum(client in r.jobs for r in rounds) / 2
        )


def test_a_reply_that_is_not_merged_was_seen_by_the_server_all_the_same():
    run = Federation("fedavg", privacy=SEEDED, tamper={"client-01": RuntimeError("gone")})
    run.run(2)
    assert run.server.ledger.asked == dict.fromkeys(run.halves, 2)
    assert "client-01" not in run.server.ledger.merged
    assert run.server.ledger.merged["client-00"] == pytest.approx(2 / 3)


def test_entries_that_fewer_clients_hold_have_less_noise_and_cost_more():
    run = Federation("fedavg", privacy=SEEDED)
    narrow: Kept = {group: index[:2] for group, index in run.channels.full().items()}
    server = run.server
    server.uploaded = lambda job, update: (
        narrow if update.client == "client-02" else run.channels.full()
    )
    server.merge = lambda round, updates: {}
    for u in ("client-02",):
        run.tamper[u] = lambda content: RecordDict(
            {
                **dict(content),
                "state": ArrayRecord(
                    extract(
                        content.array_records["state"].to_torch_state_dict(), run.channels, narrow
                    )
                ),
            }
        )
    run.run(1)
    assert not run.rounds[1].failures
    assert server.ledger.merged == dict.fromkeys(run.halves, pytest.approx(1 / 3))


def test_fisher_that_fewer_clients_measured_has_less_noise_and_costs_more():
    # Both devices hold the mask; in round 3 the whole one alone measures what lies outside it.
    run = Federation("fedfip", 2, privacy=SEEDED, keeps={"client-00": 0.75}, **PRUNED)
    run.server.options = replace(run.server.options, fisher_refresh=1)
    run.run(3)
    dense = [bool(round.diagnostics["refresh"]) for round in run.rounds[1:]]
    assert dense == [False, True, True]
    # In round 1 the widest entries are the whole device's alone.
    assert run.server.ledger.merged == {f"client-0{i}": 1 + 1 + 1 for i in range(2)}


def carrying(name, *shape):
    """Return what puts another vector into a reply."""

    def tamper(content):
        extras = content.array_records["extras"].to_torch_state_dict()
        own = {"extras": ArrayRecord(extras | {name: torch.zeros(shape)})}
        return RecordDict({**dict(content), **own})

    return tamper


def test_vectors_that_nobody_asked_for_do_not_end_the_run():
    tampered = {"client-00": carrying("x", 3), "client-01": carrying("x", 4)}
    run = Federation("fedavg", 3, privacy=SEEDED, tamper=tampered)
    run.run(1)
    assert run.server.ledger.merged == dict.fromkeys(run.halves, pytest.approx(1 / 3))
    keeps, lie = {"client-00": 0.25}, {"client-00": carrying("signatures", 2, 2)}
    run = Federation("fedfip", 3, privacy=SEEDED, keeps=keeps, tamper=lie, **PRUNED)
    run.run(1)
    assert "a narrow client sends none" in run.rounds[1].failures["client-00"]


def test_a_narrow_client_has_the_noise_of_the_others():
    keeps = {"client-00": 0.25, "client-01": 1.0}
    run = Federation("fedfip", 2, privacy=SEEDED, keeps=keeps, **PRUNED)
    run.run(1)
    vectors = {u.client: u.extras for u in updates(run)}
    # As many parts, so each with as large a share, though one of them is empty.
    assert vectors["client-00"].keys() == vectors["client-01"].keys() == {"fisher", "signatures"}
    assert vectors["client-00"]["signatures"].numel() == 0
    assert vectors["client-01"]["signatures"].numel() > 0
