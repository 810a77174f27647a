"""A bag of embedded tokens with one hidden layer, and the token ids that all text models share.

Bag of Tricks for Efficient Text Classification. Joulin, Grave, Bojanowski, Mikolov. EACL 2017.
https://arxiv.org/abs/1607.01759

Differences from the paper: embeddings are summed instead of averaged, because the mean divides
their gradient by the length and plain SGD then hardly moves them; there is a hidden layer.
"""

from collections import OrderedDict

from torch import nn

from task.models.shapes import token_shape

__all__ = ["EMBEDDING_SCALE", "PADDING", "VOCABULARY", "text"]

VOCABULARY = 8192  # token ids are 0 .. VOCABULARY - 1
EMBEDDING_SCALE = 0.05  # times N(0, 1): small enough for SGD to change a word in a few steps
PADDING = 0  # id that fills a sequence up to its length; it carries no weight


def text(shape: tuple[int, ...], classes: int, *, vocabulary: int = VOCABULARY) -> nn.Module:
    """Build the sum of 64-wide embeddings and one hidden layer (0.53M parameters).

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
    token_shape("text", shape)
    embedding = nn.EmbeddingBag(vocabulary, 64, mode="sum", padding_idx=PADDING)
    embedding.weight.data.mul_(EMBEDDING_SCALE)
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            hidden=nn.Linear(64, 64),
            relu=nn.ReLU(),
            classifier=nn.Linear(64, classes),
        )
    )
