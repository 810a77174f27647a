import dataclasses
import json
import logging
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from task.data import Samples, domains
from task.data.partition import PARTITIONS, PartitionOptions, counts, local_split, partition
from task.data.split import generator, shares, stratified
from task.errors import DataError

LAWS = settings(derandomize=True, deadline=None, max_examples=60)
FEW = settings(derandomize=True, deadline=None, max_examples=8)  # flwr-datasets is slow


@pytest.fixture(scope="module", autouse=True)
def _cache_of_this_test(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make(sizes, classes: int = 3, seed: int = 0) -> Samples:
    """Samples sorted by domain, as in a data set; labels at random but none missing."""
    n = sum(sizes)
    y = np.arange(n) % classes
    np.random.default_rng(seed).shuffle(y)
    domain = np.repeat(np.arange(len(sizes)), sizes)
    return Samples(torch.zeros(n, 1), torch.from_numpy(y), torch.from_numpy(domain))


def held_domains(samples: Samples, index: np.ndarray) -> dict[int, int]:
    return dict(Counter(samples.domain[torch.from_numpy(index)].tolist()))


def held_classes(samples: Samples, index: np.ndarray) -> dict[int, int]:
    return dict(Counter(samples.y[torch.from_numpy(index)].tolist()))


# --- the arithmetic of the multi-domain split ---------------------------------------------------

sizes_of_domains = st.lists(st.integers(4, 90), min_size=1, max_size=6)


@given(st.integers(0, 200), st.lists(st.integers(1, 50), min_size=1, max_size=8))
@LAWS
def test_shares_sum_to_the_total_and_are_within_one_of_proportional(total, weight):
    part = shares(total, np.array(weight))
    assert part.sum() == total
    assert all(
        math.floor(total * w / sum(weight)) <= p <= math.ceil(total * w / sum(weight))
        for p, w in zip(part, weight, strict=True)
    )


@given(sizes_of_domains, st.data())
@LAWS
def test_places_are_spread_evenly_and_the_closed_form_of_most_clients_is_right(sizes, data):
    size = np.array(sizes)
    per_client = data.draw(st.integers(1, len(sizes)))
    least = data.draw(st.integers(1, 9))

    def fits(clients):
        number = domains.places(size, clients, per_client)
        assert number.sum() == clients * per_client
        assert number.max() - number.min() <= 1
        return (number * least <= size).all()

    most = domains.most_clients(size, per_client, least)
    assert [fits(clients) for clients in range(1, 100)] == [c <= most for c in range(1, 100)]


@given(sizes_of_domains, st.integers(1, 12), st.sampled_from([1e-3, 0.5, 50.0]), st.data())
@LAWS
def test_dealing_gives_every_client_its_domains_and_uses_every_sample_once(
    sizes, clients, alpha, data
):
    size = np.array(sizes) + 40
    per_client = data.draw(st.integers(1, len(sizes)))
    rng = np.random.default_rng(data.draw(st.integers(0, 5)))
    number = domains.places(size, clients, per_client)
    held = domains.hold(number, clients, per_client, rng)
    assert (held.sum(axis=1) == per_client).all()
    assert (held.sum(axis=0) == number).all()

    share = domains.divide(size, held, alpha, 3, rng)
    assert ((share > 0) == held).all()
    assert share[held].min() >= 3
    assert (share.sum(axis=0) == np.where(number > 0, size, 0)).all()

    domain = np.random.default_rng(1).permutation(np.repeat(np.arange(len(size)), size))
    parts = domains.deal(domain, share, rng)
    for part, row in zip(parts, share, strict=True):
        assert np.bincount(domain[part], minlength=len(size)).tolist() == row.tolist()
    used = np.concatenate(parts)
    assert len(set(used.tolist())) == len(used) == share.sum()


def test_all_pairs_of_domains_occur_about_equally_often():
    held = domains.hold(np.full(4, 12), 24, 2, np.random.default_rng(0))
    pairs = Counter(tuple(np.flatnonzero(row)) for row in held)
    assert len(pairs) == 6
    assert max(pairs.values()) - min(pairs.values()) <= 2


# --- every kind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PARTITIONS)
def test_clients_share_no_sample_and_together_have_all(kind):
    @given(st.lists(st.integers(60, 90), min_size=2, max_size=4), st.integers(4, 9), st.integers(0))
    @FEW
    def law(sizes, clients, seed):
        samples = make(sizes)
        options = PartitionOptions(kind=kind, seed=seed, min_samples=2, alpha=2.0)
        parts = partition(samples, options, clients)
        assert len(parts) == clients
        assert all((np.diff(part) > 0).all() and len(part) >= 2 for part in parts)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(samples)))

    law()
    assert law.hypothesis is not None


