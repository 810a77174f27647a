import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from strategies import FederationOptions
from strategies.ops.average import average_overlap, weighted_mean
from strategies.ops.rows import norm_tensors
from strategies.ops.transport import TransportOptions, align
from strategies.subflot import SubFLOTOptions
from task.submodel import extract
from task.train import TrainingOptions
from tests.strategies.federation import Federation

STILL = TrainingOptions(epochs=1, batch_size=8, lr=1e-12, momentum=0.0, weight_decay=0.0)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a, b, tolerance=1e-5):
    return a.keys() == b.keys() and all(
        torch.allclose(a[k].double(), b[k].double(), atol=tolerance) for k in a
    )


def history(run, client, round):
    saved = run.server.store(client).load(round)
    return {k.removeprefix("state."): v for k, v in saved.items() if k.startswith("state.")}


# OTP ---------------------------------------------------------------------------------------------


def test_the_first_submodel_is_the_leading_channels():
    run = Federation("subflot", clients=6)
    run.run(rounds=1)
    widths = set()
    for job in run.rounds[1].jobs.values():
        rho = float(job.extras["rho"])
        kept = run.channels.prefix(1 - rho)
        assert equal(job.state, extract(run.model.state_dict(), run.channels, kept))
        widths.add(job.state["0.weight"].shape[0])
    assert len(widths) > 1


def test_later_ones_are_the_mean_of_the_aligned_global_network_and_the_history():
    run = Federation("subflot", alpha=0.3)
    run.run(rounds=1)
    before = {k: v.clone() for k, v in run.server.state.items()}
    clients = list(run.server.exchange.clients.values())
    for name, job in run.server.jobs(clients, 2).items():
        last = history(run, name, 2)
        narrow = run.channels.restrict(job.kept)
        aligned = align(before, last, run.channels, narrow, TransportOptions())
        for key, tensor in job.state.items():
            if tensor.is_floating_point():
                naive = 0.3 * aligned[key] + 0.7 * last[key]
                assert torch.allclose(tensor, naive, atol=1e-6), key


def test_alpha_0_is_the_history_and_alpha_1_the_aligned_global_network():
    for alpha in (0.0, 1.0):
        run = Federation("subflot", alpha=alpha)
        run.run(rounds=1)
        for name, job in run.server.jobs(list(run.server.exchange.clients.values()), 2).items():
            last = history(run, name, 2)
            narrow = run.channels.restrict(job.kept)
            aligned = align(run.server.state, last, run.channels, narrow, TransportOptions())
            want = aligned if alpha else last
            floats = {k for k, v in want.items() if v.is_floating_point()}
            assert all(torch.equal(job.state[k], want[k]) for k in floats)


def test_a_stale_history_is_blended_out():
    run = Federation("subflot", alpha=0.5, history_max_age=2)
    assert [run.server._alpha(age) for age in (1, 2, 3, 4, 9)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    assert Federation("subflot", alpha=0.5).server._alpha(99) == 0.5


def test_a_capacity_that_changes_gets_the_history_in_its_new_width():
    run = Federation("subflot", rate_mode="dynamic")
    run.run(rounds=6)
    widths = [r.jobs["client-00"].state["0.weight"].shape[0] for r in run.rounds[1:]]
    assert len(set(widths)) > 1
    assert not any(r.failures for r in run.rounds)


def test_a_device_states_its_own_capacity():
    keeps = {f"client-{i:02d}": keep for i, keep in enumerate((0.25, 0.3, 0.5, 1.0))}
    run = Federation("subflot", keeps=keeps)
    run.run(rounds=1)
    for client, keep in keeps.items():
        job = run.rounds[1].jobs[client]
        assert float(job.extras["rho"]) == pytest.approx(1 - keep)
        assert all(len(job.kept[g]) == len(i) for g, i in run.channels.prefix(keep).items())


def test_capacities_are_drawn_once_from_the_rates_by_the_seed():
    def drawn(seed):
        run = Federation("subflot", clients=8, seed=seed, rates="0.25, 0.75")
        run.run(rounds=2)
        first, second = (
            {c: float(j.extras["rho"]) for c, j in r.jobs.items()} for r in run.rounds[1:]
        )
        assert first == second
        assert set(first.values()) == {0.25, 0.75}
        return first

    assert drawn(1) == drawn(1) != drawn(2)


# SAR ---------------------------------------------------------------------------------------------


def test_the_pull_keeps_the_client_nearer_to_what_it_was_sent():
    """Distance is that of weights and biases to the anchor, after one local epoch."""
    options = TrainingOptions(
        epochs=1, batch_size=10, lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0
    )

    def trained(lambda_sar):
        run = Federation("subflot", clients=1, rates="0.5", lambda_sar=lambda_sar, training=options)
        run.run(rounds=1)
        update = run.rounds[1].updates[0]
        return run.rounds[1].jobs["client-00"].state, update.state

    anchor, plain = trained(0.0)
    _, pulled = trained(0.4)
    assert not equal(plain, pulled)

    def distance(state):
        weights = (k for k in state if k.endswith(("weight", "bias")))
        return sum(float((state[k] - anchor[k]).pow(2).sum()) for k in weights)

    assert distance(pulled) < distance(plain)


def test_the_pull_is_the_exact_gradient():
    run = Federation("subflot", clients=1, rates="0.25", lambda_sar=0.7)
    half, seen = run.halves["client-00"], {}

    def fit(model, job, penalty=None):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)

        class step:
            pass

        step.model = model
        penalty(step).backward()
        seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
        return original(model, job)

    original, half.fit = half.fit, fit
    run.run(rounds=1)
    for name, grad in seen.items():
        assert torch.allclose(grad, torch.full_like(grad, 2 * 0.7 * 0.25 * 0.1), rtol=1e-4), name


