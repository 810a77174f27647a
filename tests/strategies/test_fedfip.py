import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from strategies import FederationOptions
from strategies.fedfip import FedFIPOptions
from task.submodel import extract
from tests.strategies.federation import DOMAINS, Federation

OFF = {"dsfp": False, "dsr": False, "sa": False}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def naive_shared(channels, name, shape, mask):
    """Return, entry by entry, whether every channel end of it is in the mask."""
    groups, offset = list(channels.groups), {}
    for g in groups:
        offset[g] = sum(channels.groups[h] for h in groups[: groups.index(g)])
    shared = np.ones(shape, dtype=bool)
    for entry in np.ndindex(*shape):
        for axis, position in zip(channels.axes[name], entry, strict=True):
            if axis is not None and axis.group[position] >= 0:
                g = groups[axis.group[position]]
                shared[entry] &= mask[offset[g] + axis.channel[position]]
    return torch.from_numpy(shared)


# Against FedAvg ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 1.0, "lambda_con": 0.0, "phi": math.inf},
        {"keep": 1.0, "lambda_con": 0.0},
        {"keep": 1.0, "lambda_con": 0.5, "dsr_grad": "none"},
        {"keep": 1.0, "lambda_con": 0.0, "fisher": "weight", "scope": "global"},
        {"keep": 1.0, "lambda_con": 0.0, "sa": False},
        {"keep": 1.0, "lambda_con": 0.0, "prune_residual": False, "mask_every": 2},
        OFF,
    ],
    ids=str,
)
def test_without_pruning_and_regularisation_it_is_fedavg_bit_for_bit(options):
    fip, avg = Federation("fedfip", **options), Federation("fedavg")
    assert equal(fip.run(rounds=3), avg.run(rounds=3))
    assert [u.loss for u in fip.rounds[3].updates] == [u.loss for u in avg.rounds[3].updates]


@pytest.mark.parametrize(
    "options", [{"keep": 0.5}, {"keep": 1.0, "lambda_con": 1.0, "dsr_every": 1, "dsr_batch": 8}]
)
def test_with_either_of_them_it_is_not(options):
    assert not equal(Federation("fedfip", **options).run(3), Federation("fedavg").run(3))


# The server against a loop ----------------------------------------------------------------------


def test_shared_entries_are_averaged_and_all_others_keep_the_servers_value():
    run = Federation("fedfip", keep=0.5, lambda_con=0.0)
    before = []
    merge = run.server.merge

    def spy(round, updates):
        before.append(({k: v.clone() for k, v in run.server.state.items()}, run.server.mask.copy()))
        return merge(round, updates)

    run.server.merge = spy
    run.run(rounds=3)
    old, mask = before[2]
    assert 0 < mask.sum() < mask.size
    updates, kept = run.rounds[3].updates, run.channels.kept(mask)
    total = sum(u.samples for u in updates)
    for name, tensor in run.server.state.items():
        shared = naive_shared(run.channels, name, tuple(tensor.shape), mask)
        assert torch.equal(tensor[~shared], old[name][~shared]), name
        if tensor.is_floating_point():
            mean = sum(u.samples / total * u.state[name] for u in updates)
            cut = extract({name: tensor}, run.channels, kept)[name]
            assert torch.allclose(cut, mean, atol=1e-6), name
            assert shared.sum() == mean.numel()


