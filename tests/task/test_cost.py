"""Parameters, bytes and FLOPs against counts made by hand and by a slow oracle."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task.channels import Axis, ChannelMap
from task.cost import (
    activation_bytes,
    flops,
    mask_counted_parameters,
    parameters,
    state_bytes,
)
from task.models import build, example
from task.submodel import slice_module
from task.trace import trace

IMAGE = (3, 32, 32)


def forward_flops(module, example) -> int:
    return flops(module, example)[0]


def training_flops(module, example) -> int:
    return flops(module, example)[1]


def hooked_multiply_adds(model: nn.Module, x: Tensor) -> list[int]:
    """Multiply-adds of one sample, layer by layer in order, by running the real network."""
    counts: list[int] = []

    def note(layer: nn.Module, _inputs: object, output: Tensor) -> None:
        per_output = layer.weight[0].numel()  # what one output position reads
        counts.append(output[0].numel() * per_output)

    layers = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        copy.deepcopy(model).eval()(x)
    for hook in hooks:
        hook.remove()
    return counts


# --- FLOPs ----------------------------------------------------------------------------------


def test_flops_of_single_layers_are_twice_the_multiply_adds_counted_by_hand() -> None:
    dense = nn.Conv2d(3, 64, 3, padding=1)  # 32 x 32 outputs, each 64 x (3 x 9)
    depthwise = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)  # 4 x 4 outputs, 16 x 9
    assert forward_flops(dense, torch.zeros(1, 3, 32, 32)) == 2 * 32 * 32 * 64 * 3 * 9
    assert forward_flops(depthwise, torch.zeros(1, 16, 8, 8)) == 2 * 4 * 4 * 16 * 9
    assert forward_flops(nn.Linear(10, 7), torch.zeros(1, 10)) == 2 * 10 * 7
    assert forward_flops(nn.BatchNorm2d(4), torch.zeros(1, 4, 8, 8)) == 0


def test_resnet18_for_small_images_has_the_published_size_and_flops() -> None:
    model = build("resnet18", IMAGE, 10)
    assert parameters(model) == 11_173_962
    assert 2 * 555e6 <= forward_flops(model, example("resnet18", IMAGE)) <= 2 * 557e6


@pytest.mark.parametrize("name", ["cnn", "resnet10", "vgg11", "mobilenetv2", "densenet"])
def test_flops_of_image_networks_equal_those_of_a_run_with_hooks(name: str) -> None:
    model, x = build(name, IMAGE, 10), example(name, IMAGE)
    layers = hooked_multiply_adds(model, x)
    assert forward_flops(model, x) == 2 * sum(layers)
    # Backward: every layer the gradient of its weight, all but the first that of its input.
    assert training_flops(model, x) == 2 * (3 * sum(layers) - layers[0])


def test_flops_of_a_transformer_are_its_projections_and_two_products_per_head() -> None:
    tokens = example("transformer", (12,))
    model = build("transformer", (12,), 4)
    projections = 12 * (4 * 64 * 64 + 2 * 64 * 128)
    products = 2 * 4 * 12 * 12 * 16
    assert forward_flops(model, tokens) == 2 * (2 * (projections + products) + 64 * 4)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_training_flops_of_grouped_convolutions_are_three_forward_passes(
    groups: int, transposed: bool
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    first, second = nn.Conv2d(4, 8, 1), kind(8, 12, 3, stride=2, groups=groups)
    model, x = nn.Sequential(first, second), torch.zeros(1, 4, 5, 7)
    pointwise, rest = 2 * 5 * 7 * 4 * 8, forward_flops(second, torch.zeros(1, 8, 5, 7))
    assert training_flops(model, x) == 2 * pointwise + 3 * rest


def test_frozen_layers_need_no_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7)), torch.zeros(1, 5)
    model[0].requires_grad_(False)
    assert training_flops(model, x) == 2 * (5 * 6 + 2 * 6 * 7)


def test_flops_are_of_one_sample_whatever_the_batch() -> None:
    model = build("cnn", IMAGE, 10)
    counts = {forward_flops(model, torch.zeros(n, *IMAGE)) for n in (1, 2, 7)}
    assert len(counts) == 1
    assert len({training_flops(model, torch.zeros(n, *IMAGE)) for n in (1, 2, 7)}) == 1


@pytest.mark.parametrize("cost", [forward_flops, training_flops])
def test_one_sample_is_enough_for_a_network_in_training_mode(cost) -> None:
    # BatchNorm refuses a single value per channel while training.
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout()).train()
    assert cost(model, torch.zeros(1, 5)) >= 2 * 5 * 6


@pytest.mark.parametrize("cost", [forward_flops, training_flops])
@pytest.mark.parametrize("name", ["cnn", "text"])
def test_counting_changes_neither_the_network_nor_the_random_state(name: str, cost) -> None:
    shape = IMAGE if name == "cnn" else (12,)
    model, x = build(name, shape, 10).train(), example(name, shape)
    state, inputs = copy.deepcopy(model.state_dict()), x.clone()
    random_state = torch.get_rng_state()
    assert cost(model, x) > 0
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert torch.equal(x, inputs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


# --- parameters and bytes -------------------------------------------------------------------


def test_parameters_are_trainable_entries_and_a_shared_tensor_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    assert parameters(model) == 16 + 4 + 8 + 4  # running statistics are not parameters


def test_state_bytes_are_entries_times_their_width() -> None:
    state = {
        "weight": torch.zeros(3, 5),
        "half": torch.zeros(7, dtype=torch.float16),
        "steps": torch.tensor(0),
    }
    assert state_bytes(state) == 15 * 4 + 7 * 2 + 8
    assert state_bytes({}) == 0


# --- mask counting --------------------------------------------------------------------------


def axis(group: list[int], channel: list[int], role: str) -> Axis:
    return Axis(np.array(group, dtype=np.int32), np.array(channel, dtype=np.int64), role)


def toy() -> tuple[nn.Module, ChannelMap]:
    # x (3) -> 4 hidden channels, of which the last is not a channel of any group -> y (2)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    hidden = ([0, 0, 0, -1], [0, 1, 2, 0])
    axes = {
        "0.weight": (axis(*hidden, "out"), None),  # 3 of 4 rows x 3 columns: 9 prunable, 3 fixed
        "0.bias": (axis(*hidden, "bias"),),  # 3 prunable, 1 fixed
        "2.weight": (None, axis(*hidden, "in")),  # 2 rows x 3 of 4 columns: 6 prunable, 2 fixed
        "2.bias": (None,),  # 2 fixed
    }
    return model, ChannelMap({"0": 3}, axes, (), {"0": True}, {})


def test_mask_counting_keeps_a_share_of_what_touches_a_channel_and_all_of_the_rest() -> None:
    model, cmap = toy()
    assert mask_counted_parameters(cmap, model, 1.0) == 26 == parameters(model)
    assert mask_counted_parameters(cmap, model, 0.5) == 9 + 8
    assert mask_counted_parameters(cmap, model, 0.0) == 8
    model[0].requires_grad_(False)
    assert mask_counted_parameters(cmap, model, 0.5) == 3 + 4


def test_mask_counting_gives_the_sizes_of_published_resnet18_tables() -> None:
    model = build("resnet18", IMAGE, 10)
    cmap = trace(model, example("resnet18", IMAGE), verify=False)
    counts = [mask_counted_parameters(cmap, model, keep) / 1e6 for keep in (0.2, 0.4, 0.6, 0.8)]
    assert counts == pytest.approx([2.23, 4.47, 6.70, 8.94], abs=0.006)
    assert mask_counted_parameters(cmap, model, 1.0) == parameters(model)


# --- sliced networks ------------------------------------------------------------------------


def test_a_resnet18_of_half_width_has_a_quarter_of_parameters_and_flops() -> None:
    model, x = build("resnet18", IMAGE, 10), example("resnet18", IMAGE)
    cmap = trace(model, x, verify=False)
    half = slice_module(model, cmap, cmap.prefix(0.5))
    assert parameters(half) / parameters(model) == pytest.approx(0.25, abs=0.005)
    assert forward_flops(half, x) / forward_flops(model, x) == pytest.approx(0.25, abs=0.005)
    assert state_bytes(half.state_dict()) / state_bytes(model.state_dict()) < 0.26


@pytest.mark.parametrize("name", ["cnn", "resnet10", "transformer"])
def test_costs_fall_with_width_and_are_those_of_the_dense_network_at_full_width(name: str) -> None:
    shape = (12,) if name == "transformer" else IMAGE
    model, x = build(name, shape, 10), example(name, shape)
    cmap = trace(model, x, verify=False)
    nets = [slice_module(model, cmap, cmap.prefix(keep)) for keep in (0.25, 0.5, 1.0)]
    for cost in (parameters, lambda m: forward_flops(m, x), lambda m: training_flops(m, x)):
        counts = [cost(net) for net in nets]
        assert counts == sorted(set(counts))
        assert counts[-1] == cost(model)


def test_activations_are_what_the_backward_pass_needs_each_once():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Sigmoid())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    # input 5, output of the ReLU 7 (for itself and the next layer), output of the sigmoid 3
    assert activation_bytes(model, torch.randn(4, 5)) == 4 * (5 + 7 + 3)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training
