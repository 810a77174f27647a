import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from strategies import FederationOptions
from strategies.errors import ShapeError
from strategies.ops.average import average_overlap, weighted_mean
from strategies.ops.fisher import federate
from strategies.ops.robust import Merge, middle
from tests.strategies.federation import Federation
from tests.strategies.test_average import CMAP, SHAPES, cut, kepts, state

law = settings(derandomize=True, deadline=None, max_examples=12)
MEDIAN, TRIMMED = Merge("median"), Merge("trimmed", 0.25)
values = st.floats(-1e6, 1e6, width=32) | st.just(float("nan"))


def oracle(column, trim):
    held = column[~np.isnan(column)].astype(np.float64)
    if not len(held):
        return np.nan
    return np.median(held) if trim is None else trim_mean(held, trim)


@law
@given(
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.sampled_from([None, 0.0, 0.2, 0.25, 0.4, 0.49]),
)
def test_the_middle_is_that_of_numpy_and_scipy_over_those_who_hold_the_entry(columns, trim):
    rows = torch.tensor(columns).T
    want = [oracle(np.array(column, dtype=np.float32), trim) for column in columns]
    torch.testing.assert_close(
        middle(rows, trim), torch.tensor(want, dtype=torch.float32), equal_nan=True
    )


def test_by_hand():
    rows = torch.tensor([[1.0, 5.0], [2.0, torch.nan], [9.0, torch.nan], [3.0, 7.0]])
    assert middle(rows, None).tolist() == [2.5, 6.0]
    assert middle(rows, 0.25).tolist() == [2.5, 6.0]
    assert middle(rows, 0.0).tolist() == [3.75, 6.0]
    assert middle(torch.tensor([7, 1, 2**62]), None) == 7
    for trim in (0.5, -0.1):
        with pytest.raises(ShapeError, match="trim"):
            middle(rows, trim)


@law
@given(st.lists(kepts(), min_size=1, max_size=5), st.sampled_from([MEDIAN, TRIMMED]))
def test_submodels_are_merged_over_those_who_hold_an_entry_and_the_others_stay(kept_list, merge):
    full = state(0)
    subs = [(cut(state(seed), kept), kept) for seed, kept in enumerate(kept_list, 1)]
    merged = merge.overlapping(full, CMAP, subs, [1] * len(subs))
    for name in SHAPES:
        if name.endswith("tracked"):
            assert merged[name] == (len(subs) + 1) // 2
            continue
        rows = np.full((len(subs), *full[name].shape), np.nan)
        for row, (sub, kept) in zip(rows, subs, strict=True):
            index = CMAP.index(name, kept)
            axes = [np.arange(n) if i is None else i for n, i in zip(row.shape, index, strict=True)]
            row[np.ix_(*axes)] = sub[name]
        trim = None if merge.kind == "median" else merge.trim
        columns = rows.reshape(len(subs), -1).T
        want = torch.tensor([oracle(column, trim) for column in columns]).view_as(full[name])
        want = torch.where(want.isnan(), full[name].double(), want).float()
        torch.testing.assert_close(merged[name], want, rtol=1e-6, atol=1e-6)


def test_the_mean_is_the_weighted_mean_bit_for_bit():
    states, weights, full = [state(1), state(2)], [3, 5], state(0)
    subs = [(s, CMAP.full()) for s in states]
    fishers = [torch.tensor([1.0, torch.nan]), torch.tensor([2.0, 4.0])]
    for got, want in (
        (Merge().networks(states, weights), weighted_mean(states, weights)),
        (
            Merge().overlapping(full, CMAP, subs, weights),
            average_overlap(full, CMAP, subs, weights),
        ),
    ):
        assert all(torch.equal(got[name], want[name]) for name in SHAPES)
    assert torch.equal(Merge().vectors(fishers, weights), federate(fishers, weights))


def test_a_wide_network_is_refused_among_others_of_another_shape():
    for merge in (Merge(), MEDIAN):
        with pytest.raises(ShapeError, match=r"linear\.bias"):
            merge.networks([state(1), {**state(2), "linear.bias": torch.zeros(9)}], [1, 1])
        with pytest.raises(ShapeError, match="no networks"):
            merge.networks([], [])


# One client of five lies ------------------------------------------------------------------------


def scaled(factor):
    def tamper(content):
        sent = content.array_records["state"].to_torch_state_dict()
        wild = {k: t * factor if t.is_floating_point() else t for k, t in sent.items()}
        return RecordDict({**dict(content), "state": ArrayRecord(wild)})

    return tamper


def lie(factor):
    return {"client-03": scaled(factor)}


@pytest.mark.parametrize("method", ["fedavg", "fedfip"])
@pytest.mark.parametrize(
    ("kind", "factor"), [("median", 1000.0), ("trimmed", -1.0), ("trimmed", -1000.0)]
)
def test_a_lie_leaves_every_entry_in_the_range_of_the_honest(method, kind, factor):
    federation = FederationOptions(clients=5, wait=1.0, merge=kind, trim=0.25)
    run = Federation(method, clients=5, federation=federation, tamper=lie(factor))
    merged = run.run(rounds=1)
    honest = [u.state for u in run.rounds[1].updates if u.client != "client-03"]
    assert len(honest) == 4
    for name, tensor in merged.items():
        rows = torch.stack([s[name] for s in honest])
        assert ((tensor >= rows.amin(0)) & (tensor <= rows.amax(0))).all(), name


def test_the_mean_is_carried_away_by_it():
    run = Federation("fedavg", clients=5, tamper=lie(1000.0))
    merged = run.run(rounds=1)
    honest = [u.state for u in run.rounds[1].updates if u.client != "client-03"]
    rows = torch.stack([s["7.weight"] for s in honest])
    outside = (merged["7.weight"] < rows.amin(0)) | (merged["7.weight"] > rows.amax(0))
    assert outside.double().mean() > 0.9


def test_a_lie_about_fisher_does_not_choose_the_mask():
    def tamper(content):
        extras = content.array_records["extras"].to_torch_state_dict()
        extras["fisher"] = extras["fisher"].flip(0) * 1000
        return RecordDict({**dict(content), "extras": ArrayRecord(extras)})

    federation = FederationOptions(clients=5, wait=1.0, merge="median")
    run = Federation(
        "fedfip", clients=5, federation=federation, tamper={"client-03": tamper}, keep=0.5
    )
    run.run(rounds=1)
    fishers = [u.extras["fisher"] for u in run.rounds[1].updates if u.client != "client-03"]
    rows = torch.stack(fishers)
    assert (run.server.importance <= rows.amax(0)).all()
    assert (run.server.importance >= rows.amin(0)).all()


def test_aligned_submodels_of_subflot_are_merged_robustly_as_well():
    federation = FederationOptions(clients=5, wait=1.0, merge="median")
    lied = Federation("subflot", clients=5, federation=federation, tamper=lie(1000.0), rates="0.0")
    plain = Federation("subflot", clients=5, tamper=lie(1000.0), rates="0.0")
    largest = [max(float(t.abs().max()) for t in f.run(1).values()) for f in (lied, plain)]
    assert largest[0] < 20 < largest[1]


def test_a_trim_that_drops_nobody_is_refused():
    with pytest.raises(ValueError, match=r"trim = 0.1: drops nobody of the 4 clients.*1/4"):
        FederationOptions(clients=4, merge="trimmed", trim=0.1)
    assert FederationOptions(clients=4, trim=0.1).merge == "mean"
