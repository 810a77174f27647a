import copy

import numpy as np
import pytest
import torch
from torch import nn

from task.channels import ChannelMap
from task.models import build, example
from task.submodel import slice_module
from task.trace import trace
from tests.task.networks import NAMES, NETWORKS, WHOLE, network, some, traced


def test_a_residual_group_is_found_as_one_by_hand() -> None:
    """Stem, both branches and the reader of a block that a person can follow."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4 * 4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head((x + self.norm(self.conv(x))).flatten(1))

    cmap = trace(Block(), torch.randn(2, 3, 2, 2))
    assert cmap.groups == {"stem": 4}
    roles = {
        (name, axis): entry.role
        for name, entries in cmap.axes.items()
        for axis, entry in enumerate(entries)
        if entry is not None
    }
    assert roles == {
        ("stem.weight", 0): "out",
        ("stem.bias", 0): "bias",
        ("conv.weight", 0): "out",
        ("conv.weight", 1): "in",
        ("conv.bias", 0): "bias",
        ("norm.weight", 0): "norm",
        ("norm.bias", 0): "norm",
        ("norm.running_mean", 0): "norm",
        ("norm.running_var", 0): "norm",
        ("head.weight", 1): "in",
    }
    columns = cmap.axes["head.weight"][1]
    assert columns is not None
    assert columns.channel.tolist() == [c for c in range(4) for _ in range(4)]
    assert [(gate.module, gate.axis) for gate in cmap.gates] == [("stem", 1), ("norm", 1)]
    assert cmap.pinned == {"head": "gives the outputs of the network"}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_keep_their_roles_whatever_the_network(name: str) -> None:
    model, _, cmap = traced(name)
    kinds = {
        id(tensor): module for module in model.modules() for tensor in module.parameters(False)
    }
    state = model.state_dict(keep_vars=True)
    seen = 0
    for key, entries in cmap.axes.items():
        if id(state[key]) not in kinds:
            continue
        module, leaf = kinds[id(state[key])], key.rpartition(".")[2]
        expected = roles_of(module, leaf, state[key].ndim)
        for entry, role in zip(entries, expected, strict=True):
            if entry is not None:
                seen += 1
                assert entry.role == role, (key, entry.role, role)
    assert seen > 0


def roles_of(module: nn.Module, leaf: str, rank: int) -> list[str]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ["", "out"]
    if rank == 1:
        writes = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d)
        return ["bias"] if writes else ["norm"]
    if isinstance(module, nn.ConvTranspose2d):
        return ["in", "out", "", ""]
    if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
        return ["depthwise", "", "", ""]
    return ["out", "in"] + [""] * (rank - 2)


@pytest.mark.parametrize("name", NAMES)
def test_every_coordinate_belongs_to_the_same_channel_as_its_neighbours(name: str) -> None:
    """Widths of axes, channels and gates fit together."""
    model, _, cmap = traced(name)
    assert set(cmap.axes) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert len(cmap.axes[key]) == tensor.ndim
        for length, entry in zip(tensor.shape, cmap.axes[key], strict=True):
            if entry is None:
                continue
            assert entry.group.shape == entry.channel.shape == (length,)
            for number in set(entry.group.tolist()) - {-1}:
                channels = entry.channel[entry.group == number]
                width = list(cmap.groups.values())[number]
                assert set(channels.tolist()) == set(range(width)), (key, number)
    gated = {number for gate in cmap.gates for number in gate.group.tolist()} - {-1}
    assert gated == set(range(len(cmap.groups)))
    assert all(gate.axis > 0 for gate in cmap.gates)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
def test_only_what_must_stay_is_pinned(name: str) -> None:
    _, _, cmap = traced(name)
    allowed = (
        "outputs of the network",
        "LayerNorm",
        "cannot lose heads",
        "padding",
        "differs from",
    )
    assert cmap.groups
    assert all(any(word in why for word in allowed) for why in cmap.pinned.values()), cmap.pinned
    if any("differs from" in why for why in cmap.pinned.values()):
        assert name == "shuffle"


def test_groups_of_known_networks_have_known_widths() -> None:
    assert traced("grouped")[2].groups == {"0.0": 4, "1.0": 4}
    assert traced("control-flow")[2].groups == {"stem.0": 4}  # pairs, for a GroupNorm of four
    assert traced("shared-weights")[2].groups == {"embed": 10}
    assert traced("own-attention")[2].groups == {"attention.0.query": 3, "attention.1.query": 3}
    assert traced("squeeze-excite")[2].groups == {"conv": 8, "fc1": 4, "wide": 6}
    hidden = {f"encoder.layers.{k}.linear1": 12 for k in (0, 1)}
    assert traced("torch-encoder")[2].groups == hidden
    assert traced("bag")[2].groups == {"embedding": 8, "hidden": 6}
    assert list(traced("mobilenetv2")[2].groups.values())[:4] == [32, 16, 96, 24]
    assert traced("resnet18")[2].size == 3 * 64 + 3 * 128 + 3 * 256 + 3 * 512


@pytest.mark.parametrize("name", ["plain-cnn", "torch-encoder", "resnet10"])
def test_tracing_leaves_the_network_and_the_random_state_alone(name: str) -> None:
    model, inputs = network(name)
    first = next(model.children())
    first.eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    before = copy.deepcopy(model.state_dict())
    same = {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    torch.backends.mha.set_fastpath_enabled(True)
    trace(model, inputs)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled()
    assert modes == [module.training for module in model.modules()]
    assert same == {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_the_map_of_a_sliced_network_is_the_trace_of_it(name: str) -> None:
    model, inputs, cmap = traced(name)
    kept = some(cmap, seed=3, least=2)
    again = trace(slice_module(model, cmap, kept), inputs, verify=name in NETWORKS)
    assert again.to_json() == cmap.restrict(kept).to_json()


def test_the_same_network_gives_the_same_map() -> None:
    model, inputs = network("concat")
    assert trace(model, inputs).to_json() == trace(model, inputs).to_json()


def test_any_number_of_samples_gives_the_same_map() -> None:
    model, inputs = network("control-flow")
    maps = {trace(model, inputs[:1].expand(n, -1, -1, -1)).to_json() for n in (1, 3)}
    assert maps == {trace(model, inputs).to_json()}


@pytest.mark.parametrize("name", ["plain-cnn", "concat", "resnet10", "vgg11", "mobilenetv2"])
def test_torch_pruning_ties_the_same_coordinates(name: str) -> None:
    """The independent oracle: pruning one channel of a group touches what the map says."""
    pruning = pytest.importorskip("torch_pruning")
    model, inputs, cmap = traced(name)
    graph = pruning.DependencyGraph().build_dependency(model, inputs)
    names = {module: key for key, module in model.named_modules()}
    for number, (group, width) in enumerate(cmap.groups.items()):
        layer = model.get_submodule(group)
        for channel in (0, width - 1):
            tied = graph.get_pruning_group(layer, pruning.prune_conv_out_channels, idxs=[channel])
            theirs = set()
            for dependency, indices in tied:
                module = dependency.target.module
                if module not in names:
                    continue  # an operation, not a layer
                side = "in" if graph.is_in_channel_pruning_fn(dependency.handler) else "out"
                if isinstance(module, nn.BatchNorm2d) or getattr(module, "groups", 1) > 1:
                    side = "out"
                theirs |= {(names[module], side, int(index)) for index in indices}
            assert theirs == coordinates(model, cmap, number, channel), (group, channel)


def coordinates(
    model: nn.Module, cmap: ChannelMap, number: int, channel: int
) -> set[tuple[str, str, int]]:
    """Name layer, side and index of every coordinate of one channel, from the map."""
    found = set()
    for key, entries in cmap.axes.items():
        layer, _, leaf = key.rpartition(".")
        for entry in entries:
            if entry is None or leaf != "weight":
                continue
            side = "in" if entry.role == "in" else "out"
            here = np.flatnonzero((entry.group == number) & (entry.channel == channel))
            found |= {(layer, side, int(index)) for index in here}
    return found


def test_a_large_image_gives_the_same_groups() -> None:
    small = trace(build("cnn", (3, 16, 16), 5), example("cnn", (3, 16, 16)))
    large = trace(build("cnn", (3, 32, 32), 5), example("cnn", (3, 32, 32)))
    assert small.groups == large.groups


def test_the_layout_in_memory_does_not_matter() -> None:
    model, inputs = network("mobilenetv2")
    nhwc = trace(
        model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    )
    assert nhwc.to_json() == traced("mobilenetv2")[2].to_json()


def test_half_precision_is_no_reason_to_pin() -> None:
    model, inputs = network("plain-cnn")
    assert trace(model.bfloat16(), inputs.bfloat16()).groups == {"0.0": 8, "2.0": 12}
    assert next(model.parameters()).dtype == torch.bfloat16


def test_two_kinds_of_channels_of_one_layer_become_two_groups() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(6, 8)
            self.left, self.right, self.head = nn.Linear(6, 3), nn.Linear(6, 5), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.both(x)
            return self.head(both + torch.cat([self.left(x), self.right(x)], 1))

    model = Halves()
    cmap = trace(model, torch.randn(2, 6))
    assert cmap.groups == {"both": 3, "both#2": 5}
    rows = cmap.axes["right.weight"][0]
    assert rows is not None
    assert rows.group.tolist() == [1] * 5
