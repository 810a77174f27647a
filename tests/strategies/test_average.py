"""Means of networks: laws, and naive loops over single entries as oracle."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.errors import ShapeError
from strategies.ops.average import average_overlap, coverage, weighted_mean
from task.channels import Axis, ChannelMap

law = settings(derandomize=True, deadline=None, max_examples=30)

SHAPES = {
    "conv1.weight": (4, 3, 2, 2),
    "bn.weight": (4,),
    "bn.num_batches_tracked": (),
    "conv2.weight": (5, 4, 2, 2),
    "linear.weight": (2, 10),  # flatten: two columns for each channel of conv2
    "position": (3, 2, 4),  # channels on the last axis
    "linear.bias": (2,),
}


def network_map() -> ChannelMap:
    """conv1 (a) -> bn -> conv2 (b) -> flatten -> linear."""

    def axis(group, repeat, width, role):
        channel = np.repeat(np.arange(width), repeat)
        return Axis(np.full(len(channel), group, dtype=np.int32), channel, role)

    return ChannelMap(
        groups={"a": 4, "b": 5},
        axes={
            "conv1.weight": (axis(0, 1, 4, "out"), None, None, None),
            "bn.weight": (axis(0, 1, 4, "norm"),),
            "bn.num_batches_tracked": (),
            "conv2.weight": (axis(1, 1, 5, "out"), axis(0, 1, 4, "in"), None, None),
            "linear.weight": (None, axis(1, 2, 5, "in")),
            "position": (None, None, axis(0, 1, 4, "bias")),
            "linear.bias": (None,),
        },
        gates=(),
        exact={"a": True, "b": True},
        pinned={},
    )


CMAP = network_map()


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(seed)
        if name.endswith("tracked")
        else torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


def cut(whole, kept):
    """Slice by `np.ix_` over all axes: not the way of the code under test."""
    sub = {}
    for name, tensor in whole.items():
        index = [
            np.arange(n) if i is None else i
            for n, i in zip(tensor.shape, CMAP.index(name, kept), strict=True)
        ]
        sub[name] = torch.from_numpy(
            tensor.numpy()[np.ix_(*index)] if index else tensor.numpy().copy()
        )
    return sub


@st.composite
def kepts(draw):
    return {
        name: np.array(sorted(draw(st.sets(st.integers(0, width - 1), min_size=1))), dtype=np.int64)
        for name, width in CMAP.groups.items()
    }


def naive_overlap(full, subs, weights):
    """Visit every entry of every tensor and look up who holds it."""
    result = {name: tensor.clone() for name, tensor in full.items()}
    for name, shape in SHAPES.items():
        for entry in itertools.product(*map(range, shape)):
            total = held = 0.0
            for (sub, kept), weight in zip(subs, weights, strict=True):
                index = CMAP.index(name, kept)
                place = [
                    e if i is None else np.flatnonzero(i == e)
                    for e, i in zip(entry, index, strict=True)
                ]
                if all(np.size(p) for p in place):
                    total += weight * float(sub[name][tuple(int(np.ravel(p)[0]) for p in place)])
                    held += weight
            if held and full[name].is_floating_point():
                result[name][entry] = total / held
    return result


@law
@given(st.lists(st.tuples(kepts(), st.integers(1, 9)), min_size=1, max_size=4))
def test_an_entry_covered_by_some_clients_is_their_mean_and_the_others_stay(clients):
    full = state(0)
    subs = [(cut(state(seed), kept), kept) for seed, (kept, _) in enumerate(clients, 1)]
    weights = [weight for _, weight in clients]
    before = {name: tensor.clone() for name, tensor in full.items()}
    got, want = average_overlap(full, CMAP, subs, weights), naive_overlap(full, subs, weights)
    for name in SHAPES:
        if name != "bn.num_batches_tracked":
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(full[name], before[name])
    assert got["bn.num_batches_tracked"] == len(clients)  # the largest counter


@law
@given(st.lists(kepts(), min_size=1, max_size=6))
def test_untouched_submodels_average_to_the_network_they_were_cut_from(cuts):
    full = state(0)
    got = average_overlap(full, CMAP, [(cut(full, k), k) for k in cuts], [1.0] * len(cuts))
    for name in SHAPES:
        torch.testing.assert_close(got[name], full[name], rtol=3e-7, atol=0)


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_clients_of_full_width_give_the_plain_weighted_mean_bit_for_bit(count):
    states = [state(seed) for seed in range(count)]
    for seed in range(10):
        weights = np.random.default_rng(seed).integers(1, 500, count).tolist()
        overlap = average_overlap(state(99), CMAP, [(s, CMAP.full()) for s in states], weights)
        plain = weighted_mean(states, weights)
        assert all(torch.equal(overlap[name], plain[name]) for name in SHAPES)


@law
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any), st.randoms())
def test_the_weighted_mean_is_convex_and_does_not_depend_on_the_order(weights, random):
    states = [state(seed) for seed in range(len(weights))]
    mean = weighted_mean(states, weights)
    order = list(range(len(weights)))
    random.shuffle(order)
    shuffled = weighted_mean([states[i] for i in order], [weights[i] for i in order])
    for name in SHAPES:
        if name == "bn.num_batches_tracked":
            assert mean[name] == shuffled[name] == len(states) - 1
            continue
        stack = torch.stack([s[name] for s in states])
        want = (stack.double() * torch.tensor(weights).view(-1, *[1] * mean[name].dim())).sum(0)
        torch.testing.assert_close(mean[name].double(), want / sum(weights), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean[name], shuffled[name], rtol=1e-5, atol=1e-6)
        assert (mean[name] >= stack.amin(0) - 1e-6).all()
        assert (mean[name] <= stack.amax(0) + 1e-6).all()


def test_one_network_is_its_own_mean_and_the_result_is_a_copy():
    only = state(1)
    mean = weighted_mean([only], [17.0])
    assert all(torch.equal(mean[name], only[name]) for name in SHAPES)
    assert all(mean[name].data_ptr() != only[name].data_ptr() for name in SHAPES)


def test_counters_are_the_largest_and_not_averaged():
    mean = weighted_mean([state(3), state(8)], [1.0, 1.0])
    assert mean["bn.num_batches_tracked"].dtype == torch.int64
    assert mean["bn.num_batches_tracked"] == 8


def test_half_precision_is_summed_in_single_precision():
    # 2048 + 1 = 2048 in half precision: a running sum in it would lose all the small ones.
    states = [{"w": torch.tensor([v], dtype=torch.float16)} for v in [2048.0, *[1.0] * 63]]
    mean = weighted_mean(states, [1.0] * 64)["w"]
    assert mean.dtype == torch.float16
    assert mean.item() == torch.tensor((2048 + 63) / 64, dtype=torch.float16).item()


def test_a_client_of_weight_zero_changes_nothing_where_it_is_alone():
    full, kept = state(0), CMAP.prefix(0.5)
    subs = [(cut(state(1), kept), kept), (state(2), CMAP.full())]
    got = average_overlap(full, CMAP, subs, [1.0, 0.0])
    rows = torch.tensor([2, 3])
    assert torch.equal(got["bn.weight"][rows], full["bn.weight"][rows])
    assert torch.equal(got["bn.weight"][:2], subs[0][0]["bn.weight"])


# --- coverage -------------------------------------------------------------------------------------


@law
@given(st.lists(kepts(), max_size=5), st.booleans())
def test_coverage_equals_counting_every_entry(cuts, doubled):
    cuts = cuts * 2 if doubled else cuts
    shapes = {**SHAPES, "corner": (4, 2, 5, 4)}  # three channel axes
    axes = {**CMAP.axes, "corner": (*CMAP.axes["bn.weight"], None, CMAP.axes["conv2.weight"][0])}
    axes["corner"] = (*axes["corner"], CMAP.axes["bn.weight"][0])
    cmap = ChannelMap(CMAP.groups, axes, (), CMAP.exact, {})
    want = dict.fromkeys(range(len(cuts) + 1), 0)
    for name, shape in shapes.items():
        held = np.zeros(shape, dtype=int)
        for kept in cuts:
            index = cmap.index(name, kept)
            grid = [np.arange(n) if i is None else i for n, i in zip(shape, index, strict=True)]
            held[np.ix_(*grid)] += 1
        for count in held.ravel().tolist():
            want[count] += 1
    assert coverage(cmap, shapes, cuts) == want


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "weights", "message"),
    [
        ([], [], "no networks"),
        ([state(1)], [1.0, 2.0], "2 weights"),
        ([state(1)], [0.0], "not all 0"),
        ([state(1), state(2)], [1.0, -1.0], ">= 0"),
        ([state(1)], [float("nan")], "finite"),
        ([state(1), {**state(2), "extra": torch.ones(1)}], [1, 1], r"network 1: \['extra'\]"),
        (
            [state(1), {**state(2), "linear.bias": torch.ones(3)}],
            [1, 1],
            r"linear.bias: shape \(3,\)",
        ),
    ],
)
def test_networks_that_have_no_mean_are_refused_with_the_reason(states, weights, message):
    with pytest.raises(ShapeError, match=message):
        weighted_mean(states, weights)


def test_a_submodel_that_does_not_fit_its_channels_is_refused_with_tensor_and_shapes():
    kept = CMAP.prefix(0.5)
    with pytest.raises(ShapeError, match=r"submodel 0, conv1.weight: shape \(4, 3, 2, 2\).*\(2, 3"):
        average_overlap(state(0), CMAP, [(state(1), kept)], [1.0])
    short = cut(state(1), kept)
    del short["bn.weight"]
    with pytest.raises(ShapeError, match=r"bn.weight: missing"):
        average_overlap(state(0), CMAP, [(short, kept)], [1.0])