@pytest.mark.parametrize("options", [{"sar": False}, {"lambda_sar": 0.0}])
def test_without_strength_there_is_no_pull(options):
    base = Federation("subflot", rates="0.5", lambda_sar=1.0).run(rounds=2)
    off = Federation("subflot", rates="0.5", **options).run(rounds=2)
    assert not equal(base, off)
    assert equal(off, Federation("subflot", rates="0.5", sar=False).run(rounds=2))


def test_a_dense_client_is_not_pulled():
    pulled = Federation("subflot", rates="0.0", lambda_sar=5.0).run(rounds=2)
    assert equal(pulled, Federation("subflot", rates="0.0", sar=False).run(rounds=2))


# OTA ---------------------------------------------------------------------------------------------


def test_the_new_network_is_the_mean_of_the_aligned_uploads():
    run = Federation("subflot")
    state = run.run(rounds=1)
    updates, before = run.rounds[1].updates, run.model.state_dict()
    aligned = []
    for update in updates:
        narrow = run.channels.restrict(run.rounds[1].jobs[update.client].kept)
        aligned.append(align(update.state, before, narrow, run.channels, TransportOptions()))
    assert close(state, weighted_mean(aligned, [u.samples for u in updates]), 1e-6)


def test_permuting_the_channels_of_an_upload_changes_nothing():
    run = Federation("subflot", rates="0.5")
    run.run(rounds=1)
    updates = run.rounds[1].updates
    first = updates[0].state
    order = torch.tensor([3, 1, 0, 2])
    shuffled = dict(first)
    for name in ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        shuffled[name] = first[name][order]
    shuffled["3.weight"] = first["3.weight"][:, order]
    other = Federation("subflot", rates="0.5")
    other.run(rounds=1)
    results = []
    for state in (first, shuffled):
        other.server.state = {k: v.clone() for k, v in other.model.state_dict().items()}
        other.server.merge(1, [replaced(updates[0], state), *updates[1:]])
        results.append(other.server.state)
    assert close(*results, 1e-6)


def replaced(update, state):
    from dataclasses import replace

    return replace(update, state=state)


def test_one_dense_client_that_does_not_move_leaves_the_network_as_it_is():
    federation = FederationOptions(clients=1, min_replies=1, wait=1.0)
    run = Federation("subflot", clients=1, rates="0.0", federation=federation, training=STILL)
    state, before = run.run(rounds=2), run.model.state_dict()
    weights = [n for n in before if n.endswith(("weight", "bias"))]
    assert all(torch.allclose(state[n], before[n], atol=1e-6) for n in weights)


def test_with_equal_widths_and_small_steps_it_is_fedavg():
    options = TrainingOptions(epochs=1, batch_size=26, lr=1e-3, momentum=0.0, weight_decay=0.0)
    flot = Federation("subflot", rates="0.0", alpha=1.0, lambda_sar=0.0, training=options)
    assert close(flot.run(rounds=2), Federation("fedavg", training=options).run(rounds=2))


