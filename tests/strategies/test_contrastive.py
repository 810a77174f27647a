"""Signatures, prototypes and the structural contrastive loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from strategies.errors import ShapeError
from strategies.ops.contrastive import (
    contrastive_loss,
    move_prototypes,
    reproject,
    signature,
    structural_loss,
)
from strategies.ops.fisher import gate_fisher
from task.channels import ChannelMap
from task.data.dataset import Samples
from task.trace import trace

law = settings(derandomize=True, deadline=None, max_examples=30)
CMAP = ChannelMap({"a": 4, "b": 3}, {}, (), {"a": True, "b": True}, {})
ALL = np.ones(7, dtype=bool)

fishers = st.lists(st.floats(0.01, 100), min_size=7, max_size=7).map(torch.tensor)
masks = st.lists(st.booleans(), min_size=7, max_size=7).filter(any).map(np.array)
simplex = fishers.map(lambda f: f / f.sum())


# --- signatures and prototypes --------------------------------------------------------------------


@law
@given(fishers, masks, st.integers(-60, 60), st.sampled_from(["global", "layer"]))
def test_a_signature_is_on_the_simplex_of_the_mask_and_has_no_scale(fisher, mask, power, norm):
    v = signature(fisher, mask, CMAP, norm=norm)
    assert v.sum() == pytest.approx(1.0, abs=1e-6)
    assert (v >= 0).all()
    assert (v[~torch.from_numpy(mask)] == 0).all()
    torch.testing.assert_close(signature(fisher * 2.0**power, mask, CMAP, norm=norm), v)


def test_a_signature_is_fisher_over_the_sum_of_the_shared_channels():
    fisher = torch.tensor([1.0, 2, 3, torch.nan, 4, 10, 6])
    mask = np.array([1, 1, 1, 0, 1, 0, 1], dtype=bool)
    want = torch.tensor([1.0, 2, 3, 0, 4, 0, 6]) / 16
    torch.testing.assert_close(signature(fisher, mask, CMAP), want)
    layer = torch.tensor([1 / 6, 2 / 6, 3 / 6, 0, 0.4, 0, 0.6]) / 2
    torch.testing.assert_close(signature(fisher, mask, CMAP, norm="layer"), layer)


def test_a_group_without_information_leaves_all_mass_to_the_others():
    fisher = torch.tensor([1.0, 1, 1, 1, 0, 0, 0])
    v = signature(fisher, ALL, CMAP, norm="layer")
    assert v.tolist() == [0.25] * 4 + [0.0] * 3
    assert signature(0 * fisher, ALL, CMAP).tolist() == [0.0] * 7


@law
@given(simplex, st.lists(st.tuples(simplex, st.integers(1, 99)), min_size=1, max_size=4))
def test_prototypes_move_on_the_simplex_between_staying_and_the_weighted_mean(old, clients):
    uploads = [{2: client} for client in clients]
    mean = sum(n * v for v, n in clients) / sum(n for _, n in clients)
    torch.testing.assert_close(move_prototypes({2: old}, uploads, 0.0)[2], mean)
    torch.testing.assert_close(move_prototypes({2: old}, uploads, 1.0)[2], old)
    torch.testing.assert_close(move_prototypes({}, uploads, 0.5)[2], mean)  # a new domain
    moved = move_prototypes({2: old}, uploads, 0.4)[2]
    torch.testing.assert_close(moved, 0.4 * old + 0.6 * mean)
    assert moved.sum() == pytest.approx(1.0, abs=1e-6)


def test_a_domain_that_nobody_saw_keeps_its_prototype_and_domains_are_sorted():
    old = {3: torch.ones(7) / 7}
    moved = move_prototypes(old, [{1: (torch.eye(7)[0], 5)}, {0: (torch.eye(7)[1], 0)}], 0.4)
    assert list(moved) == [1, 3]  # a domain without samples says nothing
    assert torch.equal(moved[3], old[3])


@law
@given(simplex, masks)
def test_reprojection_puts_all_mass_on_the_new_mask(p, mask):
    inside = torch.from_numpy(mask)
    new = reproject({0: p}, mask)[0]
    torch.testing.assert_close(new, torch.where(inside, p, 0) / p[inside].sum())
    lost = reproject({0: torch.where(inside, 0, p)}, mask)[0]  # no mass left
    torch.testing.assert_close(lost, inside.float() / inside.sum())


# --- the loss as a function of the signature ------------------------------------------------------


@law
@given(simplex, simplex, st.integers(2, 6))
def test_equal_prototypes_cannot_be_told_apart(v, p, count):
    loss = contrastive_loss(v, dict.fromkeys(range(count), p), 1)
    assert loss.item() == pytest.approx(math.log(count), rel=1e-5)


@law
@given(simplex, st.lists(simplex, min_size=2, max_size=6), st.integers(0, 1))
def test_the_loss_equals_its_definition_and_stays_within_its_bounds(v, prototypes, domain):
    loss = contrastive_loss(v, dict(enumerate(prototypes)), domain).item()
    similarity = [float(v @ p / (v.norm() * p.norm())) for p in prototypes]
    others = sum(math.exp(s) for s in similarity)
    assert loss == pytest.approx(-math.log(math.exp(similarity[domain]) / others), rel=1e-4)
    rest = len(prototypes) - 1
    assert math.log(1 + rest / math.e) - 1e-6 <= loss <= math.log(1 + rest * math.e) + 1e-6


def test_orthogonal_prototypes_reach_the_bounds_and_a_low_temperature_sharpens():
    one, two = torch.eye(7)[0], torch.eye(7)[1]
    prototypes = {4: one, 9: two}
    assert contrastive_loss(one, prototypes, 4).item() == pytest.approx(math.log(1 + 1 / math.e))
    assert contrastive_loss(one, prototypes, 9).item() == pytest.approx(math.log(1 + math.e))
    assert contrastive_loss(one, prototypes, 9, tau=0.1).item() == pytest.approx(10.0, abs=1e-4)


@pytest.mark.parametrize("prototypes", [{}, {0: ALL}, {1: ALL, 2: ALL}])
def test_without_anything_to_compare_the_loss_is_zero(prototypes):
    prototypes = {k: torch.from_numpy(p).float() / 7 for k, p in prototypes.items()}
    assert contrastive_loss(torch.ones(7) / 7, prototypes, 0).item() == 0.0


# --- the loss as a function of the weights --------------------------------------------------------


class Block(nn.Module):
    """conv + BN, a residual group, two linear layers; smooth or not."""

    def __init__(self, act) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(5)
        self.again = nn.Conv2d(5, 5, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(5 * 9, 6)
        self.head = nn.Linear(6, 3)
        self.act = act

    def forward(self, x):
        s = self.act(self.norm1(self.stem(x)))
        s = self.act(s + self.norm2(self.again(s)))
        return self.head(self.act(self.hidden(self.drop(s).flatten(1))))


def setting(act=F.silu, dtype=torch.float64):
    """A network, a batch of 16, three prototypes and a mask that leaves channels out."""
    torch.manual_seed(0)
    model = Block(act).to(dtype)
    for norm in (model.norm1, model.norm2):
        norm.running_mean.uniform_(-0.3, 0.3)
        norm.running_var.uniform_(0.5, 2.0)
    x, y = torch.randn(16, 2, 3, 3, dtype=dtype), torch.randint(0, 3, (16,))
    cmap = trace(model, x[:2])
    assert cmap.groups == {"stem": 5, "hidden": 6}
    prototypes = {k: torch.rand(11) ** 4 for k in (0, 2, 3)}
    mask = np.arange(11) % 4 != 2
    return model, cmap, x, y, 2, reproject(prototypes, mask), mask


def gradient(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def cosine(a, b):
    return F.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
@pytest.mark.parametrize("norm", ["global", "layer"])
def test_the_value_is_the_loss_of_the_batchs_fisher_signature(mode, norm):
    model, cmap, x, y, domain, prototypes, mask = setting()
    batch = Samples(x, y, torch.full((16,), domain))
    v = signature(gate_fisher(model, cmap, batch)[domain], mask, cmap, norm=norm)
    want = contrastive_loss(v, prototypes, domain, 0.5).item()
    loss = structural_loss(
        model, cmap, x, y, domain, prototypes, mask, tau=0.5, mode=mode, norm=norm
    )
    assert loss.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("act", [F.silu, F.gelu])
@pytest.mark.parametrize("norm", ["global", "layer"])
def test_double_has_the_gradient_of_a_central_difference_over_the_weights(act, norm):
    model, *rest = setting(act)

    def loss():
        return structural_loss(model, *rest, tau=0.5, mode="double", norm=norm)

    grads = torch.autograd.grad(loss(), list(model.parameters()), materialize_grads=True)
    generator = torch.Generator().manual_seed(5)
    for (name, weight), grad in zip(model.named_parameters(), grads, strict=True):
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
            ends.append(loss().item())
            with torch.no_grad():
                weight.sub_(direction, alpha=step)
        slope = (ends[0] - ends[1]) / 2e-5
        assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize("act", [F.silu, F.gelu])
@pytest.mark.parametrize(("change", "least"), [(1e-2, 0.999999), (0.1, 0.9999), (1.0, 0.99)])
def test_gate_differences_have_the_direction_and_length_of_the_double_gradient(act, change, least):
    model, *rest = setting(act)
    exact = gradient(model, structural_loss(model, *rest, mode="double"))
    cheap = gradient(model, structural_loss(model, *rest, mode="gate-fd", change=change))
    assert exact.norm() > 0
    assert cosine(exact, cheap) > least
    assert (cheap.norm() / exact.norm()).item() == pytest.approx(
        1.0, abs=0.1 if change == 1 else 1e-3
    )


def step_gradient(mode):
    """Gradient of one whole training step: cross-entropy in train mode and the extra term."""
    model, cmap, x, y, *rest = setting(F.relu, torch.float32)
    model.drop.p = 0.0
    extra = structural_loss(model, cmap, x, y, *rest, mode=mode)  # before the statistics move
    model.train()
    loss = F.cross_entropy(model(x), y)
    return gradient(model, loss if extra is None else loss + 10 * extra)


def test_the_term_moves_the_weights_unless_it_is_switched_off():
    plain = step_gradient("none")
    assert (step_gradient("double") - plain).abs().max() > 1e-4
    assert (step_gradient("gate-fd") - plain).abs().max() > 1e-4


def test_switched_off_it_is_no_term_at_all():
    model, *rest = setting()
    assert structural_loss(model, *rest, mode="none") is None


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
@pytest.mark.parametrize("known", [[], [2], [0, 3]])
def test_too_few_prototypes_add_no_term(mode, known):
    model, cmap, x, y, domain, prototypes, mask = setting()
    few = {k: prototypes[k] for k in known}
    assert structural_loss(model, cmap, x, y, domain, few, mask, mode=mode) is None


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
@pytest.mark.parametrize("act", [F.silu, F.relu])
def test_a_small_step_against_the_gradient_lowers_the_loss_of_the_batch(mode, act):
    model, *rest = setting(act)
    loss = structural_loss(model, *rest, mode=mode)
    grad = gradient(model, loss)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    step = 1e-4 * weights.norm() / grad.norm()
    nn.utils.vector_to_parameters(weights - step * grad, model.parameters())
    assert structural_loss(model, *rest, mode=mode).item() < loss.item()


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
def test_statistics_modes_gradients_and_random_state_stay(mode):
    model, *rest = setting()
    model.train()
    model.norm1.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    structural_loss(model, *rest, mode=mode)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
def test_the_gradient_is_that_of_the_moment_whatever_mode_the_network_is_in_or_gets(mode):
    model, cmap, x, y, *rest = setting()
    want = gradient(model.eval(), structural_loss(model, cmap, x, y, *rest, mode=mode))
    loss = structural_loss(model.train(), cmap, x, y, *rest, mode=mode)
    model(3 * x + 1)  # a training step moves the statistics before the backward pass
    torch.testing.assert_close(gradient(model, loss), want)


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
def test_autocast_does_not_reach_the_signature(mode):
    model, *rest = setting(F.relu, torch.float32)
    want = structural_loss(model, *rest, mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        found = structural_loss(model, *rest, mode=mode)
    assert found.item() == want.item()
    assert torch.equal(gradient(model, found), gradient(model, want))


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
def test_a_batch_without_any_gradient_adds_no_term(mode):
    model, *rest = setting(F.relu, torch.float32)
    nn.init.zeros_(model.head.weight)  # the logits do not depend on any channel
    assert structural_loss(model, *rest, mode=mode) is None


@pytest.mark.parametrize("mode", ["double", "gate-fd"])
@pytest.mark.parametrize("scale", [1e-4, 1e-8])
def test_vanishing_gradients_still_give_a_finite_term_of_the_same_value(mode, scale):
    model, *rest = setting(F.relu, torch.float32)
    nn.init.zeros_(model.head.bias)
    nn.init.normal_(model.head.weight, std=1e-4)  # so small that the softmax stays uniform
    want = structural_loss(model, *rest, mode=mode).item()
    model.head.weight.data *= scale
    loss = structural_loss(model, *rest, mode=mode)
    assert loss.item() == pytest.approx(want, rel=1e-3)
    assert torch.isfinite(gradient(model, loss)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: signature(torch.ones(6), ALL, CMAP), r"fisher \(6,\).*7 channels"),
        (lambda: signature(torch.ones(7), ALL, CMAP, norm="group"), "'global' or 'layer'"),
        (lambda: move_prototypes({}, [], 1.5), "mu=1.5"),
        (lambda: contrastive_loss(torch.ones(7), {}, 0, tau=0.0), "tau=0.0"),
        (lambda: structural_loss(*setting(), mode="triple"), "'gate-fd'"),
    ],
)
def test_unusable_arguments_are_refused_with_what_is_accepted(call, message):
    with pytest.raises(ShapeError, match=message):
        call()