def test_the_mask_keeps_the_largest_federated_fisher_of_each_group():
    run = Federation("fedfip", keep=0.5)
    run.run(rounds=1)
    updates = run.rounds[1].updates
    total = sum(u.samples for u in updates)
    fisher = sum(u.samples / total * u.extras["fisher"].double() for u in updates)
    start = 0
    for width in run.channels.groups.values():
        part = fisher[start : start + width].tolist()
        best = sorted(range(width), key=lambda j: (-part[j], j))[: width // 2]
        assert sorted(best) == np.flatnonzero(run.server.mask[start : start + width]).tolist()
        start += width


def test_prototypes_move_by_mu_and_live_on_the_mask():
    run = Federation("fedfip", keep=0.5, mu=0.4, dsfp=False)
    history = []
    run.server.on_round = lambda round: (
        run.rounds.append(round),
        history.append({k: p.clone() for k, p in run.server.prototypes.items()}),
    )
    run.run(rounds=2)
    for k in range(DOMAINS):
        total, weight = torch.zeros(run.channels.size), 0
        for update in run.rounds[2].updates:
            for domain, n, row in zip(
                *(update.extras[x] for x in ("domains", "counts", "signatures")), strict=True
            ):
                if domain == k:
                    total, weight = total + n * row.float() / row.float().sum(), weight + n
        expected = 0.4 * history[1][k] + 0.6 * total / weight
        assert torch.allclose(history[2][k], expected, atol=1e-6)
        assert history[2][k].sum() == pytest.approx(1, abs=1e-5)


def test_prototypes_are_reprojected_when_the_mask_changes():
    run = Federation("fedfip", keep=0.5)
    run.run(rounds=3)
    assert len(run.server.prototypes) == DOMAINS
    for prototype in run.server.prototypes.values():
        assert prototype.sum() == pytest.approx(1, abs=1e-5)
        assert (prototype[torch.from_numpy(~run.server.mask)] == 0).all()


# The client --------------------------------------------------------------------------------------


def test_the_client_trains_a_physically_smaller_network_and_uploads_the_shared_part():
    run = Federation("fedfip", keep=0.5, react_max=0.25, phi=0.0)
    run.run(rounds=2)
    dense = run.rounds[1].updates[0].costs["parameters"]
    for update in run.rounds[2].updates:
        assert update.costs["private"] > 0
        assert update.costs["parameters"] < 0.7 * dense
        assert update.state["0.weight"].shape[0] == 4
        assert update.state["3.weight"].shape[:2] == (6, 4)
        assert update.state["7.weight"].shape[1] == 6 * 9


def test_private_channels_never_reach_the_server():
    """Noise on the client's private entries after training changes nothing at the server."""
    options = {"keep": 0.5, "react_max": 0.25, "phi": 0.0, "dsr": False, "dsfp": True}
    plain, noisy = Federation("fedfip", **options), Federation("fedfip", **options)
    half = noisy.halves["client-01"]
    fit, touched = half.fit, []

    def fit_then_disturb(model, job, penalty=None):
        result = fit(model, job, penalty)
        if job.round == 2:
            private = model[0].weight.shape[0] - len(job.kept[next(iter(job.kept))])
            held = half.me.channels.mask(job.kept)
            touched.append(private)
            reactivated = half._reactivated(half.me.memory.load(2)["fisher"], held)
            own = reactivated[(held | reactivated)][: model[0].weight.shape[0]]
            with torch.no_grad():
                model[0].weight[torch.from_numpy(own)] += 9.0
        return result

    half.fit = fit_then_disturb
    plain.run(rounds=2)
    noisy.run(rounds=2)
    assert touched[0] > 0
    assert not torch.equal(
        *(r.halves["client-01"].me.memory.load(3)["fisher"] for r in (plain, noisy))
    )
    assert equal(*(r.rounds[2].updates[1].state for r in (plain, noisy)))
    assert equal(plain.server.state, noisy.server.state)


def test_private_channels_persist_on_the_client():
    run = Federation("fedfip", keep=0.5, react_max=0.25, phi=0.0, fisher_refresh=0)
    run.run(rounds=4)
    half = run.halves["client-00"]
    job, memory = run.rounds[4].jobs["client-00"], half.me.memory
    mask = run.channels.mask(job.kept)
    before = memory.load(4)
    private = half._reactivated(before["fisher"], mask)
    assert private.any()
    held = run.channels.kept(mask | private)
    name = next(iter(run.channels.groups))
    first = "0.weight"
    rows = np.setdiff1d(held[name], job.kept[name])
    assert len(rows)
    taken = half._take_up(job, before, held)
    assert torch.equal(taken[first][rows], before[f"state.{first}"][rows])
    assert not torch.equal(taken[first][rows], run.server.state[first][rows])
    shared = job.kept[name]
    assert torch.equal(taken[first][shared], job.state[first])


def test_infinite_phi_means_no_private_channels_and_no_memory():
    run = Federation("fedfip", keep=0.5, phi=math.inf)
    run.run(rounds=3)
    assert all(u.costs["private"] == 0 for u in run.rounds[3].updates)
    assert not any(half.me.memory.saved for half in run.halves.values())


def test_larger_phi_means_fewer_private_channels():
    counts = []
    for phi in (0.0, 0.5, 2.0):
        run = Federation("fedfip", keep=0.5, phi=phi, react_max=0.5)
        run.run(rounds=2)
        counts.append(sum(u.costs["private"] for u in run.rounds[2].updates))
    assert counts[0] > counts[1] >= counts[2]


def test_the_fisher_that_is_uploaded_is_that_of_the_pooled_data():
    from strategies.ops.fisher import gate_fisher

    run = Federation("fedfip", keep=0.5)
    run.run(rounds=1)
    half, update = run.halves["client-00"], run.rounds[1].updates[0]
    net = half.me.submodel(run.channels.full(), update.state)
    whole = half.me.train
    merged = type(whole)(whole.x, whole.y, torch.zeros_like(whole.domain))
    expected = gate_fisher(net, run.channels, merged)[0]
    assert torch.allclose(update.extras["fisher"], expected.float(), rtol=1e-4, atol=1e-9)


def test_channels_without_weights_are_not_measured_until_the_refresh():
    run = Federation("fedfip", keep=0.5, phi=math.inf, fisher_refresh=2)
    run.run(rounds=4)
    measured = [
        [int((~u.extras["fisher"].isnan()).sum()) for u in r.updates] for r in run.rounds[1:]
    ]
    assert [set(m) for m in measured] == [{20}, {10}, {20}, {10}]
    assert [r.diagnostics["refresh"] for r in run.rounds[1:]] == [False, False, True, False]
    assert run.rounds[3].bytes_down["client-00"] > 1.5 * run.rounds[2].bytes_down["client-00"]
    assert all(u.extras["fisher"].nan_to_num().min() >= 0 for u in run.rounds[3].updates)


def test_the_refresh_sends_dense_weights_but_trains_and_uploads_the_shared_ones():
    run = Federation("fedfip", keep=0.5, fisher_refresh=1)
    run.run(rounds=2)
    job = run.rounds[2].jobs["client-00"]
    assert job.sent is not job.kept
    assert job.state["0.weight"].shape[0] == 8
    assert run.rounds[2].updates[0].state["0.weight"].shape[0] == 4


def test_mask_every_and_warmup_hold_the_mask_still():
    run = Federation("fedfip", keep=0.5, warmup=2, mask_every=2)
    masks = []
    run.server.on_round = lambda round: (
        run.rounds.append(round),
        masks.append(run.server.mask.copy()),
    )
    run.run(rounds=5)
    assert masks[1].all()
    assert masks[2].sum() == masks[1].size // 2
    assert (masks[3] == masks[2]).all()
    assert [r.diagnostics["jaccard"] for r in run.rounds[1:4:2]] == [1.0, 1.0]
    assert run.rounds[2].diagnostics["jaccard"] == 0.5


# DSR ---------------------------------------------------------------------------------------------


def test_the_contrastive_term_changes_the_weights_unless_it_is_off():
    def final(**options):
        return Federation("fedfip", keep=1.0, dsr_every=1, dsr_batch=8, **options).run(rounds=2)

    base = final(lambda_con=0.0)
    assert equal(base, final(lambda_con=1.0, dsr_grad="none"))
    double, cheap = (final(lambda_con=1.0, dsr_grad=mode) for mode in ("double", "gate-fd"))
    assert not equal(base, double)
    assert not equal(base, cheap)


def test_the_contrastive_term_pulls_domains_apart():
    def similarity(lambda_con):
        run = Federation(
            "fedfip", keep=1.0, dsr_every=1, dsr_batch=8, lambda_con=lambda_con, tau=0.2
        )
        run.run(rounds=6)
        p = [run.server.prototypes[k] for k in range(DOMAINS)]
        return sum(
            torch.cosine_similarity(p[a], p[b], dim=0).item() for a, b in ((0, 1), (0, 2), (1, 2))
        )

    assert similarity(0.3) < similarity(0.0) - 0.02


def test_the_term_is_scaled_to_the_sum_over_domains_and_all_steps():
    run = Federation("fedfip", keep=1.0, dsr_every=3, dsr_batch=8, lambda_con=0.1)
    run.run(rounds=1)
    half = run.halves["client-00"]
    job = run.server.jobs([run.server.exchange.clients["client-00"]], 2)["client-00"]
    contrast = half._contrast(job, run.channels.full())
    assert len(contrast.rows) == len(half.me.train.counts()) == 2
    net = half.me.submodel(job.kept, job.state)

    class step:
        model, number = net, 0

    from strategies.ops import contrastive

    losses = []
    original = contrastive.structural_loss

    def spy(*args, **kwargs):
        losses.append(original(*args, **kwargs))
        return losses[-1]

    import strategies.fedfip as module

    module.structural_loss, kept = spy, module.structural_loss
    try:
        first = contrast(step)
        step.number = 1
        assert contrast(step) is None
    finally:
        module.structural_loss = kept
    assert first.item() == pytest.approx(0.1 * 3 * 2 * losses[0].item(), rel=1e-6)


# SA, bytes, state --------------------------------------------------------------------------------


def test_without_structure_aware_aggregation_private_channels_are_merged_too():
    options = {"keep": 0.5, "react_max": 0.25, "phi": 0.0, "fisher_refresh": 0}
    run = Federation("fedfip", sa=False, **options)
    run.run(rounds=2)
    assert all(u.state["0.weight"].shape[0] == 6 for u in run.rounds[2].updates)
    assert not equal(run.server.state, Federation("fedfip", **options).run(rounds=2))


def test_bytes_grow_with_keep_and_do_not_depend_on_phi():
    def up(**options):
        run = Federation("fedfip", **options)
        run.run(rounds=2)
        return sum(run.rounds[2].bytes_up.values())

    sizes = [up(keep=keep) for keep in (0.25, 0.5, 0.75, 1.0)]
    assert sizes == sorted(set(sizes))
    assert up(keep=0.5, phi=0.0) == up(keep=0.5, phi=math.inf)


def test_bytes_at_full_width_are_those_of_fedavg_plus_fisher_and_signatures():
    fip, avg = Federation("fedfip", keep=1.0), Federation("fedavg")
    fip.run(rounds=1)
    avg.run(rounds=1)
    channels = fip.channels.size
    more = fip.rounds[1].bytes_up["client-00"] - avg.rounds[1].bytes_up["client-00"]
    arrays = 4 * channels + 2 * 2 * channels + 2 * 2 * 8  # fisher, two signatures, ids and counts
    assert arrays < more < arrays + 4 * 200  # and the headers of four arrays


def test_partial_participation_keeps_masks_and_prototypes():
    federation = FederationOptions(fraction=0.5, wait=1.0)
    run = Federation("fedfip", keep=0.5, clients=6, federation=federation)
    run.run(rounds=5)
    assert all(len(r.updates) == 3 for r in run.rounds[1:])
    assert run.server.mask.sum() == run.channels.size // 2


def test_a_prototype_whose_domain_nobody_brought_stays_on_its_course():
    run = Federation("fedfip", dsfp=False)
    run.run(rounds=1)
    before = {k: p.clone() for k, p in run.server.prototypes.items()}
    update = run.rounds[1].updates[0]  # of client 0: domains 0 and 1
    run.server.merge(2, [update])
    assert torch.equal(run.server.prototypes[2], before[2])
    assert not torch.equal(run.server.prototypes[0], before[0])


def test_memory_and_recall_are_inverse():
    run, fresh = Federation("fedfip", keep=0.5), Federation("fedfip", keep=0.5)
    run.run(rounds=2)
    fresh.server.recall(run.server.memory())
    assert (fresh.server.mask == run.server.mask).all()
    assert (fresh.server.trained_mask == run.server.trained_mask).all()
    assert torch.equal(fresh.server.importance, run.server.importance)
    assert equal(fresh.server.prototypes, run.server.prototypes)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("fisher", torch.ones(3), "fisher: shape"),
        ("fisher", -torch.ones(20), "fisher: negative"),
        ("fisher", torch.ones(20, dtype=torch.int64), "torch.int64"),
        ("counts", torch.tensor([10**9, 1]), "counts: 1000000001 of 20 samples"),
        ("fisher", torch.full((20,), math.inf), "fisher: negative or infinite"),
        ("signatures", torch.ones(2, 3).half(), "signatures: shape"),
        ("signatures", torch.full((2, 20), math.nan).half(), "signatures"),
        ("domains", torch.tensor([0, 9]), "signatures: unknown domain"),
        ("counts", torch.tensor([0, 1]), "signatures"),
        ("domains", torch.tensor([0.0, math.nan]), "not int64"),
        ("domains", torch.tensor(1), ""),
    ],
)
def test_hostile_extras_cost_the_reply_alone(name, value, reason):
    from flwr.app import ArrayRecord

    def tamper(content):
        extras = content.array_records["extras"].to_torch_state_dict()
        content["extras"] = ArrayRecord(extras | {name: value})
        return content

    run = Federation("fedfip", tamper={"client-00": tamper})
    run.run(rounds=1)
    assert reason in run.rounds[1].failures["client-00"]
    assert len(run.rounds[1].updates) == 3


