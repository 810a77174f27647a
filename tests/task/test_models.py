"""Every network of the table: sizes, shapes, errors, and that it works at any widths."""

import ast
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task.errors import DataError
from task.models import MODELS, build, example
from task.models.densenet import densenet
from task.models.text import PADDING, VOCABULARY
from task.models.transformer import Attention, Encoder
from task.submodel import slice_module
from task.trace import trace

SHAPES = {"sensor": (9, 32), "text": (12,), "transformer": (12,)}
IMAGES = [name for name in MODELS if name not in SHAPES]


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, (3, 32, 32))


def fresh(name: str, classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return build(name, shape_of(name), classes)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_network_gives_one_logit_a_class_and_a_gradient_to_every_parameter(name: str) -> None:
    model = fresh(name)
    logits = model(example(name, shape_of(name)))
    F.cross_entropy(logits, torch.tensor([0, 4])).backward()
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_network_works_at_uneven_widths_down_to_one_channel_a_group(name: str) -> None:
    model, x = fresh(name), example(name, shape_of(name))
    cmap = trace(model, x, verify=False)
    rng = np.random.default_rng(0)
    kept = {
        group: np.sort(rng.choice(width, max(1, round(width * rng.uniform(0.2, 0.9))), False))
        for group, width in cmap.groups.items()
    }
    small = slice_module(model, cmap, kept).train()
    small(x).square().sum().backward()
    thin = slice_module(model, cmap, cmap.prefix(0.0)).eval()
    assert len(cmap.groups) >= 2
    assert count(thin) < count(small) < count(model)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    assert small(x).shape == thin(x).shape == (2, 5)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_dropped_at_random_in_training(name: str) -> None:
    model, x = fresh(name).train(), example(name, shape_of(name))
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cnn", 89_946),
        ("resnet10", 4_903_242),
        ("resnet18", 11_173_962),  # the number behind most federated pruning tables
        ("vgg11", 9_228_362),
        ("mobilenetv2", 2_236_682),
        ("densenet", 176_122),
    ],
)
def test_image_networks_have_their_known_size_for_ten_classes(name: str, size: int) -> None:
    assert count(build(name, (3, 32, 32), 10)) == size


def test_densenet_of_depth_100_has_the_size_of_the_paper() -> None:
    deep = densenet((3, 32, 32), 10, layers=(16, 16, 16), growth=12)
    assert count(deep) == 769_162  # table 2: 0.8M


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 40, 56)])
def test_image_networks_take_grey_and_larger_images(name: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        assert build(name, shape, 3).eval()(example(name, shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (1, 28, 28)), ("resnet10", (1, 8, 8)), ("sensor", (1, 8))]
)
def test_small_inputs_are_enough_for_one_pixel_at_the_end(
    name: str, shape: tuple[int, ...]
) -> None:
    assert build(name, shape, 3).eval()(example(name, shape)).shape == (2, 3)


@pytest.mark.parametrize("name", ["cnn", "sensor", "text", "transformer"])
def test_light_networks_fit_a_batch_of_noise(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, shape_of(name), 2)
    x = torch.cat([example(name, shape_of(name)), example(name, shape_of(name)).flip(-1)])
    y = torch.tensor([0, 1, 1, 0])
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(40):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
    # A bag of tokens cannot tell a sequence from its reverse: it stays at log 2.
    assert (loss.item() < 0.1) == (name != "text")


# --- names, shapes and errors ---------------------------------------------------------------


def test_the_table_names_the_functions() -> None:
    assert {name: builder.__name__ for name, builder in MODELS.items()} == {n: n for n in MODELS}


