import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from task.channels import ChannelMap
from task.errors import DataError
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


def test_a_recurrent_layer_is_pinned_and_says_so() -> None:
    for name in ("lstm", "gru"):
        cmap = traced(name)[2]
        assert set(cmap.groups) == {"first", "hidden"}
        assert "recurrent" in cmap.pinned["lstm"]
        assert "second" in cmap.pinned


def test_an_unknown_operation_pins_what_it_touches_and_names_both() -> None:
    cmap = traced("unknown-operation")[2]
    assert set(cmap.groups) == {"first"}
    assert "second.weight" in cmap.pinned["aten.cumsum.default"]
    assert "aten.cumsum.default" in cmap.pinned["second"]


def test_a_hard_coded_view_ends_pinned_with_the_error_of_the_smaller_network() -> None:
    model, inputs = network("hard-coded")
    assert set(trace(model, inputs, verify=False).groups) == {"free.0", "conv.0"}
    cmap = traced("hard-coded")[2]
    assert set(cmap.groups) == {"free.0"}
    assert "cannot be sliced" in cmap.pinned["conv.0"]
    assert "view" in cmap.pinned["conv.0"] or "shape" in cmap.pinned["conv.0"]


def test_a_wrong_claim_is_found_by_slicing() -> None:
    model, inputs = network("shuffle")
    assert "stem.0" in trace(model, inputs, verify=False).groups
    assert "differs" in traced("shuffle")[2].pinned["stem.0"]


def test_padding_fixes_only_the_channels_it_meets() -> None:
    cmap = traced("padded-shortcut")[2]
    rows = cmap.axes["conv.0.weight"][0]
    assert rows is not None
    assert rows.group.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, -1, -1]
    assert "some of its channels" in cmap.pinned["conv.0"]


def test_an_activation_that_moves_zero_is_gated_behind_it() -> None:
    assert [gate.module for gate in traced("smooth")[2].gates] == ["1", "4"]


def test_a_moved_zero_that_no_module_returns_is_pinned() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.sigmoid(self.one(x)))

    cmap = trace(Functional(), torch.randn(2, 6))
    assert cmap.groups == {}
    assert "sigmoid" in cmap.pinned["one"]


def test_channels_read_before_their_module_returns_them_cannot_be_gated() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.side = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.weight.T
            return x + self.side(x)

    model = nn.Sequential(Inner(), nn.Linear(8, 5))
    cmap = trace(model, torch.randn(2, 6), verify=False)
    assert cmap.groups == {}
    assert "before a module returns it" in cmap.pinned["0"]


def test_one_activation_module_in_two_places_cannot_carry_gates_of_both() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 5)
            self.act = nn.Softplus()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.act(self.two(self.act(self.one(x)))))

    cmap = trace(Reused(), torch.randn(2, 6))
    assert cmap.groups == {}
    assert "several times" in cmap.pinned["one"]


def test_layer_norm_streams_come_back_on_request_and_are_flagged() -> None:
    model, inputs = network("own-attention")
    cmap = trace(model, inputs, inexact=True)
    assert cmap.groups["embedding"] == 8
    assert not cmap.exact["embedding"]
    assert cmap.exact["attention.0.query"]
    assert "embedding" in traced("own-attention")[2].pinned
    small = slice_module(model, cmap, cmap.prefix(0.5))
    assert small(inputs).shape == (2, 5)
    assert small.norm[0].normalized_shape == (4,)


def test_tensors_that_do_not_take_part_are_reported() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    model.spare = nn.Parameter(torch.ones(3, 3))
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    cmap = trace(model, torch.randn(2, 6))
    assert cmap.pinned["spare"] == "is not used when the network runs"
    assert cmap.axes["spare"] == (None, None)


def test_the_caller_can_pin_groups_by_name() -> None:
    model, inputs = network("plain-cnn")
    cmap = trace(model, inputs, pin=["0.0"])
    assert cmap.groups == {"2.0": 12}
    assert cmap.pinned["0.0"] == "pinned by the caller"
    assert cmap.axes["0.0.weight"] == (None, None, None, None)
    entry = cmap.axes["2.0.weight"][0]
    assert entry is not None
    assert set(entry.group.tolist()) == {0}
    with pytest.raises(DataError, match=r"unknown group '0\.1'.*2\.0"):
        trace(model, inputs, pin=["0.1"])


def test_a_network_without_tensors_in_its_output_is_refused() -> None:
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return str(x.sum().item())

    with pytest.raises(DataError, match="returned str"):
        trace(Silent(), torch.randn(2, 6))


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


class Odd(nn.Module):
    """What forward may do: count, clip its own weights, return a dataclass with infinities."""

    @dataclass
    class Output:
        logits: torch.Tensor
        masked: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Output:
        self.calls += 1
        self.one.weight.data.clamp_(-0.1, 0.1)
        logits = self.two(torch.relu(self.one(x)))
        return Odd.Output(logits, logits.masked_fill(torch.arange(5) > 2, -torch.inf))


def test_a_forward_with_side_effects_has_them_on_a_copy() -> None:
    model = Odd()
    weights = model.one.weight.detach().clone()
    assert float(weights.abs().max()) > 0.1
    assert trace(model, torch.randn(2, 6)).groups == {"one": 8}
    assert float(model.calls) == 0
    assert torch.equal(model.one.weight, weights)


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


@pytest.mark.parametrize("hard_coded", [True, False])
def test_heads_of_a_hard_coded_number_shrink_only_if_their_scale_stays(hard_coded: bool) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.v, self.head = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, v = (part(x).view(2, 4, 3, -1).transpose(1, 2) for part in (self.qk, self.v))
            scale = 0.5 if hard_coded else q.shape[-1] ** -0.5
            mixed = (q @ q.transpose(-2, -1) * scale).softmax(-1) @ v
            return self.head(mixed.transpose(1, 2).reshape(2, 4, -1)).sum(1)

    cmap = trace(Heads(), torch.randn(2, 4, 6))
    assert cmap.groups == ({"v": 4, "qk": 4} if hard_coded else {"v": 4})


def test_an_inexact_group_must_still_be_sliceable() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.norm(self.one(x)).view(2, 8))

    cmap = trace(Fixed(), torch.randn(2, 6), inexact=True)
    assert cmap.groups == {}
    assert "cannot be sliced" in cmap.pinned["one"]
