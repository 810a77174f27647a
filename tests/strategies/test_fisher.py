"""Fisher information of channels against one pass per sample, closed forms, and laws."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from strategies.errors import ShapeError
from strategies.ops.fisher import federate, gate_fisher, pool, renew, weight_fisher
from task.channels import ChannelMap
from task.data.dataset import Samples
from task.submodel import slice_module
from task.trace import trace

law = settings(derandomize=True, deadline=None, max_examples=20)
WRITERS = {
    "stem": ["stem", "again"],
    "expand": ["expand", "deep"],
    "project": ["project"],
    "hidden": ["hidden"],
}


class Net(nn.Module):
    """conv + BN, a residual group, a depthwise chain, a conv with bias, flatten, linear.

    Without gates given it runs as any network; with them it multiplies by hand, which is the
    definition that the code under test must meet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.again = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.expand = nn.Conv2d(6, 8, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.norm4 = nn.BatchNorm2d(8)
        self.project = nn.Conv2d(8, 5, 3, dilation=2, padding=2)
        self.inplace = nn.ReLU(inplace=True)
        self.hidden = nn.Linear(20, 7)
        self.classifier = nn.Linear(7, 4)

    def forward(self, x, m=None):
        m = m or dict.fromkeys(WRITERS, torch.ones(1, dtype=x.dtype))
        gate = {name: g.view(1, -1, 1, 1) for name, g in m.items()}
        s = F.relu(self.norm1(self.stem(x)) * gate["stem"])
        s = F.relu(s + self.norm2(self.again(s)) * gate["stem"])
        e = F.relu6(self.norm3(self.expand(s)) * gate["expand"])
        e = F.relu(self.norm4(self.deep(e)) * gate["expand"])
        p = self.inplace(self.project(e) * gate["project"])
        h = self.hidden(F.adaptive_avg_pool2d(p, 2).flatten(1)) * m["hidden"]
        return self.classifier(F.relu(h))


def randomise(model: nn.Module) -> nn.Module:
    """Give every norm statistics and an affine part that matter."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.running_mean, -0.3, 0.3),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.2, 0.4),
            ):
                tensor.uniform_(low, high)
        elif getattr(module, "bias", None) is not None:
            module.bias.data.uniform_(0.0, 1.0)  # keeps channels alive
    return model.double()


def draw(count: int, shape=(3, 8, 8), classes=4, domains=2) -> Samples:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (count,), generator=generator)
    return Samples(x, y, torch.arange(count) % domains)


@pytest.fixture(scope="module")
def net() -> tuple[Net, ChannelMap]:
    torch.manual_seed(0)
    model = randomise(Net())
    cmap = trace(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    assert cmap.groups == {"stem": 6, "expand": 8, "project": 5, "hidden": 7}
    return model, cmap


SAMPLES = draw(11)


def close(found, wanted, rel=1e-6):
    """Compare relative to each vector's own size."""
    wanted = torch.as_tensor(wanted).double()
    return bool((found.double() - wanted).abs().max() <= rel * wanted.abs().max())


# --- oracles: one backward pass per sample --------------------------------------------------------


def gate_loop(model, cmap, samples):
    rows = []
    for i in range(len(samples)):
        m = {
            n: torch.ones(w, dtype=torch.float64, requires_grad=True)
            for n, w in cmap.groups.items()
        }
        loss = F.cross_entropy(model(samples.x[i : i + 1], m), samples.y[i : i + 1])
        rows.append(torch.cat(torch.autograd.grad(loss, list(m.values()))) ** 2)
    return torch.stack(rows)


def weight_loop(model, cmap, samples):
    rows = []
    for i in range(len(samples)):
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(samples.x[i : i + 1]), samples.y[i : i + 1]).backward()
        row = []
        for name, width in cmap.groups.items():
            blocks = [
                [getattr(model, layer).weight.grad[j] for layer in WRITERS[name]]
                for j in range(width)
            ]
            row += [sum((b**2).sum() for b in bs) / sum(b.numel() for b in bs) for bs in blocks]
        rows.append(torch.stack(row))
    model.zero_grad(set_to_none=True)
    return torch.stack(rows)