def test_defaults_are_those_of_the_paper_where_it_gives_them():
    options = FedFIPOptions()
    assert (options.keep, options.mu, options.lambda_con, options.tau) == (0.8, 0.4, 0.01, 1.0)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (torch.zeros(3, dtype=torch.uint8), "shared channels are missing|channel"),
        (torch.zeros(2, dtype=torch.uint8), "held: .2,"),
        (torch.zeros(3), "held"),
    ],
)
def test_a_hostile_mask_costs_the_reply_alone(held, reason):
    import re

    from flwr.app import ArrayRecord

    def tamper(content):
        extras = content.array_records["extras"].to_torch_state_dict()
        content["extras"] = ArrayRecord(extras | {"held": held})
        return content

    run = Federation("fedfip", tamper={"client-00": tamper}, sa=False)
    run.run(rounds=1)
    assert re.search(reason, run.rounds[1].failures["client-00"])
    assert len(run.rounds[1].updates) == 3


def test_the_upload_does_not_tell_which_channels_are_private():
    run = Federation("fedfip", keep=0.5, react_max=0.25, phi=0.0)
    run.run(rounds=2)
    assert len({u.costs["private"] for u in run.rounds[2].updates} - {0})
    mask = run.channels.mask(run.rounds[2].jobs["client-00"].kept)
    for update in run.rounds[2].updates:
        assert np.array_equal(~update.extras["fisher"].isnan().numpy(), mask)


