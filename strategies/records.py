"""The wire contract: what server and clients say to each other, as Flower records.

    hello     ()   ->  [Hello, ...], one per client the node serves
    train     Job  ->  Update
    evaluate  Job  ->  Scores

Arrays travel as Flower ``ArrayRecord`` (typed buffers, never pickle), numbers as ``MetricRecord``.
"""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from torch import Tensor

from strategies.errors import ShapeError
from strategies.hello import Hello, read_hello
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
    "wire_bytes",
]


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


def encode_hellos(hellos: list[Hello]) -> RecordDict:
    """Write the introductions of every client that a node serves."""
    return RecordDict({"hello": ConfigRecord({"clients": [json.dumps(asdict(h)) for h in hellos]})})


def decode_hellos(content: RecordDict) -> list[Hello]:
    """Read introductions.

    Raises
    ------
    ShapeError
        A field is missing or of another type.
    """
    try:
        texts = content.config_records["hello"]["clients"]
        return [read_hello(str(text)) for text in texts]  # type: ignore[union-attr]
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(
            f"hello: not an introduction ({error}); same version everywhere?"
        ) from None


def encode_job(
    job: Job, channels: ChannelMap, cache: MutableMapping[int, ArrayRecord]
) -> RecordDict:
    """Write a job; ``cache`` lets jobs that share one ``state`` object share its bytes too."""
    if id(job.state) not in cache:
        cache[id(job.state)] = _arrays(job.state)
    masks = {"kept": _pack(channels.mask(job.kept))}
    if job.sent is not job.kept:
        masks["sent"] = _pack(channels.mask(job.sent))
    head = ConfigRecord({"client": job.client, "round": job.round, "evaluate": job.evaluate})
    content = RecordDict({"job": head, "state": cache[id(job.state)]})
    content["channels"], content["extras"] = ArrayRecord(masks), _arrays(job.extras)
    return content


def decode_job(content: RecordDict, channels: ChannelMap) -> Job:
    """Read a job on the client."""
    head, masks = content.config_records["job"], content.array_records["channels"]
    kept = channels.kept(_unpack(masks["kept"], channels.size))
    sent = channels.kept(_unpack(masks["sent"], channels.size)) if "sent" in masks else kept
    return Job(
        client=str(head["client"]),
        round=int(head["round"]),  # type: ignore[arg-type]
        kept=kept,
        state=_tensors(content.array_records["state"]),
        sent=sent,
        extras=_tensors(content.array_records["extras"]),
        evaluate=bool(head["evaluate"]),
    )


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
            "state": _arrays(update.state),
            "extras": _arrays(update.extras),
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
        numbers = content.metric_records["numbers"]
        return Update(
            client=str(content.config_records["update"]["client"]),
            round=int(numbers["round"]),  # type: ignore[arg-type]
            state=_tensors(content.array_records["state"]),
            samples=int(numbers["samples"]),  # type: ignore[arg-type]
            steps=int(numbers["steps"]),  # type: ignore[arg-type]
            loss=float(numbers["loss"]),  # type: ignore[arg-type]
            extras=_tensors(content.array_records["extras"]),
            scores=decode_scores(content) if "scores" in content else None,
            costs={
                name.removeprefix("cost."): float(value)  # type: ignore[arg-type]
                for name, value in numbers.items()
                if name.startswith("cost.")
            },
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ShapeError(f"update: missing or not readable: {error}") from None


def encode_scores(scores: Scores) -> RecordDict:
    """Write the sums of an evaluation."""
    arrays = {"correct": scores.correct, "total": scores.total, "loss": scores.loss}
    return RecordDict({"scores": _arrays(arrays)})


def decode_scores(content: RecordDict, shape: tuple[int, int] | None = None) -> Scores:
    """Read the sums of an evaluation, of ``shape`` (domains, classes) where it is given.

    Raises
    ------
    ShapeError
        They are missing or cannot be counts.
    """
    try:
        scores = Scores(**_tensors(content.array_records["scores"]))
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
    if not bool(torch.isfinite(scores.loss).all()):
        raise ShapeError("scores: NaN or infinite loss")
    if scores.total.sum() == 0:
        raise ShapeError("scores: of no sample at all")
    if (scores.correct < 0).any() or (scores.correct > scores.total).any():
        raise ShapeError("scores: more right answers than questions")
    return scores


def wire_bytes(content: RecordDict) -> int:
    """Return the bytes of ``content`` serialised as Flower's protobuf message."""
    return int(recorddict_to_proto(content).ByteSize())


def _arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    record = {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
    return ArrayRecord(record, keep_input=False)


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Read arrays; what numpy makes of a damaged one can be any error, even MemoryError."""
    tensors = {}
    for name, array in record.items():
        try:
            # A copy: the record's buffers are read-only bytes.
            tensors[name] = torch.from_numpy(np.array(array.numpy()))
        except Exception as error:
            raise ShapeError(f"{name}: not an array ({type(error).__name__}: {error})") from None
    return tensors


def _pack(mask: np.ndarray) -> Array:
    return Array(np.packbits(mask))


def _unpack(array: Array, size: int) -> np.ndarray:
    return np.unpackbits(array.numpy(), count=size).astype(bool)
