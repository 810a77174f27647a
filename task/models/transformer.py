"""A Transformer encoder for token sequences whose attention heads can be removed physically.

Attention Is All You Need. Vaswani et al. NeurIPS 2017. https://arxiv.org/abs/1706.03762

Difference from the paper: normalisation before each block instead of behind it, positions are
learned, and the classifier reads the mean over the tokens. ``torch.nn.MultiheadAttention`` insists
on heads x head width = stream width; the block here derives the number of heads from its weights.
"""

import torch
from torch import Tensor, nn

from task.models.shapes import token_shape
from task.models.text import EMBEDDING_SCALE, PADDING, VOCABULARY

__all__ = ["Attention", "Encoder", "Layer", "transformer"]


class Attention(nn.Module):
    """Multi-head self-attention over the tokens that are not padding.

    Parameters
    ----------
    stream : int
        Width of the residual stream.
    heads : int
        Number of heads when built; fewer after slicing.
    head_width : int
        Features of one head. It fixes the scale 1 / sqrt(head_width), so heads go as a whole.
    """

    def __init__(self, stream: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(stream, heads * head_width)
        self.key = nn.Linear(stream, heads * head_width)
        self.value = nn.Linear(stream, heads * head_width)
        self.output = nn.Linear(heads * head_width, stream)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return (B, S, stream) from ``x`` (B, S, stream) and ``padding`` (B, S) bool."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) * self.head_width**-0.5  # (B, heads, S, S)
        # Not -inf: a sequence of nothing but padding would become NaN.
        scores = scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ value  # (B, heads, S, head_width)
        answer: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return answer

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_width).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a feed-forward block, each added to the residual stream."""

    def __init__(self, stream: int, heads: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(stream)
        self.attention = Attention(stream, heads, head_width)
        self.norm2 = nn.LayerNorm(stream)
        self.feedforward = nn.Sequential(
            nn.Linear(stream, hidden), nn.GELU(), nn.Linear(hidden, stream)
        )

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return (B, S, stream) from ``x`` (B, S, stream) and ``padding`` (B, S) bool."""
        x = x + self.attention(self.norm1(x), padding)
        answer: Tensor = x + self.feedforward(self.norm2(x))
        return answer


class Encoder(nn.Module):
    """Embedding, layers and a classifier on the mean over the tokens that are not padding."""

    def __init__(self, length: int, vocabulary: int, classes: int) -> None:
        super().__init__()
        stream, heads, head_width, hidden, depth = 64, 4, 16, 128, 2
        self.embedding = nn.Embedding(vocabulary, stream, padding_idx=PADDING)
        self.embedding.weight.data.mul_(EMBEDDING_SCALE)
        self.position = nn.Parameter(torch.zeros(length, stream))
        self.layers = nn.ModuleList(Layer(stream, heads, head_width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(stream)
        self.classifier = nn.Linear(stream, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, classes) logits from ``tokens`` (B, S) int64, S up to the length built for."""
        padding = tokens == PADDING
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, padding)
        words = (~padding).unsqueeze(-1).to(x.dtype)  # (B, S, 1)
        mean = (self.norm(x) * words).sum(1) / words.sum(1).clamp(min=1)
        answer: Tensor = self.classifier(mean)
        return answer


def transformer(shape: tuple[int, ...], classes: int, *, vocabulary: int = VOCABULARY) -> nn.Module:
    """Build two layers of 4 heads x 16 on a 64-wide stream (0.60M parameters).

    Parameters
    ----------
    shape : (length,)
        Shape of one sequence of token ids.
    classes : int
        Number of classes.
    vocabulary : int
        Number of token ids, padding included.

    Raises
    ------
    DataError
        If ``shape`` is not that of a sequence.
    """
    return Encoder(token_shape("transformer", shape), vocabulary, classes)