LOOPS = [(gate_fisher, gate_loop), (weight_fisher, weight_loop)]


@pytest.mark.parametrize(("measure", "loop"), LOOPS)
def test_one_pass_for_all_domains_equals_one_pass_per_sample(net, measure, loop):
    model, cmap = net
    rows = loop(model.eval(), cmap, SAMPLES)
    found = measure(model, cmap, SAMPLES, batch=4)
    assert list(found) == [0, 1]
    for k, vector in found.items():
        want = rows[SAMPLES.domain == k].mean(0)
        for name, part in cmap.split(vector).items():
            assert close(part, cmap.split(want)[name]), name


@pytest.mark.parametrize(("measure", "loop"), LOOPS)
def test_the_squared_mean_gradient_is_something_else_unless_all_samples_are_one(net, measure, loop):
    model, cmap = net
    one = SAMPLES.take(np.zeros(6, dtype=int))
    # N copies: the mean of squares is the square of the mean, which is the loop over one sample.
    assert close(measure(model, cmap, one)[0], loop(model.eval(), cmap, one.take(np.arange(1)))[0])
    # Distinct samples: the batch mean's gradient shrinks; this is the mistake to catch.
    same_domain = Samples(SAMPLES.x, SAMPLES.y, torch.zeros(11, dtype=torch.int64))
    m = {n: torch.ones(w, dtype=torch.float64, requires_grad=True) for n, w in cmap.groups.items()}
    mean = F.cross_entropy(model(SAMPLES.x, m), SAMPLES.y)
    squared = torch.cat(torch.autograd.grad(mean, list(m.values()))) ** 2
    assert squared.sum() < 0.5 * gate_fisher(model, cmap, same_domain)[0].sum()


