"""Networks the channel map is proved on, beyond those of `task.models`, and their inputs."""

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from task.channels import ChannelMap
from task.models import MODELS, build, example
from task.trace import trace
from tests.task.zoo import (
    Bag,
    Concat,
    ControlFlow,
    Encoder,
    HardCoded,
    Normed,
    PaddedShortcut,
    Recurrent,
    SharedWeights,
    Shuffle,
    SqueezeExcite,
    TorchEncoder,
    Unknown,
    grouped,
    plain_cnn,
    smooth,
)


def image():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def features():
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(1))


def series():
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))


def tokens():
    return torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "plain-cnn": (plain_cnn, image),
    "control-flow": (ControlFlow, image),
    "shared-weights": (SharedWeights, features),
    "grouped": (grouped, image),
    "concat": (Concat, image),
    "squeeze-excite": (SqueezeExcite, image),
    "padded-shortcut": (PaddedShortcut, image),
    "smooth": (smooth, features),
    "normed": (Normed, image),
    "bag": (Bag, tokens),
    "own-attention": (Encoder, tokens),
    "torch-encoder": (TorchEncoder, tokens),
    "lstm": (Recurrent, series),
    "gru": (lambda: Recurrent(nn.GRU), series),
    "hard-coded": (HardCoded, image),
    "unknown-operation": (Unknown, features),
    "shuffle": (Shuffle, image),
}


SHAPES = {"vgg11": (3, 32, 32), "sensor": (6, 32), "text": (12,), "transformer": (12,)}
NAMES = [*NETWORKS, *MODELS]
WHOLE = {"lstm", "gru", "hard-coded", "unknown-operation"}  # part of them cannot be cut


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Build a network of the table, the same at every call, with an input for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in MODELS:
            shape = SHAPES.get(name, (3, 16, 16))
            return build(name, shape, 5), example(name, shape)
        make, inputs = NETWORKS[name]
        return make(), inputs()


@cache
def _traced(name: str) -> tuple[nn.Module, Tensor, ChannelMap]:
    model, inputs = network(name)
    cmap = trace(model, inputs)
    return randomised(model), inputs, cmap


def traced(name: str) -> tuple[nn.Module, Tensor, ChannelMap]:
    """Return a network in eval mode with visible BatchNorm statistics, an input and its map."""
    model, inputs, cmap = _traced(name)
    return copy.deepcopy(model), inputs, cmap


def randomised(model: nn.Module) -> nn.Module:
    """Give norms and biases values under which a forgotten one changes the output."""
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.ndim == 1 and tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=source)
                tensor.copy_(0.5 + noise if key.endswith("var") else tensor + noise - 0.3)
    return model.eval()


def some(cmap: ChannelMap, seed: int, least: int = 1) -> dict[str, np.ndarray]:
    """Keep a random number of random channels of every group, all but one at most."""
    random = np.random.default_rng(seed)
    kept = {}
    for name, width in cmap.groups.items():
        count = random.integers(min(least, width - 1), width)
        kept[name] = np.sort(random.permutation(width)[:count])
    return kept


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())
