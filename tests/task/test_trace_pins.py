"""What the trace leaves whole, and what it says about it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from task.errors import DataError
from task.submodel import slice_module
from task.trace import trace
from tests.task.networks import network, traced


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