def test_without_transport_it_is_the_average_by_position():
    off = {"otp": False, "ota": False, "sar": False}
    dense = Federation("subflot", rates="0.0", **off)
    assert close(dense.run(rounds=3), Federation("fedavg").run(rounds=3))
    run = Federation("subflot", **off)
    before, state = run.model.state_dict(), run.run(rounds=1)
    updates = run.rounds[1].updates
    subs = [(u.state, run.rounds[1].jobs[u.client].kept) for u in updates]
    assert equal(state, average_overlap(before, run.channels, subs, [u.samples for u in updates]))


def test_reusing_the_plan_of_the_extraction_solves_none_for_the_average(monkeypatch):
    import strategies.subflot as module

    def calls(**options):
        counted = []

        def counting(*args):
            counted.append(1)
            return align(*args)

        monkeypatch.setattr(module, "align", counting)
        state = Federation("subflot", rates="0.5, 0.75", **options).run(rounds=3)
        assert all(torch.isfinite(t).all() for t in state.values())
        return len(counted)

    assert calls(ota_plan="solve") == 3 * 4
    assert calls(ota_plan="reuse") == 4  # the first round has no extraction


def test_ota_keep_mixes_the_old_network_in():
    fresh, mixed = (Federation("subflot", ota_keep=k) for k in (0.0, 0.75))
    before = fresh.model.state_dict()
    a, b = fresh.run(rounds=1), mixed.run(rounds=1)
    for name, tensor in before.items():
        if tensor.is_floating_point():
            assert torch.allclose(b[name], 0.75 * tensor + 0.25 * a[name], atol=1e-6), name


def test_narrow_clients_write_duplicates_and_the_run_says_so():
    run = Federation("subflot", rates="0.75")
    run.run(rounds=1)
    rows = run.rounds[1].diagnostics["distinct_rows"]
    dense = Federation("subflot", rates="0.0")
    dense.run(rounds=1)
    assert list(dense.rounds[1].diagnostics["distinct_rows"].values()) == [8, 12]
    assert all(r <= w for r, w in zip(rows.values(), (8, 12), strict=True))


# Histories, BatchNorm, bytes ---------------------------------------------------------------------


def test_histories_are_what_the_clients_uploaded():
    run = Federation("subflot")
    run.run(rounds=2)
    for update in run.rounds[2].updates:
        assert equal(history(run, update.client, 3), update.state)
    half = Federation("subflot", history_dtype="fp16")
    half.run(rounds=1)
    stored = history(half, "client-00", 2)
    assert stored["0.weight"].dtype == torch.float16
    assert stored["1.num_batches_tracked"].dtype == torch.int64


def test_a_client_that_was_away_gets_its_own_history():
    federation = FederationOptions(fraction=0.5, wait=1.0)
    run = Federation("subflot", clients=6, federation=federation, alpha=0.0)
    run.run(rounds=6)
    last = {}
    for r in run.rounds[1:]:
        for name, job in r.jobs.items():
            if name in last:
                floats = [k for k, v in job.state.items() if v.is_floating_point()]
                assert all(torch.equal(job.state[k], last[name][k]) for k in floats)
        last |= {u.client: u.state for u in r.updates}
    assert len(last) == 6


def test_local_batch_norm_never_leaves_the_client_and_comes_back_to_it():
    run = Federation("subflot", rates="0.5", bn_local=True)
    run.run(rounds=3)
    norms = norm_tensors(run.channels)
    assert norms == {n for n in run.model.state_dict() if n.startswith(("1.", "4."))}
    for update in run.rounds[3].updates:
        assert not norms & update.state.keys()
    before = run.model.state_dict()
    assert all(torch.equal(run.server.state[n], before[n]) for n in norms)
    half, job = run.halves["client-00"], run.rounds[3].jobs["client-00"]
    own = half.me.memory.load(3)
    assert set(own) == norms
    assert all(torch.equal(half._own_norms(job)[n], own[n]) for n in norms)


def test_statistics_are_made_anew_before_a_network_is_scored_untrained():
    federation = FederationOptions(evaluate_on="clients", wait=1.0)
    run = Federation("subflot", federation=federation)
    half = run.halves["client-00"]
    run.run(rounds=1)
    job = run.rounds[1].jobs["client-00"]
    broken = dict(job.state) | {"1.running_var": job.state["1.running_var"] * 1e4}
    from dataclasses import replace

    scores = [half.evaluate(replace(job, state=state)) for state in (job.state, broken)]
    assert torch.equal(scores[0].correct, scores[1].correct)