def test_an_unknown_name_is_answered_with_the_nearest_and_the_whole_list() -> None:
    with pytest.raises(DataError, match=r"'resnet-18'.*did you mean 'resnet18'") as caught:
        build("resnet-18", (3, 32, 32), 10)
    assert all(name in str(caught.value) for name in MODELS)
    with pytest.raises(DataError, match="did you mean"):
        example("", (3, 32, 32))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (2, 0), (0, 64), (3, 4, 64), (0, 64, 64), (1, 3, 8, 8)]
)
def test_a_shape_that_a_network_cannot_take_is_named_with_it(
    name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        build(name, shape, 10)
    assert repr(name) in str(caught.value)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_data_of_another_kind_is_refused(name: str) -> None:
    for other in {(64,), (9, 64), (3, 64, 64)}:
        if len(other) != len(shape_of(name)):
            with pytest.raises(DataError, match="it takes"):
                build(name, other, 10)
    assert isinstance(build(name, shape_of(name), 1), nn.Module)


def test_a_task_without_classes_is_refused() -> None:
    with pytest.raises(DataError, match="'cnn' was asked for 0 classes"):
        build("cnn", (3, 32, 32), 0)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_the_same_every_time_and_leaves_the_random_state(name: str) -> None:
    before = torch.get_rng_state()
    first, second = example(name, shape_of(name)), example(name, shape_of(name))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, *shape_of(name))


def test_example_tokens_are_ids_and_the_second_sequence_is_padded() -> None:
    tokens = example("text", (7,))
    assert tokens.dtype == torch.int64
    assert tokens.max() < VOCABULARY
    assert (tokens[0] != PADDING).all()
    assert (tokens[1] == PADDING).tolist() == [False] * 4 + [True] * 3


def test_no_model_file_imports_torchvision_before_it_is_needed() -> None:
    for builder in MODELS.values():
        tree = ast.parse(inspect.getsource(inspect.getmodule(builder)))  # type: ignore[arg-type]
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
        assert top
        assert not any("torchvision" in ast.unparse(node) for node in top)


# --- tokens and attention -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "transformer"])
def test_padding_does_not_change_the_answer(name: str) -> None:
    model = fresh(name).eval()
    tokens = example(name, shape_of(name))[:1, :5]
    padded = F.pad(tokens, (0, 7), value=PADDING)
    torch.testing.assert_close(model(tokens), model(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["text", "transformer"])
def test_a_sequence_of_nothing_but_padding_gives_finite_logits(name: str) -> None:
    empty = torch.full((1, *shape_of(name)), PADDING)
    assert fresh(name).eval()(empty).isfinite().all()


def torch_attention(block: Attention, heads: int, x: Tensor, padding: Tensor) -> Tensor:
    """The same block by ``torch.nn.MultiheadAttention``, weights copied."""
    oracle = nn.MultiheadAttention(x.shape[-1], heads, batch_first=True)
    parts = (block.query, block.key, block.value)
    oracle.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    oracle.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    oracle.out_proj.load_state_dict(block.output.state_dict())
    return oracle(x, x, x, key_padding_mask=padding)[0]


def test_attention_equals_that_of_torch_at_full_width() -> None:
    torch.manual_seed(0)
    block = Attention(stream=12, heads=3, head_width=4)
    x = torch.randn(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = torch_attention(block, 3, x, padding)
    torch.testing.assert_close(block(x, padding), expected, rtol=1e-5, atol=1e-6)


def test_a_head_that_is_cut_out_is_a_head_whose_output_is_not_read() -> None:
    torch.manual_seed(0)
    block = Attention(stream=8, heads=3, head_width=4)
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    rest = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])  # without head 1
    small = Attention(stream=8, heads=2, head_width=4)
    for part in ("query", "key", "value"):
        getattr(small, part).weight.data = getattr(block, part).weight.data[rest]
        getattr(small, part).bias.data = getattr(block, part).bias.data[rest]
    small.output.weight.data = block.output.weight.data[:, rest]
    small.output.bias.data = block.output.bias.data
    block.output.weight.data[:, 4:8] = 0
    torch.testing.assert_close(small(x, padding), block(x, padding), rtol=1e-5, atol=1e-6)


def test_the_trace_finds_the_heads_and_hidden_layers_of_the_transformer() -> None:
    model = Encoder(length=12, vocabulary=50, classes=3)
    x = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    cmap = trace(model, x)
    assert sorted(cmap.groups.values()) == [4, 4, 128, 128]
    assert all(cmap.exact.values())
