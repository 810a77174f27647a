"""Small networks, each with one thing that makes finding its channels hard."""

import torch
import torch.nn.functional as F
from torch import nn


def conv_block(inputs, outputs, **options):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, **options), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def plain_cnn():
    return nn.Sequential(
        conv_block(3, 8), nn.MaxPool2d(2), conv_block(8, 12), nn.Flatten(), nn.Linear(12 * 16, 5)
    )


class ControlFlow(nn.Module):
    """Loops and branches over shapes and values, which symbolic tracers cannot follow."""

    def __init__(self):
        super().__init__()
        self.stem = conv_block(3, 8)
        self.body = conv_block(8, 8)
        self.norm = nn.GroupNorm(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(x.shape[0]):  # the same weights run again and again
            x = x + self.body(x)
        if x.abs().sum() > 0:
            x = self.norm(x)
        return self.head(x.mean((2, 3)))


class SharedWeights(nn.Module):
    """One layer used twice and one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 10)
        self.twin = nn.Linear(10, 10)
        self.twin.weight = self.middle.weight
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        x = F.relu(self.embed(x))
        return self.head(F.relu(self.twin(F.relu(self.middle(F.relu(self.middle(x)))))))


def grouped():
    return nn.Sequential(
        conv_block(3, 12), conv_block(12, 12, groups=3), nn.Conv2d(12, 24, 3, groups=12),
        nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


class Concat(nn.Module):
    """DenseNet in small: norms and convolutions over everything that came before."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1))
            for width in (6, 10, 14)
        )
        self.norm = nn.BatchNorm2d(18)
        self.head = nn.Linear(18, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.cat([x, block(x)], 1)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    """A branch computes factors of the channels of the other one; GLU; channels with no norm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc1, self.fc2 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.wide = nn.Conv2d(8, 12, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = F.silu(self.conv(x))
        x = x * torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))
        return self.head(F.glu(self.wide(x), 1).amax((2, 3)))


class PaddedShortcut(nn.Module):
    """The parameter-free shortcut of the first CIFAR ResNets: zeros stand in for new channels."""

    def __init__(self):
        super().__init__()
        self.stem = conv_block(3, 6)
        self.conv = nn.Sequential(nn.Conv2d(6, 10, 3, padding=1), nn.BatchNorm2d(10))
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.conv(x) + F.pad(x, (0, 0, 0, 0, 2, 2)))
        return self.head(x.mean((2, 3)))


def smooth():
    """Activations that do not map zero to zero."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Sigmoid(),
        nn.Linear(10, 5),
    )  # fmt: skip


class Normed(nn.Module):
    """Norms without tensors, with a slope per channel, transposed and one-dimensional layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.inst = nn.InstanceNorm2d(8)
        self.slope = nn.PReLU(8)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.group = nn.GroupNorm(3, 6, affine=False)
        self.line = nn.Conv1d(6, 4, 3)
        self.bare = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.group(self.up(self.slope(self.inst(self.conv(x))))).amax(3)
        return self.head(F.relu(self.bare(self.line(x))).sum(2))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 8)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        return self.head(F.relu(self.hidden(self.embedding(tokens))))


class Attention(nn.Module):
    """Own attention: any number of heads of four features."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.query, self.key, self.value = (nn.Linear(8, 12) for _ in range(3))
        self.output = nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = (
            part(x).view(x.shape[0], x.shape[1], -1, 4).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return self.output(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Encoder(nn.Module):
    """Two layers of own attention around a stream with LayerNorm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.position = nn.Parameter(0.1 * torch.randn(7, 8))
        self.attention = nn.ModuleList([Attention(fused=False), Attention(fused=True)])
        self.norm = nn.ModuleList([nn.LayerNorm(8) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for attention, norm in zip(self.attention, self.norm, strict=False):
            x = x + attention(norm(x))
        return self.head(self.norm[2](x).mean(1))


class TorchEncoder(nn.Module):
    """PyTorch's own encoder: only the hidden layer of its feed-forward block can shrink."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer between two that could be pruned."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 7)
        self.lstm = kind(7, 9, batch_first=True)
        self.hidden, self.head = nn.Linear(9, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.second(F.relu(self.first(x)))
        return self.head(F.relu(self.hidden(self.lstm(x)[0][:, -1])))


class HardCoded(nn.Module):
    """A view that spells out the width, behind a layer that can shrink."""

    def __init__(self):
        super().__init__()
        self.free = conv_block(3, 6)
        self.conv = conv_block(6, 8)
        self.head = nn.Linear(8 * 64, 5)

    def forward(self, x):
        return self.head(self.conv(self.free(x)).view(x.shape[0], 8 * 64))


class Unknown(nn.Module):
    """An operation over channels for which there is no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        return self.head(torch.cumsum(self.second(F.relu(self.first(x))), 1))


class Shuffle(nn.Module):
    """Channel shuffle: which of the two factors of the width is fixed only Python knows."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = conv_block(3, 8), conv_block(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.body(x).mean((2, 3)))