def test_domains_take_turns_over_the_rounds():
    run = Federation("fedfip", keep=1.0, dsr_every=3, dsr_batch=8)
    run.run(rounds=1)
    half = run.halves["client-00"]
    (job,) = run.server.jobs([run.server.exchange.clients["client-00"]], 2).values()
    turns = []
    for number in (2, 3):
        contrast = half._contrast(replace(job, round=number), run.channels.full())
        turns.append(list(contrast.rows)[contrast.turn % len(contrast.rows)])
    assert sorted(turns) == [0, 1]


def test_a_round_without_enough_replies_only_delays_mask_and_refresh():
    options = {"keep": 0.5, "mask_every": 5, "fisher_refresh": 2, "phi": math.inf}
    run = Federation("fedfip", federation=FederationOptions(min_replies=4, wait=1.0), **options)
    run.tamper["client-00"] = ValueError("away")
    masks = []

    def back(round):
        run.rounds.append(round)
        masks.append(int(run.server.mask.sum()))
        if round.number in (1, 4):
            run.tamper.pop("client-00", None)
        if round.number == 3:
            run.tamper["client-00"] = ValueError("away")

    run.server.on_round = back
    run.run(rounds=5)
    assert [r.merged for r in run.rounds[1:]] == [False, True, True, False, True]
    assert masks[1:] == [20, 10, 10, 10, 10]
    assert [r.diagnostics.get("refresh") for r in run.rounds[2:]] == [False, False, None, True]


