import pytest
import torch
import torch.nn.functional as F
from torch import nn

from task.errors import DataError
from task.gates import gated
from task.submodel import slice_module
from tests.task.networks import NAMES, relative, some, traced


@pytest.mark.parametrize("name", NAMES)
def test_gates_of_one_change_nothing_and_hooks_go_away(name: str) -> None:
    model, inputs, cmap = traced(name)
    with torch.no_grad():
        expected = model(inputs)
        with gated(model, cmap, {key: torch.ones(n) for key, n in cmap.groups.items()}):
            assert relative(model(inputs), expected) < 1e-6
        assert torch.equal(model(inputs), expected)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["plain-cnn", "concat", "resnet10", "own-attention", "bag"])
def test_a_row_of_gates_acts_on_its_own_sample(name: str) -> None:
    model, inputs, cmap = traced(name)
    rows = [cmap.split(torch.from_numpy(cmap.mask(some(cmap, seed))).float()) for seed in range(2)]
    both = {key: torch.stack([row[key] for row in rows]) for key in cmap.groups}
    with torch.no_grad():
        with gated(model, cmap, both):
            together = model(inputs)
        for number, row in enumerate(rows):
            with gated(model, cmap, row):
                alone = model(inputs)
            assert relative(together[number], alone[number]) < 1e-5


@pytest.mark.parametrize("name", ["plain-cnn", "concat", "grouped"])
def test_groups_that_are_not_named_are_left_alone(name: str) -> None:
    model, inputs, cmap = traced(name)
    for group, kept in some(cmap, seed=4).items():
        gate = torch.zeros(cmap.groups[group])
        gate[torch.from_numpy(kept)] = 1
        with torch.no_grad(), gated(model, cmap, {group: gate}):
            masked = model(inputs)
        sliced = slice_module(model, cmap, {group: kept})(inputs)
        assert relative(masked, sliced) < 1e-5


def test_the_gradient_of_a_gate_is_that_of_scale_and_shift() -> None:
    """dL/dm = gamma dL/dgamma + beta dL/dbeta, one writer, gate behind the BatchNorm."""
    model, inputs, cmap = traced("plain-cnn")
    gates = {key: torch.ones(n, requires_grad=True) for key, n in cmap.groups.items()}
    with gated(model, cmap, gates):
        F.cross_entropy(model(inputs), torch.tensor([0, 3])).backward()
    for group, norm in (("0.0", model[0][1]), ("2.0", model[2][1])):
        expected = norm.weight * norm.weight.grad + norm.bias * norm.bias.grad
        assert torch.allclose(gates[group].grad, expected, rtol=1e-4, atol=1e-6)


def test_gradients_per_sample_equal_a_loop_over_samples() -> None:
    model, inputs, cmap = traced("resnet10")
    labels = torch.tensor([0, 3])

    def gradients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates = {k: torch.ones(len(x), n, requires_grad=True) for k, n in cmap.groups.items()}
        with gated(model, cmap, gates):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            return torch.autograd.grad(loss, list(gates.values()))

    together = gradients(inputs, labels)
    for number in range(2):
        alone = gradients(inputs[number : number + 1], labels[number : number + 1])
        for all_rows, row in zip(together, alone, strict=True):
            assert relative(all_rows[number], row[0]) < 1e-4


def test_gates_can_be_differentiated_twice() -> None:
    model, _, cmap = traced("smooth")
    model, inputs = model.double(), torch.randn(2, 6, dtype=torch.double)

    def squares(gate: torch.Tensor) -> torch.Tensor:
        with gated(model, cmap, {"0": gate}):
            return model(inputs).pow(2).sum(1)

    start = torch.ones(2, 8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(squares, start)


def test_hooks_go_away_when_the_block_fails() -> None:
    model, _, cmap = traced("plain-cnn")
    with pytest.raises(RuntimeError), gated(model, cmap, {"0.0": torch.ones(8)}):
        model(torch.ones(2, 5))
    assert not any(module._forward_hooks for module in model.modules())


def test_unknown_groups_and_wrong_widths_are_refused() -> None:
    model, _, cmap = traced("plain-cnn")
    with pytest.raises(DataError, match=r"unknown group '0'.*0\.0, 2\.0"):
        gated(model, cmap, {"0": torch.ones(8)}).__enter__()
    with pytest.raises(DataError, match=r"gates\['0\.0'\] has shape \(7,\)"):
        gated(model, cmap, {"0.0": torch.ones(7)}).__enter__()
    assert isinstance(model, nn.Module)
