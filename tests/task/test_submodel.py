import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from task.channels import ChannelMap
from task.errors import DataError
from task.gates import gated
from task.submodel import extract, scatter, slice_module, zero_masked
from tests.task.networks import NAMES, NETWORKS, relative, some, traced

laws = settings(max_examples=12, derandomize=True, deadline=None)
seeds = st.integers(0, 2**31)
small = st.sampled_from(["plain-cnn", "concat", "grouped", "squeeze-excite", "own-attention"])


def entry(cmap: ChannelMap, name: str, place: tuple[int, ...], kept: dict[str, np.ndarray]) -> bool:
    """Say by definition whether one entry of one tensor stays."""
    names = list(cmap.groups)
    for axis, coordinate in zip(cmap.axes[name], place, strict=True):
        if axis is not None and axis.group[coordinate] >= 0:
            group = names[axis.group[coordinate]]
            if axis.channel[coordinate] not in kept[group]:
                return False
    return True


@laws
@given(name=small, seed=seeds)
def test_extract_takes_exactly_the_entries_whose_channels_are_kept(name: str, seed: int) -> None:
    model, _, cmap = traced(name)
    kept = some(cmap, seed)
    sub = extract(model.state_dict(), cmap, kept)
    for key, tensor in model.state_dict().items():
        flat = tensor.numpy()
        expected = [
            flat[place] for place in np.ndindex(flat.shape) if entry(cmap, key, place, kept)
        ]
        assert sub[key].flatten().tolist() == [value.item() for value in expected], key


@laws
@given(name=small, seed=seeds)
def test_extract_undoes_scatter_and_scatter_undoes_extract(name: str, seed: int) -> None:
    model, _, cmap = traced(name)
    kept = some(cmap, seed)
    state = model.state_dict()
    sub = extract(state, cmap, kept)
    blank = {key: torch.full_like(tensor, 77) for key, tensor in state.items()}
    scatter(sub, cmap, kept, blank)
    assert all(torch.equal(sub[key], back) for key, back in extract(blank, cmap, kept).items())
    for key, tensor in state.items():
        untouched = blank[key] == 77
        assert torch.equal(torch.where(untouched, blank[key], tensor), blank[key])
        assert int((~untouched).sum()) <= sub[key].numel()
    copied = {key: tensor.clone() for key, tensor in state.items()}
    scatter(sub, cmap, kept, copied)
    assert all(torch.equal(copied[key], tensor) for key, tensor in state.items())


@laws
@given(name=small, seed=seeds)
def test_the_mean_of_untouched_submodels_is_the_network_they_came_from(
    name: str, seed: int
) -> None:
    model, _, cmap = traced(name)
    state = {key: t.double() for key, t in model.state_dict().items()}
    total = {key: torch.zeros_like(t) for key, t in state.items()}
    count = {key: torch.zeros_like(t) for key, t in state.items()}
    for client in range(3):
        kept = some(cmap, seed + client)
        here = {key: torch.zeros_like(t) for key, t in state.items()}
        ones = {key: torch.zeros_like(t) for key, t in state.items()}
        sub = extract(state, cmap, kept)
        scatter(sub, cmap, kept, here)
        scatter({key: torch.ones_like(t) for key, t in sub.items()}, cmap, kept, ones)
        for key in state:
            total[key] += here[key]
            count[key] += ones[key]
    for key, tensor in state.items():
        mean = torch.where(count[key] > 0, total[key] / count[key].clamp(min=1), tensor)
        assert torch.allclose(mean, tensor, rtol=1e-12, atol=0), key