@given(st.lists(st.integers(60, 200), min_size=2, max_size=5), st.integers(1, 8), st.data())
@FEW
def test_a_multi_domain_client_holds_exactly_the_asked_number_of_domains(sizes, clients, data):
    per_client = data.draw(st.integers(2, len(sizes)))
    samples = make(sizes)
    options = PartitionOptions(domains_per_client=per_client, min_samples=6)
    parts = partition(samples, options, clients)
    held = [held_domains(samples, part) for part in parts]
    assert {len(row) for row in held} == {per_client}
    assert min(min(row.values()) for row in held) >= 6
    holders = Counter(domain for row in held for domain in row)
    assert max(holders.values()) - min(holders.get(d, 0) for d in range(len(sizes))) <= 1


def test_the_domains_of_a_multi_domain_client_have_unequal_shares():
    samples = make([2000, 2000, 1400, 2000])
    largest = [
        max(held_domains(samples, part).values()) / len(part)
        for part in partition(samples, PartitionOptions(), 20)
    ]
    assert np.mean(largest) > 0.7
    assert np.std(largest) > 0.05


def test_a_large_alpha_makes_the_shares_of_a_client_alike():
    samples = make([400] * 4)
    parts = partition(samples, PartitionOptions(alpha=1e4), 8)
    assert all(max(held_domains(samples, p).values()) < 0.55 * len(p) for p in parts)


def test_one_domain_clients_are_dealt_over_the_domains_evenly():
    samples = make([100, 200, 90, 60])
    parts = partition(samples, PartitionOptions(kind="one-domain"), 10)
    held = [held_domains(samples, part) for part in parts]
    assert {len(row) for row in held} == {1}
    assert sorted(Counter(d for row in held for d in row).values()) == [2, 2, 3, 3]


def test_a_pathological_client_has_exactly_the_asked_number_of_classes():
    samples = make([300, 300], classes=6)
    parts = partition(samples, PartitionOptions(kind="pathological", classes_per_client=3), 8)
    assert {len(held_classes(samples, part)) for part in parts} == {3}


def test_every_kind_but_the_domain_ones_mixes_the_domains():
    samples = make([300, 300], classes=3)
    for kind in ("iid", "dirichlet", "pathological"):
        parts = partition(samples, PartitionOptions(kind=kind, alpha=5.0), 3)
        assert all(min(held_domains(samples, p).values()) > 0.3 * len(p) for p in parts)


def test_a_small_alpha_of_dirichlet_is_more_uneven_than_a_large_one():
    samples = make([600, 600], classes=4)

    def dominance(alpha):
        options = PartitionOptions(kind="dirichlet", alpha=alpha, min_samples=2)
        parts = partition(samples, options, 5)
        return np.mean([max(held_classes(samples, p).values()) / len(p) for p in parts])

    assert dominance(0.2) > dominance(100.0) + 0.2


# --- seeds and the cache -------------------------------------------------------------------------


def as_lists(parts):
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("kind", PARTITIONS)
def test_a_seed_decides_the_partition_and_the_cache_returns_the_same(kind, monkeypatch, tmp_path):
    samples = make([80, 90, 70], classes=4)
    options = PartitionOptions(kind=kind, seed=3, alpha=2.0, min_samples=2)
    first = as_lists(partition(samples, options, 5))
    assert as_lists(partition(samples, options, 5)) == first  # from the cache
    assert as_lists(partition(samples, dataclasses.replace(options, seed=4), 5)) != first
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "another"))
    assert as_lists(partition(samples, options, 5)) == first  # built again