def test_bytes_fall_with_the_fraction_removed():
    sizes = []
    for rate in ("0.0", "0.25", "0.5", "0.75"):
        run = Federation("subflot", rates=rate)
        run.run(rounds=2)
        sizes.append(sum(run.rounds[2].bytes_up.values()))
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_variances_stay_positive():
    run = Federation("subflot", solver="emd")
    state = run.run(rounds=3)
    assert all((t > 0).all() for n, t in state.items() if n.endswith("running_var"))


@pytest.mark.parametrize("rates", ["", "a", "0.5, 1.0", "-0.1", "0.5;0.6"])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="rates"):
        SubFLOTOptions(rates=rates)


def test_defaults_are_those_of_the_paper():
    options = SubFLOTOptions()
    assert options.removed() == [0.0, 0.25, 0.5, 0.75]
    assert options.alpha == 0.5
    assert np.mean([(1 - r) ** 2 for r in options.removed()]) == pytest.approx(0.469, abs=1e-3)


def test_the_default_pull_is_as_strong_over_a_round_as_the_papers():
    # Of the way back to the anchor at rho = 3/4: 1 - (1 - 2 lambda rho lr)^steps. The paper: SGD
    # 0.001, 5 epochs of 2,500 CIFAR images in batches of 256; here 300 digits a client.
    ours = TrainingOptions()
    rate, steps = ours.lr / (1 - ours.momentum), ours.epochs * 300 // ours.batch_size
    pulled = 1 - (1 - 2 * SubFLOTOptions().lambda_sar * 0.75 * rate) ** steps
    papers = 1 - (1 - 2 * 1.0 * 0.75 * 0.001) ** (5 * 10)
    assert papers / 2 < pulled < 2 * papers


# Importance --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"importance": "cost"}, {"importance": "marginals", "solver": "emd"}]
)
def test_importance_is_measured_by_clients_and_handed_on_along_the_plans(options):
    plain, run = Federation("subflot"), Federation("subflot", **options)
    for each in (plain, run):
        each.run(rounds=2)
    updates = run.rounds[2].updates
    for update in updates:
        job = run.rounds[2].jobs[update.client]
        assert update.extras["fisher"].shape == (sum(len(k) for k in job.kept.values()),)
    weights = torch.tensor([float(u.samples) for u in updates])
    handed = torch.stack([u.extras["fisher"].sum() for u in updates])
    total = (weights * handed).sum() / weights.sum()
    assert run.server.importance.shape == (run.channels.size,)
    assert torch.isclose(run.server.importance.sum(), total)
    assert not close(run.server.state, plain.server.state, 1e-7)


def test_importance_survives_in_the_memory_of_the_server():
    run = Federation("subflot", importance="cost")
    run.run(rounds=1)
    kept, run.server.importance = run.server.memory(), None
    run.server.recall(kept)
    assert torch.equal(run.server.importance, kept["importance"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": "marginals"}, "hard maps"),
        ({"importance": "cost", "ota": False}, "ota = true"),
        ({"reg": 0.0}, "reg"),
    ],
)
def test_options_that_cannot_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SubFLOTOptions(**options)


def test_a_fisher_vector_of_another_length_costs_its_client_alone():
    def shorter(content):
        fisher = content.array_records["extras"].to_torch_state_dict()["fisher"]
        content["extras"] = ArrayRecord({"fisher": fisher[:-1]})
        return content

    run = Federation("subflot", importance="cost", tamper={"client-00": shorter})
    run.run(rounds=1)
    assert "fisher: shape" in run.rounds[1].failures["client-00"]
    assert len(run.rounds[1].updates) == len(run.rounds[1].jobs) - 1


def test_weights_that_have_exploded_cost_their_client_alone():
    def exploded(content):
        state = content.array_records["state"].to_torch_state_dict()
        state["3.weight"] *= 1e15
        content["state"] = ArrayRecord(state)
        return content

    run = Federation("subflot", tamper={"client-01": exploded})
    run.run(rounds=1)
    assert "3.weight: values beyond" in run.rounds[1].failures["client-01"]
    assert all(t.isfinite().all() for t in run.server.state.values())