def test_an_extracted_state_owns_its_memory() -> None:
    model, _, cmap = traced("plain-cnn")
    state = model.state_dict()
    for tensor in extract(state, cmap, cmap.full()).values():
        tensor.zero_()
    assert all(float(t.abs().sum()) > 0 for k, t in state.items() if "num_batches" not in k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_sliced_gated_and_zeroed_networks_compute_the_same(name: str, seed: int) -> None:
    """With non-zero BatchNorm shift and mean."""
    model, inputs, cmap = traced(name)
    kept = some(cmap, seed)
    mask = cmap.split(torch.from_numpy(cmap.mask(kept)).float())
    with torch.no_grad():
        sliced = slice_module(model, cmap, kept)(inputs)
        with gated(model, cmap, mask):
            masked = model(inputs)
        full = model(inputs)
        model.load_state_dict(zero_masked(model.state_dict(), cmap, kept))
        zeroed = model(inputs)
    assert relative(masked, sliced) < 1e-5
    assert relative(zeroed, sliced) < 1e-5
    assert relative(full, sliced) > 1e-3  # the masks do something


def test_masking_a_convolution_but_not_its_norm_is_not_pruning() -> None:
    """The other way: beta - gamma * mean / sigma stays."""
    model, inputs, cmap = traced("plain-cnn")
    kept = cmap.prefix(0.5)
    with torch.no_grad():
        sliced = slice_module(model, cmap, kept)(inputs)
        for layer in ("0.0", "2.0"):
            conv = model.get_submodule(layer)
            gone = conv.weight.shape[0] // 2
            conv.weight[gone:], conv.bias[gone:] = 0, 0
        masked = model(inputs)
    assert relative(masked, sliced) > 1e-2


def train(model: nn.Module, inputs: Tensor, frozen: dict[str, Tensor], steps: int = 2) -> None:
    """Run SGD with momentum and weight decay, written out; frozen entries do not move."""
    labels = torch.arange(len(inputs)) % 5
    momentum = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                step = (gradient + 0.01 * parameter) * (~frozen[key])
                momentum[key] = 0.9 * momentum[key] + step
                parameter -= 0.05 * momentum[key]


@pytest.mark.parametrize("name", [*NETWORKS, "cnn", "resnet10", "transformer"])
def test_training_the_sliced_network_is_training_the_masked_one(name: str) -> None:
    """In double precision; the masked network has gates at zero and full tensors."""
    model, inputs, cmap = traced(name)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    inputs = torch.cat([inputs, inputs.flip(-1), inputs.roll(1, -1)])
    kept = some(cmap, seed=5)
    before = copy.deepcopy(model.state_dict())
    sliced = slice_module(model, cmap, kept)
    ones = {key: torch.ones_like(t) for key, t in model.state_dict().items()}
    alive = {key: torch.zeros_like(t) for key, t in ones.items()}
    scatter(extract(ones, cmap, kept), cmap, kept, alive)

    optimizer = torch.optim.SGD(sliced.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    labels = torch.arange(len(inputs)) % 5
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(sliced(inputs), labels).backward()
        optimizer.step()
    mask = cmap.split(torch.from_numpy(cmap.mask(kept)).double())
    with gated(model, cmap, mask):
        train(model, inputs, {key: t == 0 for key, t in alive.items()})

    restricted = extract(model.state_dict(), cmap, kept)
    for key, tensor in sliced.state_dict().items():
        assert torch.allclose(restricted[key], tensor, rtol=1e-7, atol=1e-9), key
    moved = 0
    for key, parameter in model.named_parameters():
        same = parameter == before[key]
        assert bool(same[alive[key] == 0].all()), key
        moved += int((~same).sum())
    assert moved > 0


def test_attributes_follow_the_shapes() -> None:
    model, _, cmap = traced("grouped")
    kept = {"0.0": np.array([0, 2]), "1.0": np.array([1, 2, 3])}
    sliced = slice_module(model, cmap, kept)
    first, tied, deep = sliced[0][0], sliced[1][0], sliced[2]
    assert (first.in_channels, first.out_channels, first.groups) == (3, 6, 1)
    assert (tied.in_channels, tied.out_channels, tied.groups) == (6, 9, 3)
    assert tied.weight.shape == (9, 2, 3, 3)
    assert (deep.in_channels, deep.out_channels, deep.groups) == (9, 18, 9)
    assert sliced[3].num_features == 18
    assert (sliced[7].in_features, sliced[7].out_features) == (18, 5)

    model, _, cmap = traced("normed")
    sliced = slice_module(model, cmap, {"conv": np.arange(3), "up": np.arange(2)})
    assert (sliced.inst.num_features, sliced.slope.num_parameters) == (3, 3)
    assert (sliced.up.in_channels, sliced.up.out_channels) == (3, 4)
    assert (sliced.group.num_groups, sliced.group.num_channels) == (2, 4)
    assert (sliced.line.in_channels, sliced.bare.num_features) == (4, 4)

    model, _, cmap = traced("bag")
    sliced = slice_module(model, cmap, {"embedding": np.array([1, 5, 6])})
    assert (sliced.embedding.embedding_dim, sliced.hidden.in_features) == (3, 3)


def test_a_depthwise_layer_loses_groups() -> None:
    model, _, cmap = traced("mobilenetv2")
    sliced = slice_module(model, cmap, cmap.prefix(0.5))
    depthwise = [m for m in sliced.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 17
    assert all(m.groups == m.in_channels == m.out_channels == len(m.weight) for m in depthwise)


def test_shared_weights_stay_shared() -> None:
    model, _, cmap = traced("shared-weights")
    sliced = slice_module(model, cmap, {"embed": np.array([0, 3, 4])})
    assert sliced.twin.weight is sliced.middle.weight
    assert sliced.twin.weight.shape == (3, 3)
    assert model.twin.weight is model.middle.weight


def test_slicing_never_copies_a_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, cmap = traced("plain-cnn")

    def refuse(self: Tensor, memo: object) -> Tensor:
        raise AssertionError(f"deep copy of {tuple(self.shape)}")

    monkeypatch.setattr(Tensor, "__deepcopy__", refuse)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)
    assert slice_module(model, cmap, cmap.prefix(0.5))(inputs).shape == (2, 5)


def test_a_sliced_network_shares_nothing_with_the_full_one() -> None:
    model, inputs, cmap = traced("plain-cnn")
    expected = model(inputs)
    for kept in (cmap.full(), cmap.prefix(0.5)):
        sliced = slice_module(model, cmap, kept)
        assert sliced.training is model.training
        assert [p.requires_grad for p in sliced.parameters()] == [True] * 10
        with torch.no_grad():
            for tensor in sliced.state_dict().values():
                tensor.zero_()
    assert torch.equal(model(inputs), expected)


def test_a_given_state_is_loaded_and_checked() -> None:
    model, inputs, cmap = traced("plain-cnn")
    kept = cmap.prefix(0.5)
    state = extract(model.state_dict(), cmap, kept)
    for tensor in state.values():
        tensor += 1
    sliced = slice_module(model, cmap, kept, state)
    assert all(torch.equal(state[key], t) for key, t in sliced.state_dict().items())
    assert sliced(inputs).shape == (2, 5)
    with pytest.raises(DataError, match=r"state\['0\.0\.weight'\] has shape \(8, 3, 3, 3\)"):
        slice_module(model, cmap, kept, model.state_dict())
    del state["4.weight"]
    with pytest.raises(DataError, match=r"state\['4\.weight'\] has shape nothing"):
        slice_module(model, cmap, kept, state)


def test_scatter_refuses_a_submodel_of_other_channels() -> None:
    model, _, cmap = traced("plain-cnn")
    sub = extract(model.state_dict(), cmap, cmap.prefix(0.5))
    with pytest.raises(DataError, match=r"0\.0\.weight has shape \(4, 3, 3, 3\).*\(8, 3, 3, 3\)"):
        scatter(sub, cmap, cmap.full(), model.state_dict())
    with pytest.raises(DataError, match="not in the state"):
        scatter(sub, cmap, cmap.prefix(0.5), {})


def test_zeroing_leaves_statistics_and_the_given_state_alone() -> None:
    model, _, cmap = traced("plain-cnn")
    state = model.state_dict()
    before = copy.deepcopy(state)
    zeroed = zero_masked(state, cmap, {"0.0": np.array([1]), "2.0": np.arange(12)})
    assert all(torch.equal(before[key], tensor) for key, tensor in state.items())
    assert torch.equal(zeroed["0.1.running_var"], state["0.1.running_var"])
    gone = [0, *range(2, 8)]
    for key in ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"):
        assert float(zeroed[key][gone].abs().sum()) == 0
        assert torch.equal(zeroed[key][1], state[key][1])
    assert float(zeroed["2.0.weight"][:, gone].abs().sum()) == 0
    assert torch.equal(zeroed["2.0.weight"][:, 1], state["2.0.weight"][:, 1])
    assert torch.equal(zeroed["2.0.bias"], state["2.0.bias"])
