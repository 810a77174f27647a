"""Local training and evaluation of one network; what is counted are sums, so it can be merged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from task.data.dataset import Samples
from task.device import Autocast, lowered, move
from task.modes import evaluation_mode
from task.options import Interval, check_options

__all__ = ["Fit", "Penalty", "Scores", "Step", "TrainingOptions", "evaluate", "fit", "recalibrate"]

SCALE = 2.0**10
"""Of the loss, at first, with fp16: torch's own 2**16 overflows and a round has few steps."""


@dataclass(frozen=True)
class TrainingOptions:
    """Local SGD.

    Parameters
    ----------
    epochs : int
        Passes over the client's training share in each round.
    batch_size : int
        Samples of one step.
    lr : float
        Learning rate of round 1.
    lr_decay : float
        Factor on the learning rate after each round.
    momentum, weight_decay : float
        Of SGD; the momentum buffer starts at zero in each round.
    clip : float
        Largest gradient norm; 0 = no limit.
    """

    epochs: Annotated[int, Interval(1)] = 2
    batch_size: Annotated[int, Interval(2)] = 32
    lr: Annotated[float, Interval(0, open_low=True, open_high=True)] = 0.05
    lr_decay: Annotated[float, Interval(0, 1, open_low=True)] = 1.0
    momentum: Annotated[float, Interval(0, 1, open_high=True)] = 0.9
    weight_decay: Annotated[float, Interval(0)] = 5e-4
    clip: Annotated[float, Interval(0)] = 5.0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Step:
    """One step as a penalty sees it: the batch has been put through ``model`` already."""

    model: nn.Module
    number: int
    x: Tensor
    y: Tensor
    logits: Tensor


Penalty = Callable[[Step], Tensor | None]
"""A method's own loss term, added to the cross-entropy of a step; ``None`` adds nothing."""


@dataclass(frozen=True)
class Fit:
    """What local training did: sum of the samples' cross-entropy, samples seen, steps taken."""

    loss: float
    samples: int
    steps: int


def fit(
    model: nn.Module,
    samples: Samples,
    options: TrainingOptions,
    generator: torch.Generator,
    *,
    round: int = 1,
    penalty: Penalty | None = None,
    autocast: Autocast = "off",
) -> Fit:
    """Train ``model`` in place on ``samples`` with SGD on cross-entropy + penalty.

    With ``autocast`` the forward pass runs in half precision; weights, loss and penalty do not.

    Raises
    ------
    ValueError
        There are fewer than two samples: batch norm cannot train on one.
    """
    if len(samples) < 2:
        raise ValueError(f"local training needs at least 2 samples, there are {len(samples)}")
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=options.lr * options.lr_decay ** (round - 1),
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
    model.train()
    device, dtype = samples.y.device, next(model.parameters()).dtype
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=autocast == "fp16")
    total = torch.zeros((), dtype=torch.float64, device=device)  # one that is read once
    seen = steps = 0
    for _ in range(options.epochs):
        for index in _batches(len(samples), options.batch_size, generator):
            index = move(index, device)
            x, y = samples.inputs(index), samples.y[index]
            with lowered(autocast, device):
                logits = model(x)
            loss = cross_entropy(logits.to(dtype), y)
            extra = penalty(Step(model, steps, x, y, logits)) if penalty else None
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss if extra is None else loss + extra).backward()  # type: ignore[no-untyped-call]
            if options.clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach().double() * len(y)
            seen, steps = seen + len(y), steps + 1
    return Fit(float(total), seen, steps)


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=generator)
    starts = list(range(0, count, size))
    if count % size == 1 and len(starts) > 1:
        starts.pop()  # a batch of one has no variance: it joins its neighbour
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        yield order[start:stop]


@torch.no_grad()
def recalibrate(model: nn.Module, samples: Samples, *, batch_size: int = 64) -> None:
    """Replace BatchNorm's running statistics by the mean over one pass of ``samples``.

    A network whose channels were merged without training has statistics of channels that are gone.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta, training = [norm.momentum for norm in norms], model.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches, not a moving one
    model.train()
    for index in _batches(len(samples), batch_size, torch.Generator().manual_seed(0)):
        model(samples.inputs(move(index, samples.y.device)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train(training)


@dataclass(frozen=True)
class Scores:
    """Sums of an evaluation, per domain k and class c.

    Parameters
    ----------
    correct, total : (K, classes) int64 tensors
        Samples classified rightly, samples seen.
    loss : (K,) float64 tensor
        Sum of cross-entropy.
    """

    correct: Tensor
    total: Tensor
    loss: Tensor

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(
            self.correct + other.correct, self.total + other.total, self.loss + other.loss
        )

    def accuracy(self) -> float:
        """Return correct / total over all samples."""
        return int(self.correct.sum()) / int(self.total.sum())

    def per_domain(self) -> dict[int, float]:
        """Return the accuracy of every domain that has samples."""
        right, seen = self.correct.sum(1).tolist(), self.total.sum(1).tolist()
        return {k: right[k] / n for k, n in enumerate(seen) if n}

    def mean_loss(self) -> float:
        """Return the mean cross-entropy over all samples."""
        return float(self.loss.sum()) / int(self.total.sum())


@torch.no_grad()
def evaluate(
    model: nn.Module, samples: Samples, domains: int, classes: int, *, batch_size: int = 256
) -> Scores:
    """Score ``model`` in eval mode on ``samples``."""
    hits, losses = [samples.y[:0]], [samples.y[:0].double()]
    with evaluation_mode(model):
        for start in range(0, len(samples), batch_size):
            rows = slice(start, start + batch_size)
            y, logits = samples.y[rows], model(samples.inputs(rows))
            hits.append((logits.argmax(1) == y).long())
            losses.append(cross_entropy(logits, y, reduction="none").double())
    # Summed on the CPU, in the order of the samples, so that sums do not depend on the device.
    domain = samples.domain.cpu()
    cells = domain * classes + samples.y.cpu()
    correct = torch.zeros(domains * classes, dtype=torch.int64)
    correct.index_add_(0, cells, torch.cat(hits).cpu())
    loss = torch.zeros(domains, dtype=torch.float64)
    loss.index_add_(0, domain, torch.cat(losses).cpu())
    total = torch.bincount(cells, minlength=domains * classes)
    return Scores(correct.view(domains, classes), total.view(domains, classes), loss)
