"""The wire contract: what server and clients say to each other, as Flower records.

    hello     ()   ->  [Hello, ...], one per client the node serves
    train     Job  ->  Update
    evaluate  Job  ->  Scores

Arrays travel as Flower ``ArrayRecord`` (typed buffers, never pickle), numbers as ``MetricRecord``.
Every reader takes what it gets for hostile: it answers with a ``ShapeError`` or what it promises.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from torch import Tensor

from strategies.arrays import decode_arrays, decode_bits, encode_arrays, encode_bits
from strategies.errors import ShapeError
from strategies.hello import MOST_SAMPLES, Hello, decode_hellos, encode_hellos
from task.channels import ChannelMap, Kept, State
from task.train import Scores

__all__ = [
    "Hello",
    "Job",
    "Update",
    "decode_hellos",
    "decode_job",
    "decode_scores",
    "decode_update",
    "encode_hellos",
    "encode_job",
    "encode_scores",
    "encode_update",
    "held_bytes",
    "wire_bytes",
]

LARGEST = 1e18
"""Of any value in a reply: squares and sums stay finite; what is larger has diverged."""


@dataclass(frozen=True)
class Job:
    """What the server asks of one client in one round.

    Parameters
    ----------
    client, round : str, int
        Whose, when.
    kept : Kept
        The channels to train and to upload.
    state : State
        Tensors of the channels in ``sent``.
    sent : Kept
        Channels that ``state`` holds; equal to ``kept`` unless a method sends more.
    extras : dict of str to Tensor
        The method's own arrays (prototypes, anchors, …).
    evaluate : bool
        Score the personal network on the client's own test share in the same reply.
    """

    client: str
    round: int
    kept: Kept
    state: State
    sent: Kept
    extras: dict[str, Tensor] = field(default_factory=dict)
    evaluate: bool = True


@dataclass(frozen=True)
class Update:
    """What a client answers to a training job.

    Parameters
    ----------
    state : State
        Trained tensors of the channels the job asked for.
    samples, steps, loss : int, int, float
        Training samples the client holds, SGD steps taken, mean cross-entropy over them.
    extras : dict of str to Tensor
        The method's own arrays.
    scores : Scores or None
        Personal network on the client's own test share.
    costs : dict of str to float
        ``parameters``, ``flops``, ``train-flops`` (one sample), ``private`` channels, ``seconds``.
    """

    client: str
    round: int
    state: State
    samples: int
    steps: int
    loss: float
    extras: dict[str, Tensor] = field(default_factory=dict)
    scores: Scores | None = None
    costs: dict[str, float] = field(default_factory=dict)


def encode_job(
    job: Job, channels: ChannelMap, cache: MutableMapping[int, ArrayRecord]
) -> RecordDict:
    """Write a job; ``cache`` lets jobs that share one ``state`` object share its bytes too."""
    if id(job.state) not in cache:
        cache[id(job.state)] = encode_arrays(job.state)
    masks = {"kept": encode_bits(channels.mask(job.kept))}
    if job.sent is not job.kept:
        masks["sent"] = encode_bits(channels.mask(job.sent))
    head = ConfigRecord({"client": job.client, "round": job.round, "evaluate": job.evaluate})
    content = RecordDict({"job": head, "state": cache[id(job.state)]})
    content["channels"], content["extras"] = ArrayRecord(masks), encode_arrays(job.extras)
    return content


def decode_job(content: RecordDict, channels: ChannelMap) -> Job:
    """Read a job on the client.

    Raises
    ------
    ShapeError
        A record is missing or of another type, or the channels are not of this network.
    """
    try:
        head, masks = content.config_records["job"], content.array_records["channels"]
        kept = _kept("kept", masks["kept"], channels)
        sent = _kept("sent", masks["sent"], channels) if "sent" in masks else kept
        client, evaluate = head["client"], head["evaluate"]
        if not isinstance(client, str) or not isinstance(evaluate, bool):
            raise TypeError(f"client {client!r}, evaluate {evaluate!r}")
        return Job(
            client=client,
            round=_whole(head, "round"),
            kept=kept,
            state=decode_arrays(content.array_records["state"]),
            sent=sent,
            extras=decode_arrays(content.array_records["extras"]),
            evaluate=evaluate,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(f"job: missing or not readable: {error}") from None


def _kept(name: str, bits: Array, channels: ChannelMap) -> Kept:
    kept = channels.kept(decode_bits(name, bits, channels.size))
    channels.check(kept)
    return kept


def encode_update(update: Update) -> RecordDict:
    """Write an update; scores travel as sums."""
    numbers: dict[str, int | float | list[int] | list[float]] = {
        "round": update.round,
        "samples": update.samples,
        "steps": update.steps,
        "loss": float(update.loss),
        **{f"cost.{name}": float(value) for name, value in update.costs.items()},
    }
    content = RecordDict(
        {
            "update": ConfigRecord({"client": update.client}),
            "numbers": MetricRecord(numbers),
            "state": encode_arrays(update.state),
            "extras": encode_arrays(update.extras),
        }
    )
    if update.scores is not None:
        content.update(encode_scores(update.scores))
    return content


def decode_update(content: RecordDict) -> Update:
    """Read an update on the server; whether its tensors fit is the driver's to check.

    Raises
    ------
    ShapeError
        A record is missing or of another type.
    """
    try:
        numbers, client = (
            content.metric_records["numbers"],
            content.config_records["update"]["client"],
        )
        if unknown := content.keys() - {"update", "numbers", "state", "extras", "scores"}:
            raise KeyError(f"unknown record {min(unknown)}")
        if not isinstance(client, str):
            raise TypeError(f"client {client!r}")
        return Update(
            client=client,
            round=_whole(numbers, "round"),
            state=decode_arrays(content.array_records["state"]),
            samples=_whole(numbers, "samples"),
            steps=_whole(numbers, "steps"),
            loss=_number(numbers, "loss"),
            extras=decode_arrays(content.array_records["extras"]),
            scores=decode_scores(content) if "scores" in content else None,
            costs={
                name.removeprefix("cost."): _number(numbers, name)
                for name in numbers
                if name.startswith("cost.")
            },
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ShapeError(f"update: missing or not readable: {error}") from None


def _whole(record: Mapping[str, object], name: str) -> int:
    value = record[name]
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}, not a whole number")
    return value


def _number(record: Mapping[str, object], name: str) -> float:
    value = record[name]
    if type(value) not in (int, float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return float(value)  # type: ignore[arg-type]


def encode_scores(scores: Scores) -> RecordDict:
    """Write the sums of an evaluation."""
    arrays = {"correct": scores.correct, "total": scores.total, "loss": scores.loss}
    return RecordDict({"scores": encode_arrays(arrays)})


def decode_scores(content: RecordDict, shape: tuple[int, int] | None = None) -> Scores:
    """Read the sums of an evaluation, of ``shape`` (domains, classes) where it is given.

    Raises
    ------
    ShapeError
        They are missing or cannot be counts.
    """
    try:
        scores = Scores(**decode_arrays(content.array_records["scores"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(f"scores: not readable ({error})") from None
    counts = (scores.correct, scores.total)
    if any(t.dtype != torch.int64 or t.dim() != 2 for t in counts) or scores.loss.dim() != 1:
        raise ShapeError(
            "scores: correct and total must be (domains, classes) int64, loss (domains,)"
        )
    if scores.correct.shape != scores.total.shape or len(scores.loss) != len(scores.total):
        raise ShapeError(f"scores: shapes {scores.correct.shape} and {scores.total.shape} differ")
    if shape is not None and tuple(scores.total.shape) != shape:
        raise ShapeError(f"scores: shape {tuple(scores.total.shape)}, expected {shape}")
    if not bool((scores.loss.double().abs() <= LARGEST).all()):
        raise ShapeError("scores: NaN, infinite or absurd loss")
    if (scores.correct < 0).any() or (scores.correct > scores.total).any():
        raise ShapeError("scores: more right answers than questions")
    if scores.total.sum() == 0 or (scores.total > MOST_SAMPLES).any():
        raise ShapeError("scores: of no sample at all, or of more than there can be")
    return scores


def wire_bytes(content: RecordDict) -> int:
    """Return the bytes of ``content`` serialised as Flower's protobuf message."""
    return int(recorddict_to_proto(content).ByteSize())


def held_bytes(content: RecordDict) -> int:
    """Return about how many bytes ``content`` holds, without another copy of it."""
    return sum(
        len(name) + sum(len(key) + _length(value) for key, value in record.items())
        for name, record in content.items()
    )


def _length(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_length, value))
    held = value.data if isinstance(value, Array) else value
    return len(held) if isinstance(held, str | bytes) else 8
