"""What every data set looks like to the rest of the program."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from task.device import move

__all__ = ["DataSet", "Samples"]


@dataclass(frozen=True)
class Samples:
    """Labelled samples of known domains, held in memory.

    Parameters
    ----------
    x : (n, *shape) tensor
        Images as uint8 (four times smaller than float32), series as float32, token ids as int64.
    y : (n,) int64 tensor
        Class indices.
    domain : (n,) int64 tensor
        Domain indices.
    """

    x: Tensor
    y: Tensor
    domain: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: np.ndarray) -> "Samples":
        """Return the samples at ``index``, in that order."""
        rows = torch.as_tensor(np.asarray(index, dtype=np.int64))
        return Samples(self.x[rows], self.y[rows], self.domain[rows])

    def inputs(self, index: Tensor | slice) -> Tensor:
        """Return network inputs; uint8 images are scaled to [-1, 1] as float32."""
        x = self.x[index]
        return x.float().div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x

    def counts(self) -> dict[int, int]:
        """Return the number of samples of each domain present."""
        counts = torch.bincount(self.domain.cpu()).tolist()
        return {domain: n for domain, n in enumerate(counts) if n}

    def rows(self, domain: int) -> Tensor:
        """Return the indices of the samples of ``domain``."""
        return (self.domain == domain).nonzero().flatten().cpu()

    def to(self, device: torch.device) -> "Samples":
        """Return the same samples on ``device``."""
        return Samples(*(move(t, device) for t in (self.x, self.y, self.domain)))


@dataclass(frozen=True)
class DataSet:
    """A classification task over several domains with a fixed global test set.

    Parameters
    ----------
    name : str
        Key in ``DATASETS``, or ``folder``.
    domains, classes : tuple of str
        Names in index order.
    train, test : Samples
        ``train`` is what gets partitioned over clients; ``test`` never leaves the server.
    """

    name: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    train: Samples
    test: Samples

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.x.shape[1:])
