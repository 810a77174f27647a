"""What one round was, and which replies may enter it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from strategies.errors import ShapeError
from strategies.records import LARGEST, Hello, Job, Update
from task.channels import ChannelMap, Kept, State
from task.submodel import lengths
from task.train import Scores

__all__ = ["Round", "check_job", "check_update", "expected_shapes", "most_bytes", "one_line"]

LONGEST_REASON = 300
DIVERGED = 1e12
"""Of any value of a network: the squares of whole rows are finite in single precision."""
HEADER = 256
"""Bytes around the numbers of an array, its name not counted."""


@dataclass
class Round:
    """A round as it happened; the recorder writes it down.

    Parameters
    ----------
    number : int
        0 is the initial model before any training.
    jobs : dict of str to Job
        By client id.
    updates : list of Update
        The usable ones, sorted by client id.
    failures : dict of str to str
        Client id to the reason why its reply does not count.
    refused : dict of str to str
        Client id to the reason why an introduction under this name does not count.
    bytes_down, bytes_up : dict of str to int
        Serialised message bytes by client id.
    merged : bool
        False when fewer than ``min-replies`` came: the global model stayed as it was.
    diagnostics : dict
        The method's own numbers.
    scores : Scores or None
        The global network as scored by the clients, where they do it.
    train_seconds, evaluate_seconds : float
        Wall time of the two exchanges.
    """

    number: int
    jobs: dict[str, Job] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    merged: bool = False
    diagnostics: dict[str, Any] = field(default_factory=dict)
    scores: Scores | None = None
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0

    def fail(self, client: str, reason: str) -> None:
        """Write down why the reply of ``client`` does not count."""
        self.failures[client] = one_line(reason)

    def blame(self) -> str:
        """Return what is to blame for too few replies."""
        for client, reason in sorted(self.failures.items()):
            hint = ""
            if "ActorDiedError" in reason:
                hint = " (a worker process died: too little memory? fewer clients at a time)"
            return f"{client}: {reason}{hint}"
        return f"{len(self.updates)} of {len(self.jobs)} clients answered in the last one"


def one_line(reason: str) -> str:
    """Return a reason, parts of which can be a client's own words, as one short printable line."""
    line = " ".join(reason[: 4 * LONGEST_REASON].split())
    if len(line) > LONGEST_REASON:
        line = line[: LONGEST_REASON - 4] + " ..."
    return "".join(c if c.isprintable() else "?" for c in line)


def expected_shapes(state: State, channels: ChannelMap, kept: Kept) -> dict[str, tuple[int, ...]]:
    """Return the shape each tensor of ``state`` has when cut down to ``kept``."""
    mask = channels.mask(kept)
    return {name: lengths(t.shape, channels.stay(name, mask)) for name, t in state.items()}


def most_bytes(job: Job, channels: int, score_shape: tuple[int, int]) -> int:
    """Return the most bytes that an answer to ``job`` can have.

    Tensors as large as those that were sent; beside them as many as one number per channel and
    domain, and two more per channel; scores; and a few numbers.
    """
    domains, classes = score_shape
    tensors = sum(t.nbytes + len(name) + HEADER for name, t in job.state.items())
    extras = 8 * channels * (domains + 2) + 16 * HEADER
    scores = 8 * domains * (2 * classes + 1) + 3 * HEADER
    return tensors + extras + scores + 2**14


def check_job(job: Job, model: State, channels: ChannelMap) -> None:
    """Refuse on the client a job whose tensors are not those of ``model`` cut to its channels.

    Raises
    ------
    ShapeError
        Missing, extra or wrongly shaped tensors, values that are NaN, infinite or too large.
    """
    _check_tensors(job.state, expected_shapes(model, channels, job.sent), model)


def _check_tensors(found: State, shapes: Mapping[str, tuple[int, ...]], like: State) -> None:
    if missing := shapes.keys() - found.keys():
        raise ShapeError(f"{min(missing)}: missing ({len(missing)} missing)")
    if extra := found.keys() - shapes.keys():
        raise ShapeError(f"{min(extra)}: not a tensor of this model ({len(extra)} extra)")
    for name, shape in shapes.items():
        tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype != like[name].dtype:
            raise ShapeError(f"{name}: {tensor.dtype}, expected {like[name].dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise ShapeError(f"{name}: NaN or infinite values")
        if bool(((tensor > DIVERGED) | (tensor < -DIVERGED)).any()):
            raise ShapeError(f"{name}: values beyond {DIVERGED:g}: its training diverged")


def check_update(
    job: Job,
    update: Update,
    shapes: Mapping[str, tuple[int, ...]],
    score_shape: tuple[int, int],
    hello: Hello,
) -> None:
    """Refuse an update that cannot be the answer to ``job``.

    Raises
    ------
    ShapeError
        Wrong client or round, missing, extra or wrongly shaped tensors, values that are NaN,
        infinite or too large to be added up, more samples than the client said hello with.
    """
    if (update.client, update.round) != (job.client, job.round):
        raise ShapeError(
            f"answers for {update.client} round {update.round}, "
            f"asked was {job.client} round {job.round}"
        )
    _check_tensors(update.state, shapes, job.state)
    whole = (update.samples, update.steps)
    if not all(1 <= n <= LARGEST for n in whole) or not 0 <= update.loss <= LARGEST:
        raise ShapeError(
            f"samples {update.samples}, steps {update.steps}, loss {update.loss}: "
            f"must be positive and at most {LARGEST:g}"
        )
    if update.samples > (said := sum(hello.domains.values())):
        raise ShapeError(f"samples {update.samples}: more than the {said} it said hello with")
    for name, value in update.costs.items():
        if not 0 <= value <= LARGEST:
            raise ShapeError(f"cost {name} = {value}: must be from 0 to {LARGEST:g}")
    if update.scores is not None and tuple(update.scores.total.shape) != score_shape:
        raise ShapeError(f"scores: shape {tuple(update.scores.total.shape)}, not {score_shape}")
