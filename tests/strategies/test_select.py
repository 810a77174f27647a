"""Laws of choosing channels and a naive choice written from the definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.errors import ShapeError
from strategies.ops.select import jaccard, reactivate, tied, top_channels
from task.channels import ChannelMap

law = settings(derandomize=True, deadline=None, max_examples=60)


def groups(**widths: int) -> ChannelMap:
    return ChannelMap(widths, {}, (), dict.fromkeys(widths, True), {})


@st.composite
def vectors(draw):
    """A map of 1-4 groups and importance with many ties, zeros among them."""
    widths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    cmap = groups(**{f"g{i}": w for i, w in enumerate(widths)})
    values = draw(st.lists(st.integers(0, 9), min_size=cmap.size, max_size=cmap.size))
    return cmap, torch.tensor(values, dtype=torch.float32)


def naive_layer(values, widths, keep, minimum):
    """Sort (value, -index) per group and take the first ones."""
    mask, start = [], 0
    for width in widths:
        part = values[start : start + width].tolist()
        count = max(1, math.ceil(minimum * width), round(keep * width))
        best = sorted(range(width), key=lambda j: (-part[j], j))[:count]
        mask += [j in best for j in range(width)]
        start += width
    return np.array(mask)


@law
@given(vectors(), st.floats(0.01, 1.0), st.sampled_from([0.0, 0.05, 0.5]))
def test_layer_scope_takes_the_exact_number_of_best_channels_of_every_group(case, keep, minimum):
    cmap, values = case
    mask = top_channels(values, cmap, keep, minimum=minimum)
    assert (mask == naive_layer(values, cmap.groups.values(), keep, minimum)).all()


@law
@given(vectors(), st.floats(0.01, 1.0))
def test_global_scope_keeps_the_exact_total_and_the_reserve_of_every_group(case, keep):
    cmap, values = case
    mask = top_channels(values, cmap, keep, scope="global", minimum=0.2)
    reserve = {name: max(1, math.ceil(0.2 * width)) for name, width in cmap.groups.items()}
    assert mask.sum() == max(sum(reserve.values()), round(keep * cmap.size))
    assert all(len(chosen) >= reserve[name] for name, chosen in cmap.kept(mask).items())


def test_global_scope_compares_groups_by_importance_over_their_mean():
    cmap = groups(early=4, late=4)
    # Raw importance would fill the budget from the early group; relative to the means it is even.
    values = torch.tensor([400.0, 300, 200, 100, 1, 2, 3, 4])
    mask = top_channels(values, cmap, 0.5, scope="global", minimum=0.25)
    assert mask.tolist() == [True, True, False, False, False, False, True, True]


@law
@given(vectors(), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.sampled_from(["layer", "global"]))
def test_a_smaller_keep_chooses_a_subset(case, a, b, scope):
    cmap, values = case
    small, large = (top_channels(values, cmap, keep, scope=scope) for keep in sorted((a, b)))
    assert not (small & ~large).any()


@law
@given(vectors(), st.integers(-60, 60), st.sampled_from(["layer", "global"]))
def test_the_choice_does_not_change_with_the_scale(case, exponent, scope):
    cmap, values = case
    scaled = values.double() * 2.0**exponent
    assert (
        top_channels(scaled, cmap, 0.5, scope=scope) == top_channels(values, cmap, 0.5, scope=scope)
    ).all()


def test_ties_go_to_the_lower_index_and_do_not_add_channels():
    mask = top_channels(torch.zeros(8), groups(a=8), 0.25)
    assert mask.tolist() == [True, True] + [False] * 6


def test_channels_that_were_never_measured_rank_last():
    values = torch.tensor([torch.nan, 0.1, torch.nan, 0.2])
    for scope in ("layer", "global"):
        mask = top_channels(values, groups(a=4), 0.5, scope=scope)
        assert mask.tolist() == [False, True, False, True]


def test_groups_that_several_layers_write_keep_two_channels_or_all_of_them_on_request():
    from torch import nn

    from task.trace import trace

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1)
            self.outer, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6, 2)

        def forward(self, x):
            x = self.stem(x).relu()
            return self.head((x + self.outer(self.inner(x).relu())).mean((2, 3)))

    cmap = trace(Block(), torch.randn(2, 3, 4, 4), verify=False)
    stream = tied(cmap)
    assert stream
    assert stream != set(cmap.groups)
    for whole in ((), stream):
        mask = top_channels(torch.rand(cmap.size), cmap, 0.01, minimum=0.0, whole=whole)
        for name, index in cmap.kept(mask).items():
            full = cmap.groups[name] if whole else 2
            assert len(index) == (full if name in stream else 1)


@pytest.mark.parametrize(
    ("values", "keep", "scope", "message"),
    [
        (torch.ones(3), 0.5, "layer", "4 channels"),
        (torch.tensor([1.0, -1, 1, 1]), 0.5, "layer", "-1"),
        (torch.ones(4), 0.0, "layer", "keep=0.0"),
        (torch.ones(4), 1.5, "layer", "keep=1.5"),
        (torch.ones(4), 0.5, "block", "'layer' or 'global'"),
    ],
)
def test_unusable_arguments_are_refused_with_what_is_accepted(values, keep, scope, message):
    with pytest.raises(ShapeError, match=message):
        top_channels(values, groups(a=4), keep, scope=scope)


# --- reactivation ---------------------------------------------------------------------------------


def naive_reactivation(values, mask, widths, phi, budget):
    chosen, start = [], 0
    for width in widths:
        f, m = values[start : start + width].tolist(), mask[start : start + width]
        shared = [v for v, inside in zip(f, m, strict=True) if inside and not math.isnan(v)]
        theta = phi * sum(shared) / len(shared) if shared else math.inf
        able = [j for j in range(width) if not m[j] and not math.isnan(f[j]) and f[j] > theta]
        able = sorted(able, key=lambda j: (-f[j], j))[: math.floor(budget * width + 1e-9)]
        chosen += [j in able for j in range(width)]
        start += width
    return np.array(chosen)


@law
@given(vectors(), st.floats(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.randoms())
def test_relative_mode_equals_the_definition(case, phi, budget, random):
    cmap, values = case
    mask = top_channels(values.flip(0), cmap, 0.5)
    values[[random.randrange(cmap.size)]] = torch.nan
    want = naive_reactivation(values, mask, cmap.groups.values(), phi, budget)
    assert (reactivate(values, mask, cmap, phi=phi, budget=budget) == want).all()


@law
@given(
    vectors(),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["relative", "quantile", "absolute"]),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_private_channels_are_outside_the_mask_within_budget_and_fewer_at_a_larger_phi(
    case, a, b, mode, budget
):
    cmap, values = case
    mask = top_channels(values.flip(0), cmap, 0.5)
    many, few = (
        reactivate(values, mask, cmap, phi=phi, mode=mode, budget=budget) for phi in sorted((a, b))
    )
    assert not (many & mask).any()
    assert not (few & ~many).any()
    for name, taken in cmap.kept(many).items():
        assert len(taken) <= budget * cmap.groups[name] + 1e-9


@pytest.mark.parametrize(("budget", "count"), [(0.29, 29), (0.295, 29), (0.0, 0)])
def test_the_budget_is_a_whole_number_of_channels_that_rounding_does_not_shorten(budget, count):
    mask = np.arange(100) < 50
    private = reactivate(torch.ones(100), mask, groups(a=100), phi=0.5, budget=budget)
    assert private.sum() == count


@pytest.mark.parametrize("mode", ["relative", "quantile", "absolute"])
def test_an_infinite_phi_takes_nothing_back_even_where_all_shared_channels_are_zero(mode):
    cmap = groups(a=4)
    fisher, mask = torch.tensor([0.0, 0, 5, 6]), np.array([True, True, False, False])
    assert not reactivate(fisher, mask, cmap, phi=math.inf, mode=mode, budget=1.0).any()


def test_phi_zero_and_a_full_budget_give_the_dense_network():
    cmap = groups(a=4, b=3)
    fisher = torch.arange(1.0, 8.0)
    mask = np.array([True, False, False, True, False, True, False])
    private = reactivate(fisher, mask, cmap, phi=0.0, budget=1.0)
    assert (private | mask).all()


def test_the_quantile_and_the_absolute_threshold_are_those_of_the_definition():
    cmap = groups(a=6)
    fisher = torch.tensor([1.0, 2, 3, 2.5, 1.5, 9])
    mask = np.array([True, True, True, False, False, False])
    half = reactivate(fisher, mask, cmap, phi=0.5, mode="quantile", budget=1.0)
    assert half.tolist() == [False, False, False, True, False, True]  # above the median, 2
    fixed = reactivate(fisher, mask, cmap, phi=1.4, mode="absolute", budget=1.0)
    assert fixed.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phi": -1.0}, "phi=-1.0"),
        ({"phi": math.nan}, "phi=nan"),
        ({"phi": 1.5, "mode": "quantile"}, "phi=1.5"),
        ({"phi": 1.0, "mode": "best"}, "'absolute'"),
        ({"phi": 1.0, "budget": 2.0}, "budget=2.0"),
    ],
)
def test_unusable_thresholds_are_refused(options, message):
    with pytest.raises(ShapeError, match=message):
        reactivate(torch.ones(4), np.array([True] * 4), groups(a=4), **options)


def test_jaccard_is_shared_over_all_and_refuses_masks_of_two_networks():
    a, b = np.array([True, True, False, False]), np.array([False, True, True, False])
    assert jaccard(a, b) == pytest.approx(1 / 3)
    assert jaccard(a, a) == 1.0
    assert jaccard(np.zeros(3, dtype=bool), np.zeros(3, dtype=bool)) == 1.0
    with pytest.raises(ShapeError, match="different networks"):
        jaccard(a, b[:2])
