"""Oracles D20-D29 and D35 of transport: networks of duplicated and of permuted channels."""

import importlib
import itertools
import sys
from functools import cache

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from strategies.errors import ShapeError
from strategies.ops.average import weighted_mean
from strategies.ops.plans import Plan
from strategies.ops.rows import distances, sketch
from strategies.ops.solvers import balanced, cover, emd, prices, sinkhorn, solve
from strategies.ops.transport import (
    TransportOptions,
    align,
    apply,
    distinct_rows,
    plan_groups,
    transpose,
)
from task.channels import ChannelMap
from task.models import build, example
from task.submodel import extract, slice_module
from task.trace import trace
from tests.task.networks import randomised, relative, traced

law = settings(derandomize=True, deadline=None, max_examples=25)
KEEPS = (0.25, 0.5, 0.75)


def mlp():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)
    )


def cnn():
    def block(n, m):
        return nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU()

    return nn.Sequential(
        *block(3, 8), nn.MaxPool2d(2), *block(8, 16), nn.Flatten(), nn.Linear(16 * 16, 12),
        nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip


# Widths of the big networks are cut to this fraction before the tests begin.
OURS = {"mlp": mlp, "cnn": cnn}
BIG = {"resnet10": 1 / 8, "resnet18": 1 / 16, "mobilenetv2": 1 / 4}
MAIN = [*OURS, *BIG]
OTHERS = [
    "grouped", "concat", "padded-shortcut", "squeeze-excite", "normed", "bag", "own-attention",
    "shared-weights", "control-flow", "smooth", "torch-encoder", "plain-cnn",
]  # fmt: skip


@cache
def wide(name) -> tuple[nn.Module, torch.Tensor, ChannelMap]:
    """A network with visible BatchNorm statistics, an input for it and its map."""
    if name in OTHERS:
        return traced(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in OURS:
            inputs = torch.randn(2, 6) if name == "mlp" else torch.randn(2, 3, 8, 8)
            model = OURS[name]()
            return randomised(model), inputs, trace(model, inputs, verify=False)
        inputs = example(name, (3, 16, 16))
        model = build(name, (3, 16, 16), 5)
        cmap = trace(model, inputs, verify=False)
        kept = cmap.prefix(BIG[name])
        return randomised(slice_module(model, cmap, kept)), inputs, cmap.restrict(kept)


def fresh(state, seed):
    """Other random values in the same shapes: no two channels alike, variances positive."""
    source = torch.Generator().manual_seed(seed)
    new = {}
    for name, old in state.items():
        if not old.is_floating_point():
            new[name] = old.clone()
        elif name.endswith("running_var"):
            new[name] = 0.5 + torch.rand(old.shape, generator=source)
        else:
            scale = 1.0 if old.ndim == 1 else (2 / old[0].numel()) ** 0.5
            new[name] = scale * torch.randn(old.shape, generator=source)
    return new


def pair(name, keep, seed=1):
    """A wide and an unrelated narrow network: states, maps and a function that runs a state."""
    model, _, cmap = wide(name)
    kept = cmap.prefix(keep)
    narrow_map = cmap.restrict(kept)
    narrow = fresh(extract(model.state_dict(), cmap, kept), seed)
    return fresh(model.state_dict(), seed + 100), narrow, cmap, narrow_map


def run(name, state, keep=None):
    """Outputs of the network with these values, wide or cut to a prefix."""
    model, inputs, cmap = wide(name)
    model = slice_module(model, cmap, cmap.full() if keep is None else cmap.prefix(keep), state)
    with torch.no_grad():
        return model.eval()(inputs)


def redraw(state, before, after, parent):
    """Naive duplication: channel c of a group becomes a copy of parent[group][c].

    Everything is copied; weights that read a channel are divided by its number of copies.
    """
    groups = list(before.groups)
    new = {}
    for name, tensor in state.items():
        for d, (old, big) in enumerate(zip(before.axes[name], after.axes[name], strict=True)):
            if old is None:
                continue
            place, seen = {}, {}
            for k, key in enumerate(zip(old.group, old.channel, strict=True)):
                place[(*key, seen.setdefault(key, 0))] = k
                seen[key] += 1
            index, share, seen = [], [], {}
            for g, c in zip(big.group, big.channel, strict=True):
                turn = seen[g, c] = seen.get((g, c), -1) + 1
                family = parent[groups[g]] if g >= 0 else np.zeros(1, int)
                index.append(place[g, family[c], turn])
                share.append(1 / np.sum(family == family[c]) if old.role == "in" else 1.0)
            weights = torch.tensor(share, dtype=torch.float64).to(tensor.dtype)
            tensor = tensor.index_select(d, torch.tensor(index))
            tensor = tensor * weights.view(-1, *[1] * (tensor.ndim - 1 - d))
        new[name] = tensor.clone()
    return new


def shuffles(cmap, seed):
    random = np.random.default_rng(seed)
    return {name: random.permutation(width) for name, width in cmap.groups.items()}


def families(narrow, big, seed, *, even=True):
    """For each wide channel the narrow one it is a copy of, in random order."""
    random = np.random.default_rng(seed)
    found = {}
    for name, m in narrow.groups.items():
        n = big.groups[name]
        rest = np.arange(m, n) % m if even else random.integers(0, m, n - m)
        found[name] = random.permutation(np.concatenate([np.arange(m), rest]))
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(a, b):
    return max(relative(a[k].double(), b[k].double()) for k in b if b[k].is_floating_point())


class OneSided(Plan):
    """The literal formula: columns sum to 1 on both sides."""

    def move(self, tensor, axis, *, into):
        return super().move(tensor, axis, into=False)


# Networks


@pytest.mark.parametrize("name", [*MAIN, *OTHERS])
def test_a_network_of_duplicated_channels_is_brought_back_to_the_narrow_one(name):
    # Widths that do not divide evenly have duplicates of unequal number: only cover is exact there.
    _, narrow, cmap, small = pair(name, 0.5)
    doubled = redraw(narrow, small, cmap, families(small, cmap, 3))
    divides = all(n % small.groups[g] == 0 for g, n in cmap.groups.items())
    options = TransportOptions(solver="balanced" if divides or name in MAIN else "cover")
    plans = plan_groups(doubled, narrow, cmap, small, options)
    back = apply(doubled, cmap, plans, small)
    assert apart(back, narrow) < 1e-5
    assert relative(run(name, back, 0.5), run(name, doubled)) < 1e-5


@pytest.mark.parametrize("name", MAIN)
def test_one_normalisation_for_both_sides_fails_where_two_succeed(name):
    _, narrow, cmap, small = pair(name, 0.5)
    doubled = redraw(narrow, small, cmap, families(small, cmap, 3))
    plans = plan_groups(doubled, narrow, cmap, small)
    literal = {k: OneSided(p.source, p.target, p.mass, p.shape) for k, p in plans.items()}
    expected = run(name, narrow, 0.5)
    assert relative(run(name, apply(doubled, cmap, plans, small), 0.5), expected) < 1e-5
    assert relative(run(name, apply(doubled, cmap, literal, small), 0.5), expected) > 0.1


@pytest.mark.parametrize(
    ("name", "keep"), [*itertools.product(MAIN, KEEPS), *((name, 0.6) for name in OTHERS)]
)
def test_widening_computes_the_same_function(name, keep):
    target, narrow, cmap, small = pair(name, keep)
    widened = align(narrow, target, small, cmap)
    assert {k: v.shape for k, v in widened.items()} == {k: v.shape for k, v in target.items()}
    assert relative(run(name, widened), run(name, narrow, keep)) < 2e-5


def test_widening_with_emd_keeps_the_function_only_where_widths_divide():
    errors = {}
    for keep in KEEPS:
        target, narrow, cmap, small = pair("cnn", keep)
        widened = align(narrow, target, small, cmap, TransportOptions(solver="emd"))
        errors[keep] = relative(run("cnn", widened), run("cnn", narrow, keep))
    assert errors[0.25] < 1e-5
    assert errors[0.5] < 1e-5
    assert errors[0.75] > 1e-2


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", MAIN)
def test_there_and_back_returns_every_bit(name, keep):
    target, narrow, cmap, small = pair(name, keep)
    back = align(align(narrow, target, small, cmap), narrow, cmap, small)
    copies = {-(-n // small.groups[g]) for g, n in cmap.groups.items()}
    if copies <= {1, 2, 4}:
        assert same(back, narrow)
    else:  # a third is no binary fraction
        assert apart(back, narrow) < 1e-6


@pytest.mark.parametrize("solver", ["balanced", "emd", "cover"])
@pytest.mark.parametrize("name", MAIN)
def test_a_network_aligned_with_itself_or_a_permuted_copy_is_the_target(name, solver):
    state, _, cmap, _ = pair(name, 0.5)
    options = TransportOptions(solver=solver)
    mixed = redraw(state, cmap, cmap, shuffles(cmap, 4))
    assert same(align(state, state, cmap, cmap, options), state)
    assert same(align(mixed, state, cmap, cmap, options), state)


def aggregate(clients, weights, target, cmap, maps):
    aligned = [align(c, target, m, cmap) for c, m in zip(clients, maps, strict=True)]
    return weighted_mean(aligned, weights), aligned


@pytest.mark.parametrize("name", ["cnn", "resnet10", "mobilenetv2"])
def test_the_order_of_a_clients_channels_does_not_change_the_aggregate(name):
    model, _, cmap = wide(name)
    parts = [pair(name, keep, seed) for seed, keep in enumerate((0.25, 0.5, 1.0))]
    clients, maps = [p[1] for p in parts], [p[3] for p in parts]
    target = fresh(model.state_dict(), 50)
    merged, aligned = aggregate(clients, [1, 2, 3], target, cmap, maps)
    for key, value in merged.items():
        if value.is_floating_point():
            mean = sum(w * a[key].double() for w, a in zip((1, 2, 3), aligned, strict=True)) / 6
            assert relative(value, mean.float()) < 1e-6
    mixed = [redraw(c, m, m, shuffles(m, 8)) for c, m in zip(clients, maps, strict=True)]
    assert same(aggregate(mixed, [1, 2, 3], target, cmap, maps)[0], merged)


@pytest.mark.parametrize("name", ["cnn", "resnet10", "mobilenetv2"])
def test_permuting_the_reference_permutes_the_aggregate(name):
    target, narrow, cmap, small = pair(name, 0.5)
    order = shuffles(cmap, 9)
    turned = redraw(target, cmap, cmap, order)
    before = align(narrow, target, small, cmap)
    after = align(narrow, turned, small, cmap)
    assert apart(after, redraw(before, cmap, cmap, order)) < 1e-6


@pytest.mark.parametrize("name", ["cnn", "resnet10", "mobilenetv2"])
@pytest.mark.parametrize("keep", [0.5, 0.75])
def test_cover_recovers_duplicates_of_unequal_number(name, keep):
    _, narrow, cmap, small = pair(name, keep)
    uneven = redraw(narrow, small, cmap, families(small, cmap, 5, even=False))
    options = TransportOptions(solver="cover")
    assert relative(run(name, uneven), run(name, narrow, keep)) < 1e-5
    assert apart(align(uneven, narrow, cmap, small, options), narrow) < 1e-5
    if keep == 0.5:
        assert apart(align(uneven, narrow, cmap, small), narrow) > 1e-2  # balanced cannot


def test_a_residual_group_has_one_plan_and_an_identity_block_stays_one():
    target, narrow, cmap, small = pair("resnet18", 0.5)
    for state in (target, narrow):
        for part in ("weight", "bias"):
            state[f"layer1.1.bn2.{part}"].zero_()
    for source, reference, maps in (
        (target, narrow, (cmap, small)),
        (narrow, target, (small, cmap)),
    ):
        moved = align(source, reference, *maps)
        assert not moved["layer1.1.bn2.weight"].any()
        assert not moved["layer1.1.bn2.bias"].any()
    plans = plan_groups(target, narrow, cmap, small)
    assert set(plans) == set(cmap.groups)
    stream, axes = plans["conv1"], cmap.axes
    writers = ["conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv2.weight"]
    assert {int(axes[w][0].group[0]) for w in writers} == {0}
    moved = apply(target, cmap, plans, small)
    for writer in writers[1:]:
        inner = list(cmap.groups)[int(axes[writer][1].group[0])]
        expected = np.einsum(
            "oikl,oa,ib->abkl", target[writer].numpy(), stream.out, plans[inner].into
        )
        assert np.abs(moved[writer].numpy() - expected).max() < 1e-5


def naive_align(source, target, source_map, target_map, writers):
    """The pseudo-code with matrices: groups in order, cost over known writers, dense products."""
    t_out, t_in = {}, {}
    for group, (weights, vectors) in writers.items():
        cost = 0.0
        for name, reads in weights:
            if reads is not None and reads not in t_in:
                continue
            a = source[name].double().numpy()
            if reads is not None:
                a = np.moveaxis(np.tensordot(a, t_in[reads], (1, 0)), -1, 1)
            b = target[name].double().numpy()
            a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
            cost = cost + ((a[:, None] - b[None]) ** 2).sum(-1)
        for name in vectors:
            cost = cost + (source[name].double()[:, None] - target[name].double()).numpy() ** 2
        n, m = cost.shape
        plan = ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), cost)
        t_out[group], t_in[group] = plan / plan.sum(0), plan / plan.sum(1, keepdims=True)
    return t_out, t_in


def test_plans_of_a_residual_network_are_those_of_the_pseudo_code():
    target, narrow, cmap, small = pair("resnet10", 0.5)
    norms = lambda *names: [f"{n}.{part}" for n in names for part in ("weight", "bias")]  # noqa: E731
    first = [("conv1.weight", None), ("layer1.0.conv2.weight", "layer1.0.conv1")]
    writers = {"conv1": (first, norms("bn1", "layer1.0.bn2"))}
    writers["layer1.0.conv1"] = ([("layer1.0.conv1.weight", "conv1")], norms("layer1.0.bn1"))
    stream = "conv1"
    for k in (2, 3, 4):
        block = f"layer{k}.0"
        writers[f"{block}.conv1"] = ([(f"{block}.conv1.weight", stream)], norms(f"{block}.bn1"))
        writers[f"{block}.conv2"] = (
            [(f"{block}.conv2.weight", f"{block}.conv1"), (f"{block}.downsample.0.weight", stream)],
            norms(f"{block}.bn2", f"{block}.downsample.1"),
        )
        stream = f"{block}.conv2"
    out, into = naive_align(target, narrow, cmap, small, writers)
    plans = plan_groups(target, narrow, cmap, small)
    for group, plan in plans.items():
        assert np.abs(plan.out - out[group]).max() < 1e-12
        assert np.abs(plan.into - into[group]).max() < 1e-12


def test_scaling_a_neuron_misleads_raw_costs_but_not_those_of_folded_norms():
    # The function stays: BatchNorm undoes the scale. Raw rows look different, folded ones do not.
    state, _, cmap, _ = pair("cnn", 0.5)
    first, norm = "0", "1"
    state["0.weight"] += 1  # rows that are alike: then the largest goes to the largest
    scale = torch.exp(torch.linspace(-3, 3, 8))
    scaled = {name: tensor.clone() for name, tensor in state.items()}
    scaled[f"{first}.weight"] *= scale.view(-1, 1, 1, 1)
    scaled[f"{first}.bias"] *= scale
    scaled[f"{norm}.running_mean"] *= scale
    scaled[f"{norm}.running_var"] *= scale**2
    assert relative(run("cnn", scaled), run("cnn", state)) < 5e-3  # eps is not scaled

    def folded(state):
        new = {name: tensor.clone() for name, tensor in state.items()}
        factor = state[f"{norm}.weight"] / state[f"{norm}.running_var"].sqrt()
        new[f"{first}.weight"] *= factor.view(-1, 1, 1, 1)
        new[f"{first}.bias"] = state[f"{norm}.bias"] + factor * (
            state[f"{first}.bias"] - state[f"{norm}.running_mean"]
        )
        new[f"{norm}.weight"].fill_(1)
        new[f"{norm}.bias"].fill_(0)
        return new

    weights = TransportOptions(bn_in_cost=False)  # gamma and beta, which stay, would help a little
    raw = plan_groups(scaled, state, cmap, cmap, weights)["0"].target
    fold = plan_groups(folded(scaled), folded(state), cmap, cmap, weights)["0"].target
    assert raw.tolist() != list(range(8))
    assert fold.tolist() == list(range(8))


@pytest.mark.parametrize("solver", ["balanced", "emd", "cover", "sinkhorn"])
def test_variances_stay_positive_and_buffers_types_and_shapes_survive(solver):
    target, narrow, cmap, small = pair("mobilenetv2", 0.75)
    for tensor in target.values():
        if not tensor.is_floating_point():
            tensor.fill_(7)
    untouched = {name: tensor.clone() for name, tensor in target.items()}
    moved = align(target, narrow, cmap, small, TransportOptions(solver=solver, reg=0.1))
    depthwise = [
        n for n, axes in cmap.axes.items() if axes and axes[0] and axes[0].role == "depthwise"
    ]
    assert depthwise
    for name, tensor in moved.items():
        assert tensor.dtype == target[name].dtype
        assert tensor.shape == narrow[name].shape
        assert tensor.data_ptr() != target[name].data_ptr()
        if name.endswith("running_var"):
            assert (tensor > 0).all()
        if name.endswith("num_batches_tracked"):
            assert tensor == 7
        if name in depthwise:
            assert tensor.shape[1:] == (1, 3, 3)
    assert same(target, untouched)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_precisions_keep_their_type(dtype):
    target, narrow, cmap, small = pair("cnn", 0.5)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in target.items()}
    moved = align(cast, narrow, cmap, small)
    assert all(moved[k].dtype == cast[k].dtype for k in cast)
    assert apart(moved, align(target, narrow, cmap, small)) < 1e-2


def test_align_is_apply_of_plan_groups_with_any_number_of_sweeps():
    target, narrow, cmap, small = pair("resnet18", 0.75)
    found = {}
    for sweeps in (1, 2, 3):
        options = TransportOptions(sweeps=sweeps)
        found[sweeps] = plan_groups(target, narrow, cmap, small, options)
        moved = align(target, narrow, cmap, small, options)
        assert same(moved, apply(target, cmap, found[sweeps], small))
    assert any((found[1][g].target != found[2][g].target).any() for g in cmap.groups)


def test_plans_turned_round_widen_what_they_narrowed():
    target, narrow, cmap, small = pair("resnet10", 0.75)
    plans = plan_groups(target, narrow, cmap, small)
    widened = apply(narrow, small, transpose(plans), cmap)
    assert relative(run("resnet10", widened), run("resnet10", narrow, 0.75)) < 1e-5
    assert same(apply(widened, cmap, plans, small), narrow)


def test_distinct_rows_sees_copies_and_only_those():
    state, narrow, cmap, small = pair("resnet10", 0.5)
    assert distinct_rows(state, cmap) == cmap.groups
    doubled = redraw(narrow, small, cmap, families(small, cmap, 2))
    assert distinct_rows(doubled, cmap) == small.groups
    doubled["layer1.0.bn1.bias"][0] += 1
    assert distinct_rows(doubled, cmap)["layer1.0.conv1"] == small.groups["layer1.0.conv1"] + 1


@pytest.mark.parametrize(
    ("name", "only"),
    [("cnn", "0.weight"), ("cnn", "0.bias"), ("cnn", "1.weight"), ("cnn", "1.bias"),
     ("mobilenetv2", "features.0.0.weight"), ("mobilenetv2", "features.1.conv.0.0.weight")],
)  # fmt: skip
def test_weights_depthwise_weights_biases_and_norms_each_tell_channels_apart(name, only):
    state, _, cmap, _ = pair(name, 0.5)
    for key, axes in cmap.axes.items():  # of the first group, everything else is the same
        if axes and axes[0] and key != only and (axes[0].group == 0).all():
            state[key][:] = state[key][:1].clone()
    mixed = redraw(state, cmap, cmap, shuffles(cmap, 4))
    assert same(align(mixed, state, cmap, cmap), state)
    if only in ("0.bias", "1.weight", "1.bias"):
        blind = plan_groups(mixed, state, cmap, cmap, TransportOptions(bn_in_cost=False))
        assert blind["0"].target.tolist() == list(range(8))  # nothing to see: first to first


# Plans and solvers


def costs(n, m, seed):
    return np.random.default_rng(seed).random((n, m))


def counts_allowed(n, m):
    return {max(n, m) // min(n, m), -(-max(n, m) // min(n, m))}


def total(plan, cost):
    return float((plan.coupling * cost).sum())


@st.composite
def problems(draw):
    """A cost matrix, one in three with many ties."""
    n, m, seed = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    return np.floor(3 * costs(n, m, seed)) if draw(st.integers(0, 2)) == 0 else costs(n, m, seed)


@law
@given(problems(), st.sampled_from(["balanced", "emd", "cover", "sinkhorn"]))
def test_columns_of_out_and_rows_of_into_sum_to_one(cost, solver):
    plan = solve(cost, solver)
    assert plan.shape == cost.shape
    assert abs(plan.coupling.sum() - 1) < 1e-9
    assert (plan.coupling >= 0).all()
    assert np.abs(plan.out.sum(0) - 1).max() < 1e-9
    assert np.abs(plan.into.sum(1) - 1).max() < 1e-9
    if solver == "emd":
        n, m = cost.shape
        assert np.abs(plan.coupling.sum(0) - 1 / m).max() < 1e-12
        assert np.abs(plan.coupling.sum(1) - 1 / n).max() < 1e-12


@law
@given(problems())
def test_a_balanced_plan_uses_wide_channels_once_and_narrow_ones_almost_equally(cost):
    n, m = cost.shape
    plan = balanced(cost)
    wide_side, narrow_side = (plan.source, plan.target) if n >= m else (plan.target, plan.source)
    assert sorted(wide_side) == list(range(max(n, m)))
    assert set(np.bincount(narrow_side, minlength=min(n, m))) <= counts_allowed(n, m)
    hard = (plan.coupling > 0).astype(float)
    assert np.abs(plan.into - hard / hard.sum(1, keepdims=True)).max() < 1e-12
    assert np.abs(plan.out - hard / hard.sum(0)).max() < 1e-12


@law
@given(problems(), st.sampled_from(["balanced", "emd", "cover", "sinkhorn"]), st.booleans())
def test_moving_is_a_product_with_the_matrix(cost, solver, into):
    plan = solve(cost, solver)
    x = torch.randn(3, cost.shape[0], 2, generator=torch.Generator().manual_seed(1))
    matrix = torch.from_numpy(plan.into if into else plan.out)
    expected = torch.einsum("inj,nm->imj", x.double(), matrix)
    moved = plan.move(x, 1, into=into)
    assert moved.is_contiguous()
    assert (moved - expected).abs().max() < 1e-5


def feasible(n, m):
    """Every balanced assignment of n wide to m narrow channels."""
    for choice in itertools.product(range(m), repeat=n):
        if set(np.bincount(choice, minlength=m)) <= counts_allowed(n, m):
            yield list(choice)


@pytest.mark.parametrize("n", range(1, 7))
def test_no_balanced_assignment_is_cheaper(n):
    for m in range(1, n + 1):
        cost = costs(n, m, n)
        best = min(cost[np.arange(n), choice].sum() for choice in feasible(n, m))
        assert abs(total(balanced(cost), cost) - best / n) < 1e-12
        assert abs(total(balanced(cost.T.copy()), cost.T) - best / n) < 1e-12


@pytest.mark.parametrize(("n", "m"), [(64, 48), (60, 24), (48, 64), (97, 13)])
def test_a_thousand_random_balanced_plans_cost_more(n, m):
    cost, random = costs(n, m, 5), np.random.default_rng(6)
    best = total(balanced(cost), cost)
    square = cost if n >= m else cost.T
    deal = np.arange(max(n, m)) % min(n, m)
    others = [square[random.permutation(max(n, m)), deal].mean() for _ in range(1000)]
    assert best <= min(others)


@pytest.mark.parametrize(
    ("n", "m"), [(64, 64), (64, 32), (96, 32), (32, 128), (256, 64), (300, 100)]
)
def test_where_widths_divide_balanced_costs_what_optimal_transport_costs(n, m):
    for seed in range(3):
        rows = np.random.default_rng(seed).normal(size=(n + m, 7))
        cost = ((rows[:n, None] - rows[None, n:]) ** 2).sum(-1)
        expected = ot.emd2(np.full(n, 1 / n), np.full(m, 1 / m), cost, numItermax=10**7)
        assert abs(total(balanced(cost), cost) / expected - 1) < 1e-9


@pytest.mark.parametrize("kind", ["zero", "equal", "duplicates", "outlier", "far"])
@pytest.mark.parametrize(("n", "m"), [(40, 20), (40, 30), (30, 30)])
def test_balanced_stays_optimal_where_prices_are_guessed_badly(kind, n, m):
    random = np.random.default_rng(1)
    a, b = random.normal(size=(n, 3)), random.normal(size=(m, 3))
    if kind == "duplicates":
        a = b[np.arange(n) % m]
    if kind == "outlier":
        a[3] *= 1e6
    if kind == "far":
        a[::3] += 1e8
    cost = ((a[:, None] - b[None]) ** 2).sum(-1)
    cost = np.full((n, m), float(kind == "equal")) if kind in ("zero", "equal") else cost
    from scipy.optimize import linear_sum_assignment

    low, extra = n // m, n % m > 0
    bound = 2 * cost.max() + 1
    copies = np.concatenate([np.tile(cost - bound, low)] + [cost] * extra, 1)
    rows, columns = linear_sum_assignment(copies)
    expected = cost[rows, columns % m].mean()
    assert abs(total(balanced(cost), cost) - expected) <= 1e-9 * max(1.0, cost.max())


@pytest.mark.parametrize(("n", "m"), [(96, 32), (96, 64), (80, 80)])
def test_prices_spread_the_sources_almost_as_wanted(n, m):
    # They change no optimum, only the time: rows should want columns as often as these are free.
    rows = np.random.default_rng(2).normal(size=(n + m, 9))
    cost = ((rows[:n, None] - rows[None, n:]) ** 2).sum(-1)

    def excess(cost):
        wanted = np.bincount(cost.argmin(1), minlength=m)
        return np.maximum(wanted - -(-n // m), 0).sum() + np.maximum(n // m - wanted, 0).sum()

    assert excess(cost - prices(cost, n // m, -(-n // m))) < excess(cost) / 2


def test_equal_channels_are_matched_in_order():
    for n in (1, 5, 40):
        assert balanced(np.zeros((n, n))).target.tolist() == list(range(n))
        assert balanced(np.ones((2 * n, n))).target.tolist() == 2 * list(range(n))


def test_emd_splits_where_widths_do_not_divide():
    # Three sources of mass 1/3, two targets of 1/2: the middle source is split.
    cost = np.array([[0.0, 9.0], [1.0, 1.0], [9.0, 0.0]])
    plan = emd(cost)
    assert np.abs(plan.coupling - np.array([[2, 0], [1, 1], [0, 2]]) / 6).max() < 1e-12
    assert np.abs(plan.out - np.array([[2, 0], [1, 1], [0, 2]]) / 3).max() < 1e-12
    assert np.abs(plan.into - np.array([[1, 0], [0.5, 0.5], [0, 1]])).max() < 1e-12
    for n, m in ((64, 48), (48, 64), (7, 5)):
        cost = costs(n, m, 1)
        expected = ot.emd2(np.full(n, 1 / n), np.full(m, 1 / m), cost)
        assert abs(total(emd(cost), cost) / expected - 1) < 1e-9


def test_cover_takes_a_best_core_and_sends_the_rest_to_their_nearest():
    # Target 1 is nobody's nearest, and still gets the source that loses least.
    cost = np.array([[0.0, 9.0], [1.0, 3.0], [0.5, 8.0]])
    assert cover(cost).target.tolist() == [0, 1, 0]
    assert cover(cost.T.copy()).source.tolist() == [0, 1, 0]


def test_sinkhorn_never_loses_the_plan_and_nears_the_optimum():
    cost = 1e4 * costs(32, 24, 1)
    hot, cold = sinkhorn(cost, reg=1.0), sinkhorn(cost, reg=0.02)
    assert abs(cold.coupling.sum(0) - 1 / 24).max() < 1e-3
    assert total(emd(cost), cost) <= total(cold, cost) * (1 + 1e-3)
    assert total(cold, cost) < total(hot, cost)


def test_importance_is_the_mass_of_a_source():
    target, narrow, cmap, small = pair("cnn", 0.75)
    importance = torch.rand(cmap.size, generator=torch.Generator().manual_seed(1))
    for solver in ("emd", "sinkhorn"):
        options = TransportOptions(solver=solver, importance="marginals", reg=0.2)
        plans = plan_groups(target, narrow, cmap, small, options, importance)
        for name, part in cmap.split(importance).items():
            mass = plans[name].coupling.sum(1)
            assert np.abs(mass - (part / part.sum()).numpy()).max() < 1e-2 / len(part)


def test_importance_as_a_factor_lets_the_important_source_choose():
    # Both sources want target 0; alone the costs decide, then the importance.
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))
    cmap = trace(model, torch.randn(2, 1), verify=False)
    state = lambda rows: {  # noqa: E731
        "0.weight": torch.tensor(rows).view(2, 1), "1.weight": torch.ones(1, 2),
        "1.bias": torch.zeros(1),
    }  # fmt: skip
    source, target = state([0.0, 0.1]), state([0.0, 3.0])
    equal = plan_groups(source, target, cmap, cmap)
    options = TransportOptions(importance="cost")
    chosen = plan_groups(source, target, cmap, cmap, options, torch.tensor([1.0, 50.0]))
    assert equal["0"].target.tolist() == [0, 1]
    assert chosen["0"].target.tolist() == [1, 0]


def test_distances_are_those_of_a_loop():
    a, b = [torch.randn(5, d) for d in (1, 40, 2, 30)], [torch.randn(4, d) for d in (1, 40, 2, 30)]
    rows, others = torch.cat(a, 1).double(), torch.cat(b, 1).double()
    expected = ((rows[:, None] - others[None]) ** 2).sum(-1)
    pairs = list(zip(a, b, strict=True))
    assert np.abs(distances(pairs, (5, 4), squared=True) - expected.numpy()).max() < 1e-4
    root = distances(pairs, (5, 4), squared=False)
    assert np.abs(root - expected.sqrt().numpy()).max() < 1e-5
    assert (distances(pairs[:1] * 2, (5, 4), squared=True) >= 0).all()


def test_a_sketch_keeps_distances_on_average_and_finds_duplicates():
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 3000, generator=source, dtype=torch.float64)
    small = sketch(rows, 400, "a")
    assert small.shape == (40, 400)
    assert not torch.equal(small, sketch(rows, 400, "b"))
    ratio = torch.pdist(small).square() / torch.pdist(rows).square()
    assert abs(float(ratio.mean()) - 1) < 0.02
    assert abs(float(ratio.std()) / (2 / 400) ** 0.5 - 1) < 0.3
    _, narrow, cmap, other = pair("resnet10", 0.5)
    doubled = redraw(narrow, other, cmap, families(other, cmap, 3))
    back = align(doubled, narrow, cmap, other, TransportOptions(sketch=64))
    assert apart(back, narrow) < 1e-5


def test_the_unsquared_cost_minimises_the_distance():
    # Squares prefer two middling ways, distances a long and straight one beside one of length 0.
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    cmap = trace(model, torch.randn(2, 2), verify=False)
    source = {"0.weight": torch.tensor([[0.0, 0], [4, 2]]), "1.weight": torch.ones(1, 2)}
    target = {"0.weight": torch.tensor([[4.0, 2], [9, 0]]), "1.weight": torch.ones(1, 2)}
    plans = {
        squared: plan_groups(source, target, cmap, cmap, TransportOptions(squared=squared))["0"]
        for squared in (True, False)
    }
    assert plans[True].target.tolist() == [0, 1]
    assert plans[False].target.tolist() == [1, 0]


# Errors and imports


def test_what_does_not_fit_is_refused_by_name():
    target, narrow, cmap, small = pair("mlp", 0.5)
    plans = plan_groups(target, narrow, cmap, small)
    with pytest.raises(ShapeError, match=r"0\.weight has shape \(16, 6\).*says \(8, 6\)"):
        align(target, narrow, small, small)
    with pytest.raises(ShapeError, match=r"target: 0\.weight has shape"):
        align(target, target, cmap, small)
    with pytest.raises(ShapeError, match=r"\['2.bias'\]"):
        align({k: v for k, v in target.items() if k != "2.bias"}, narrow, cmap, small)
    with pytest.raises(ShapeError, match="restrictions of one dense map"):
        align(target, narrow, cmap, wide("cnn")[2])
    with pytest.raises(ShapeError, match="group '2': found no plan"):
        apply(target, cmap, {"0": plans["0"]}, small)
    with pytest.raises(ShapeError, match=r"group '0': found \(16, 8\), needs .*\(16, 16\)"):
        apply(target, cmap, plans, cmap)
    target["2.weight"][0, 0] = torch.nan
    with pytest.raises(ShapeError, match="group '2': its weights are not finite"):
        align(target, narrow, cmap, small)


def test_importance_that_is_missing_or_negative_is_refused():
    target, narrow, cmap, small = pair("mlp", 0.5)
    options = TransportOptions(importance="cost")
    for wrong, why in ((None, "nothing"), (torch.ones(3), "shape"), (-torch.ones(40), ">= 0")):
        with pytest.raises(ShapeError, match=why):
            align(target, narrow, cmap, small, options, wrong)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"solver": "exact"}, "one of balanced"), ({"sweeps": 0}, ">= 1"), ({"reg": 0.0}, "> 0"),
     ({"importance": "marginals"}, "hard maps"), ({"sketch": -1}, ">= 0")],
)  # fmt: skip
def test_options_check_themselves(wrong, match):
    with pytest.raises(ValueError, match=match):
        TransportOptions(**wrong)


def test_a_plan_that_forgets_a_channel_is_refused():
    with pytest.raises(ShapeError, match=r"source channels \[1\] have no mass"):
        Plan(np.array([0, 0]), np.array([0, 1]), np.ones(2), (2, 2))
    with pytest.raises(ShapeError, match=r"target channels \[2\] have no mass"):
        Plan(np.array([0, 1]), np.array([0, 1]), np.ones(2), (2, 3))


def test_solvers_of_hard_maps_refuse_a_supply():
    with pytest.raises(ShapeError, match="know no supply"):
        solve(np.ones((2, 2)), "balanced", np.ones(2))
    with pytest.raises(ShapeError, match="is unknown"):
        solve(np.ones((2, 2)), "exact")


def test_importing_transport_needs_neither_pot_nor_scipy_optimize(monkeypatch):
    for name in ("ot", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("plans", "solvers", "rows", "transport"):
        monkeypatch.delitem(sys.modules, f"strategies.ops.{name}")
    again = importlib.import_module("strategies.ops.transport")
    assert again.TransportOptions().solver == "balanced"
    with pytest.raises(ImportError):
        importlib.import_module("strategies.ops.solvers").balanced(np.ones((2, 2)))