def test_other_samples_are_not_mistaken_for_cached_ones():
    options = PartitionOptions(kind="iid")
    assert sum(map(len, partition(make([40, 40]), options, 2))) == 80
    assert sum(map(len, partition(make([40, 41]), options, 2))) == 81
    samples, options = make([40, 40]), PartitionOptions(kind="one-domain")
    mixed = Samples(samples.x, samples.y, torch.arange(80) % 2)
    for each in (samples, mixed):
        parts = partition(each, options, 2)
        assert {len(held_domains(each, part)) for part in parts} == {1}


def test_a_cached_partition_needs_none_of_the_slow_packages(monkeypatch):
    samples = make([100, 100])
    first = as_lists(partition(samples, PartitionOptions(), 4))
    for module in ("flwr_datasets", "flwr_datasets.partitioner", "datasets", "pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it is an error now
    monkeypatch.delitem(sys.modules, "task.data.multidomain")
    assert as_lists(partition(samples, PartitionOptions(), 4)) == first
    with pytest.raises(ImportError):
        partition(samples, PartitionOptions(seed=99), 4)


def test_samples_that_nobody_holds_are_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        parts = partition(make([50, 60, 70]), PartitionOptions(kind="one-domain"), 2)
    assert sum(map(len, parts)) == 60 + 70  # the larger domains come first
    assert "50 of 180 samples are held by none of 2 clients" in caplog.text


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kind": "multi-domian"}, "'multi-domian': .* mean 'multi-domain'.; known: multi-"),
        ({"kind": "x"}, "kind = 'x': unknown; known: .*iid"),
        ({"alpha": 0.0}, "alpha = 0.0: must be > 0 and finite"),
        ({"alpha": math.nan}, "alpha = nan"),
        ({"alpha": math.inf}, "alpha = inf"),
        ({"test_fraction": 0.0}, "test-fraction = 0.0: must be in .0, 1."),
        ({"test_fraction": 1.0}, "test-fraction = 1.0"),
        ({"min_samples": 1}, "min-samples = 1: must be >= 2"),
        ({"seed": -1}, "seed = -1: must be >= 0"),
    ],
)
def test_an_option_out_of_range_is_refused_when_options_are_made(option, message):
    with pytest.raises(ValueError, match=message):
        PartitionOptions(**option)


@pytest.mark.parametrize(
    ("option", "clients", "message"),
    [
        ({"domains_per_client": 1}, 2, "domains-per-client = 1: accepted is 2 to 3"),
        ({"domains_per_client": 4}, 2, "domains-per-client = 4: accepted is 2 to 3"),
        ({"kind": "pathological", "classes_per_client": 6}, 2, "classes-per-client = 6: .* 1 to 5"),
        ({"kind": "iid"}, 0, "0 clients: .* serve 1 to 15;"),
        ({"kind": "iid"}, 16, "16 clients: .* serve 1 to 15;"),
        ({}, 10, "10 clients: .*min-samples = 8 these 120 samples serve 1 to 7;"),
        ({"kind": "one-domain"}, 15, "15 clients: .* serve 1 to 14;"),
        ({"kind": "dirichlet", "alpha": 0.01}, 9, "failed with alpha = 0.01.* take fewer clients"),
        ({"kind": "pathological"}, 15, "leaves client [0-9]+ of 15 with [0-7] samples"),
    ],
)
def test_what_the_data_cannot_serve_is_refused_with_what_it_can(option, clients, message):
    with pytest.raises(DataError, match=message):
        partition(make([48, 40, 32], classes=5), PartitionOptions(**option), clients)


def test_multi_domain_needs_two_domains():
    with pytest.raises(DataError, match="needs 2 domains, the data has 1; take 'iid'"):
        partition(make([90]), PartitionOptions(), 2)


@pytest.mark.parametrize("kind", ["multi-domain", "one-domain", "iid"])
def test_the_largest_number_of_clients_named_in_the_message_works(kind):
    samples, options = make([48, 40, 32]), PartitionOptions(kind=kind)
    with pytest.raises(DataError) as refused:
        partition(samples, options, 1000)
    most = int(str(refused.value).split("serve 1 to ")[1].split(";")[0])
    assert len(partition(samples, options, most)) == most
    with pytest.raises(DataError):
        partition(samples, options, most + 1)