def test_without_structure_aware_aggregation_private_channels_come_from_the_server():
    run = Federation("fedfip", sa=False, keep=0.5, react_max=0.25, phi=0.0)
    run.run(rounds=3)
    job, half = run.rounds[3].jobs["client-00"], run.halves["client-00"]
    assert job.sent is not job.kept
    seen = half._take_up(job, half.me.memory.load(3), run.channels.full())
    assert all(torch.equal(seen[name], job.state[name]) for name in seen)
    assert not any(bool(r.diagnostics["refresh"]) for r in run.rounds[1:])


def test_signatures_are_those_of_the_gates_also_when_the_mask_is_made_of_filters():
    def uploaded(**options):
        run = Federation("fedfip", keep=0.5, **options)
        run.run(rounds=1)
        return run.rounds[1].updates[0].extras

    filters, gates = uploaded(fisher="weight"), uploaded(fisher="gate")
    assert torch.equal(filters["signatures"], gates["signatures"])
    assert not torch.equal(filters["fisher"], gates["fisher"])


def test_a_quantile_above_one_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"phi = 1\.5: must be in \[0, 1\]"):
        FedFIPOptions(phi_mode="quantile", phi=1.5)
    assert FedFIPOptions(phi_mode="quantile", phi=math.inf).phi == math.inf