def test_gate_gradient_is_gamma_dgamma_plus_beta_dbeta_behind_one_norm():
    torch.manual_seed(0)
    model = randomise(
        nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3)
        )
    )
    cmap = trace(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    sample = draw(1, classes=3)
    F.cross_entropy(model.eval()(sample.x), sample.y).backward()
    norm = model[1]
    want = (norm.weight * norm.weight.grad + norm.bias * norm.bias.grad) ** 2
    assert close(gate_fisher(model, cmap, sample)[0], want.detach())


def test_linear_softmax_has_the_closed_form():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    cmap = trace(model, torch.zeros(2, 4, dtype=torch.float64))
    samples = draw(9, shape=(4,), classes=3, domains=1)
    z = model[0](samples.x)
    error = model(samples.x).softmax(1) - F.one_hot(samples.y, 3)
    want = ((z * (error @ model[1].weight)) ** 2).mean(0)
    assert close(gate_fisher(model, cmap, samples)[0], want.detach())


class Tokens(nn.Module):
    """Layers that the fast rules of the filters do not cover, beside some that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.mix = nn.Linear(6, 8)
        self.time = nn.Conv1d(8, 5, 3, stride=2, groups=1)
        self.same = nn.Conv1d(5, 4, 3, padding="same")
        self.tied = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        h = F.relu(self.mix(self.embedding(ids))).transpose(1, 2)
        h = F.relu(self.same(F.relu(self.time(h)))).mean(2)
        return self.head(F.relu(self.tied(h)))


def test_filters_of_embeddings_tokens_and_series_equal_the_loop_too():
    torch.manual_seed(0)
    model = Tokens().double()
    cmap = trace(model, torch.zeros(2, 9, dtype=torch.int64))
    assert cmap.groups == {"embedding": 6, "mix": 8, "time": 5, "same": 4, "tied": 4}
    ids = torch.randint(0, 12, (5, 9), generator=torch.Generator().manual_seed(3))
    samples = Samples(ids, torch.tensor([0, 1, 2, 1, 0]), torch.zeros(5, dtype=torch.int64))
    rows = []
    for i in range(5):
        model.zero_grad()
        F.cross_entropy(model(ids[i : i + 1]), samples.y[i : i + 1]).backward()
        blocks = [model.embedding.weight.grad.T] + [
            getattr(model, name).weight.grad.flatten(1) for name in list(cmap.groups)[1:]
        ]
        rows.append(torch.cat([block.square().mean(1) for block in blocks]))
    assert close(weight_fisher(model, cmap, samples)[0], torch.stack(rows).mean(0))


class Odd(nn.Module):
    """A layer changed in place before its norm, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.inplace = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(5)
        self.twice = nn.Conv2d(5, 5, 3, padding=1)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm(self.inplace(self.first(x)))
        for _ in range(2):
            x = x + torch.tanh(self.twice(x))
        return self.head(x.mean((2, 3)))


def test_filters_of_layers_changed_in_place_or_used_twice_equal_the_loop_too():
    torch.manual_seed(0)
    model = randomise(Odd())
    cmap = trace(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    assert cmap.groups == {"first": 5}
    samples = Samples(SAMPLES.x, SAMPLES.y, torch.zeros(11, dtype=torch.int64))
    found = weight_fisher(model, cmap, samples)[0]
    rows = []
    for i in range(11):
        model.zero_grad()
        F.cross_entropy(model.eval()(samples.x[i : i + 1]), samples.y[i : i + 1]).backward()
        both = [model.first.weight.grad.flatten(1), model.twice.weight.grad.flatten(1)]
        rows.append(torch.cat(both, 1).square().mean(1))
    assert close(found, torch.stack(rows).mean(0))


@pytest.mark.parametrize("measure", [gate_fisher, weight_fisher])
def test_the_mode_of_the_network_does_not_matter(net, measure):
    model, cmap = net
    want = measure(model.eval(), cmap, SAMPLES)
    found = measure(copy.deepcopy(model).train(), cmap, SAMPLES)
    assert all(torch.equal(found[k], want[k]) for k in want)


@pytest.mark.parametrize("measure", [gate_fisher, weight_fisher])
def test_measuring_leaves_no_trace_in_the_network_or_the_random_state(net, measure):
    model, cmap = copy.deepcopy(net[0]), net[1]
    model.train()
    model.norm3.eval()  # a mixed state, as with frozen norms
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    buffers = dict(model.named_buffers())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    measure(model, cmap, SAMPLES)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.stem.weight.grad, torch.ones_like(model.stem.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "stem.weight")


# --- pruned channels whose weights are present ----------------------------------------------------


def shut(cmap, *, every=2):
    closed = {name: torch.arange(width) % every == 1 for name, width in cmap.groups.items()}
    kept = {name: np.flatnonzero(~c.numpy()) for name, c in closed.items()}
    return closed, kept


class Ghost(nn.Module):
    """A depthwise layer whose input is read a second time: not a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        a = F.relu(self.first(x))
        return self.head(torch.cat([a, F.relu(self.deep(a))], 1).mean((2, 3)))


@pytest.mark.parametrize("measure", [gate_fisher, weight_fisher])
@pytest.mark.parametrize("build", [Net, Ghost])
def test_other_channels_are_measured_as_in_the_sliced_network(build, measure):
    torch.manual_seed(0)
    model = randomise(build())
    cmap = trace(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    closed, kept = shut(cmap)
    small = slice_module(model, cmap, kept)
    want = measure(small, cmap.restrict(kept), SAMPLES)
    found = measure(model, cmap, SAMPLES, closed=closed)
    inside = torch.from_numpy(cmap.mask(kept))
    for k, vector in want.items():
        assert close(found[k][inside], vector, rel=1e-4)


@pytest.mark.parametrize("group", ["stem", "project", "hidden"])
def test_a_pruned_channel_gets_the_one_sided_derivative_of_the_pruned_network(net, group):
    model, cmap = net
    closed, _ = shut(cmap)
    found = gate_fisher(model.eval(), cmap, SAMPLES.take(np.arange(1)), closed=closed)[0]
    h = 1e-6
    for j in closed[group].nonzero().flatten().tolist():
        gates = {name: (~c).double() for name, c in closed.items()}
        ends = []
        for value in (0.0, h):
            gates[group][j] = value
            ends.append(F.cross_entropy(model(SAMPLES.x[:1], gates), SAMPLES.y[:1]))
        slope = (ends[1] - ends[0]).item() / h
        assert cmap.split(found)[group][j] == pytest.approx(slope**2, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("measure", [gate_fisher, weight_fisher])
@pytest.mark.parametrize(
    ("group", "reader"), [("expand", "project"), ("project", "hidden"), ("hidden", "classifier")]
)
def test_a_pruned_important_channel_is_seen_at_its_full_scale(net, measure, group, reader):
    # Readers that hardly use the channel make the closed and the open network the same to first
    # order, so both must give the channel the same value: also behind two gates in a row.
    model, cmap = copy.deepcopy(net[0]), net[1]
    j = int(cmap.split(measure(model, cmap, SAMPLES)[0])[group].argmax())
    weight = getattr(model, reader).weight.data
    columns = weight.shape[1] // cmap.groups[group]
    weight[:, j * columns : (j + 1) * columns] *= 1e-6
    closed = {group: torch.arange(cmap.groups[group]) == j}
    whole = measure(model, cmap, SAMPLES)
    for k, vector in measure(model, cmap, SAMPLES, closed=closed).items():
        want = cmap.split(whole[k])[group][j]
        assert want > 0
        assert cmap.split(vector)[group][j] == pytest.approx(float(want), rel=1e-3, abs=0)


@pytest.mark.parametrize(
    "closed", [{"stem": torch.ones(3, dtype=torch.bool)}, {"x": torch.ones(3)}]
)
def test_closed_channels_of_another_network_are_refused(net, closed):
    with pytest.raises(ShapeError, match=r"closed\['(stem|x)'\]: shape \(3,\).*'expand': 8"):
        gate_fisher(*net, SAMPLES, closed=closed)


# --- pooling --------------------------------------------------------------------------------------


def test_domains_pool_to_the_fisher_of_all_of_a_clients_samples(net):
    model, cmap = net
    everything = Samples(SAMPLES.x, SAMPLES.y, torch.zeros(11, dtype=torch.int64))
    pooled = pool(gate_fisher(model, cmap, SAMPLES), {0: 6, 1: 5})
    assert close(pooled, gate_fisher(model, cmap, everything)[0])


@pytest.mark.parametrize("cuts", [[3, 7], [1, 2, 9], [5]])
def test_clients_merge_to_the_fisher_of_all_data_however_it_is_split_and_ordered(net, cuts):
    model, cmap = net
    clients = [SAMPLES.take(index) for index in np.split(np.arange(11), cuts)]
    vectors, sizes = [], []
    for client in clients:
        counts = client.domain.bincount().tolist()
        per_domain = gate_fisher(model, cmap, client)
        vectors.append(pool(per_domain, {k: counts[k] for k in per_domain}))
        sizes.append(len(client))
    everything = Samples(SAMPLES.x, SAMPLES.y, torch.zeros(11, dtype=torch.int64))
    want = gate_fisher(model, cmap, everything)[0]
    assert close(federate(vectors, sizes), want)
    assert close(federate(vectors[::-1], sizes[::-1]), want)


def test_federate_averages_over_the_clients_that_measured_a_channel():
    nan = torch.nan
    vectors = [torch.tensor([1.0, 2.0, nan, nan]), torch.tensor([4.0, nan, 5.0, nan])]
    merged = federate(vectors, [1.0, 3.0])
    assert merged.tolist() == pytest.approx([13 / 4, 2.0, 5.0, nan], nan_ok=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: federate([], []), "at least one vector"),
        (lambda: federate([torch.ones(2)], [1.0, 2.0]), "2 weights"),
        (lambda: federate([torch.ones(2), torch.ones(3)], [1.0, 2.0]), r"\(2,\), \(3,\)"),
        (lambda: pool({}, {}), "none"),
        (lambda: pool({0: torch.ones(2), 3: torch.ones(2)}, {0: 5}), r"domains \[3\]"),
    ],
)
def test_vectors_that_cannot_be_merged_are_refused(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


# --- renewal --------------------------------------------------------------------------------------

TWO = ChannelMap({"a": 3, "b": 2}, {}, (), {"a": True, "b": True}, {})
positive = st.lists(st.floats(0.01, 100), min_size=5, max_size=5).map(torch.tensor)


@law
@given(positive, positive, st.sampled_from([0.0, 0.3, 0.9]))
def test_with_everything_measured_renewal_is_the_running_mean_of_the_paper(
    previous, measured, kappa
):
    torch.testing.assert_close(renew(None, measured, TWO, kappa), measured)
    want = kappa * previous + (1 - kappa) * measured
    torch.testing.assert_close(renew(previous, measured, TWO, kappa), want)


def test_an_unmeasured_channel_follows_the_drift_of_its_own_group():
    previous = torch.tensor([10.0, 20.0, 40.0, 1.0, 1.0])
    measured = torch.tensor([1.0, 2.0, torch.nan, 3.0, torch.nan])
    # Group a fell tenfold, group b grew threefold: the stale 40 must not outrank the fresh ones.
    assert renew(previous, measured, TWO).tolist() == pytest.approx([1.0, 2.0, 4.0, 3.0, 3.0])
    assert renew(previous, measured, TWO, 0.5).tolist() == pytest.approx([5.5, 11, 22, 2.0, 2.0])


def test_what_was_never_measured_stays_unknown_and_does_not_enter_the_drift():
    nan = torch.nan
    first = torch.tensor([1.0, nan, 2.0, nan, nan])
    once = renew(None, first, TWO)
    torch.testing.assert_close(once, first, equal_nan=True)
    # Measured later, it does not count as a rise from 0: the stale 2.0 moves with the first alone.
    later = renew(once, torch.tensor([0.5, 8.0, nan, nan, nan]), TWO, 0.5)
    torch.testing.assert_close(later, torch.tensor([0.75, 8.0, 1.5, nan, nan]), equal_nan=True)
    previous = torch.tensor([nan, 2.0, 4.0, 5.0, 6.0])
    measured = torch.tensor([9.0, 1.0, nan, nan, nan])
    assert renew(previous, measured, TWO).tolist() == [9.0, 1.0, 2.0, 5.0, 6.0]


def test_a_group_of_zeros_divides_by_nothing():
    nan = torch.nan
    previous = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    measured = torch.tensor([1.0, nan, nan, 0.0, nan])
    assert renew(previous, measured, TWO).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@law
@given(positive, positive, st.lists(st.booleans(), min_size=5, max_size=5), st.integers(-20, 20))
def test_renewal_scales_with_the_measurement_and_forgets_nothing(previous, measured, hidden, power):
    measured = torch.where(torch.tensor(hidden), torch.nan, measured)
    once = renew(previous, measured, TWO)
    scaled = renew(previous, measured * 2.0**power, TWO)
    assert torch.isfinite(once).all()
    seen = [~torch.tensor(hidden)[:3].all(), ~torch.tensor(hidden)[3:].all()]
    for part, again, known in zip(
        TWO.split(once).values(), TWO.split(scaled).values(), seen, strict=True
    ):
        torch.testing.assert_close(again, part * 2.0**power if known else part)


def test_vectors_of_another_network_are_not_renewed():
    with pytest.raises(ShapeError, match=r"measured: shape \(4,\), the network has 5"):
        renew(torch.ones(5), torch.ones(4), TWO)
    with pytest.raises(ShapeError, match=r"previous: shape \(4,\)"):
        renew(torch.ones(4), torch.ones(5), TWO)