# --- a client's own test samples -----------------------------------------------------------------


def marked_per_class(domain: list[int], y: list[int], fraction: float) -> Counter:
    """Oracle: how many of each (domain, class) are tested, counted out one by one."""
    out: Counter = Counter()
    for d in set(domain):
        mine = Counter(label for k, label in zip(domain, y, strict=True) if k == d)
        n = sum(mine.values())
        test = min(max(math.floor(fraction * n + 0.5), 1), n - 1)
        claim = {label: test * count / n for label, count in mine.items()}
        for label in mine:
            out[d, label] = math.floor(claim[label] + 1e-9)
        left = test - sum(out[d, label] for label in mine)
        for label in sorted(mine, key=lambda c: (round(out[d, c] - claim[c], 9), c))[:left]:
            out[d, label] += 1
    return +out


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=120),
    st.sampled_from([0.05, 0.2, 0.25, 0.5, 0.9]),
    st.integers(0, 3),
)
@LAWS
def test_the_stratified_split_agrees_with_counting_by_hand(rows, fraction, seed):
    domain, y = (list(column) for column in zip(*rows, strict=True))
    marked = stratified(np.array(domain), np.array(y), fraction, np.random.default_rng(seed))
    chosen = Counter(row for row, mark in zip(rows, marked, strict=True) if mark)
    expected = marked_per_class(domain, y, fraction)
    for d in set(domain):
        got, want = (
            sorted(c for (k, _), c in counted.items() if k == d) for counted in (chosen, expected)
        )
        assert got == want  # classes of equal claim may swap the one left over
        n = domain.count(d)
        for label in range(5):
            exact = sum(want) * rows.count((d, label)) / n
            assert abs(chosen[d, label] - exact) < 1


@given(st.lists(st.integers(2, 40), min_size=1, max_size=4), st.integers(0, 20))
@LAWS
def test_a_local_test_has_some_and_not_all_of_every_domain_held(sizes, client):
    samples = make(sizes)
    index = np.flatnonzero(np.arange(len(samples)) % 7 != client % 7)  # some part
    options = PartitionOptions()
    train, test = local_split(samples, index, options, client)
    assert sorted([*train, *test]) == index.tolist()
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()
    for domain, n in held_domains(samples, index).items():
        if n > 1:
            assert 1 <= held_domains(samples, test).get(domain, 0) < n


def test_a_sample_that_is_alone_in_its_domain_is_trained_on():
    samples = make([1, 9])
    train, test = local_split(samples, np.arange(10), PartitionOptions(), 0)
    assert 0 in train
    assert len(test) == 2


def test_a_local_split_is_repeatable_and_moves_with_seed_and_client():
    samples, index = make([60, 60]), np.arange(120)

    def tested(client, **option):
        return local_split(samples, index, PartitionOptions(**option), client)[1].tolist()

    assert tested(1) == tested(1)
    assert tested(1) != tested(2)
    assert tested(1) != tested(1, seed=2)
    assert len(tested(1, test_fraction=0.5)) == 60


def test_generators_of_different_purposes_differ():
    drawn = {
        generator(*key).integers(1 << 60)
        for key in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1)]
    }
    assert len(drawn) == 5
    assert generator(1, "a").integers(1 << 60) in drawn


def test_counts_name_the_domains_held_and_list_every_class():
    samples = make([4, 3, 5], classes=2)
    index = np.array([0, 1, 2, 3, 7, 8])
    row = counts(samples, index, ("a", "b", "c"), ("0", "1", "2"))
    assert row["domains"] == {"a": 4, "c": 2}
    assert row["classes"] == [held_classes(samples, index).get(c, 0) for c in range(3)]
    assert json.loads(json.dumps(row)) == row


def test_a_validation_share_is_taken_from_the_training_samples_alone():
    samples, index = make([40, 30]), np.arange(70)
    train, test = local_split(samples, index, PartitionOptions(), 3)
    rest, scored = local_split(samples, index, PartitionOptions(validation_fraction=0.25), 3)
    assert not np.intersect1d(scored, test).size
    assert not np.intersect1d(rest, test).size
    assert sorted([*rest, *scored]) == train.tolist()
    assert len(scored) == round(0.25 * len(train))
