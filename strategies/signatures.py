"""What FEDFIP adds to the messages, and which of it a reply may carry.

Distributions over channels travel as float16, scaled to mean 1 so that small shares survive;
channels outside the mask, where they are zero, are left out. Masks travel as one bit per channel.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strategies.errors import ShapeError
from task.channels import Bools

__all__ = [
    "check_fisher",
    "check_signatures",
    "disclosed",
    "pack_mask",
    "read_prototypes",
    "read_signatures",
    "unpack_mask",
    "write_prototypes",
    "write_signatures",
]

Extras = Mapping[str, Tensor]
EMPTY = torch.empty(0)


def write_prototypes(prototypes: Mapping[int, Tensor], mask: Bools) -> dict[str, Tensor]:
    """Write p^(k), (C,) each, restricted to ``mask``; nothing where there are none."""
    if not prototypes:
        return {}
    rows = [prototypes[k][torch.from_numpy(mask)] for k in sorted(prototypes)]
    domains = torch.tensor(sorted(prototypes))
    return {"prototype-domains": domains, "prototypes": _to_half(torch.stack(rows))}


def read_prototypes(extras: Extras, inside: Tensor) -> dict[int, Tensor]:
    """Read p^(k) over the channels a client holds; ``inside`` says which of them are shared."""
    if "prototypes" not in extras:
        return {}
    rows = torch.zeros(len(extras["prototypes"]), len(inside))
    rows[:, inside] = extras["prototypes"].float()
    rows /= rows.sum(1, keepdim=True).clamp_min(1e-12)
    return dict(zip(extras["prototype-domains"].tolist(), rows, strict=True))


def write_signatures(
    signatures: Mapping[int, Tensor], counts: Mapping[int, int]
) -> dict[str, Tensor]:
    """Write V^(k), (shared channels,) each, with the samples behind them."""
    domains = sorted(signatures)
    return {
        "domains": torch.tensor(domains),
        "counts": torch.tensor([counts[k] for k in domains]),
        "signatures": _to_half(torch.stack([signatures[k] for k in domains])),
    }


def read_signatures(
    uploads: Sequence[Extras], mask: Bools, *, noised: bool = False
) -> list[dict[int, tuple[Tensor, int]]]:
    """Read of every client domain -> (V^(k), (C,), and its samples).

    Noised ones are read as one client's: in their sum the noises cancel, and what matters of it is
    its direction, so the zero rows of clients without a domain do no harm.
    """
    if noised and uploads:
        return [_sum(uploads, mask)]
    return [_signatures(extras, mask) for extras in uploads]


def _signatures(extras: Extras, mask: Bools) -> dict[int, tuple[Tensor, int]]:
    rows = torch.zeros(len(extras["signatures"]), len(mask))
    rows[:, torch.from_numpy(mask)] = extras["signatures"].float()
    rows /= rows.sum(1, keepdim=True).clamp_min(1e-12)
    triples = zip(extras["domains"].tolist(), rows, extras["counts"].tolist(), strict=True)
    return {k: (row, n) for k, row, n in triples}


def disclosed(extras: Extras, mask: Bools, domains: int, *, dense: bool) -> dict[str, Tensor]:
    """Return the vectors of a client's ``extras`` that noise is put on before they are sent.

    Fisher has values where everybody knows that it has: on ``mask``, or on all channels of a
    ``dense`` pass. Signatures have a row for each of all ``domains``, zero where the client has
    none, so that neither shapes nor counts tell anything.
    """
    vectors = {}
    if "fisher" in extras:
        sent = torch.from_numpy(mask) | dense
        known = extras["fisher"].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        vectors["fisher"] = torch.where(sent, known, torch.nan)
    if "signatures" in extras:
        vectors["signatures"] = torch.zeros(domains, int(mask.sum()))
        for k, (row, _) in _signatures(extras, mask).items():
            vectors["signatures"][k] = row[torch.from_numpy(mask)].nan_to_num(nan=0.0)
    return vectors


def _sum(uploads: Sequence[Extras], mask: Bools) -> dict[int, tuple[Tensor, int]]:
    total = torch.stack([extras["signatures"].double() for extras in uploads]).sum(0).clamp_min(0)
    rows = torch.zeros(len(total), len(mask))
    rows[:, torch.from_numpy(mask)] = (total / total.sum(1, keepdim=True)).float()
    return {k: (row, 1) for k, row in enumerate(rows) if row.isfinite().all()}


def check_fisher(extras: Extras, channels: int, *, noised: bool = False) -> None:
    """Refuse a Fisher vector that is none; NaN = not measured; negative if ``noised``.

    Raises
    ------
    ShapeError
        Wrong shape or type, negative or infinite values.
    """
    fisher = extras.get("fisher", EMPTY)
    if fisher.shape != (channels,) or fisher.dtype != torch.float32:
        raise ShapeError(
            f"fisher: shape {tuple(fisher.shape)} {fisher.dtype}, expected ({channels},) "
            "torch.float32"
        )
    if (not noised and (fisher < 0).any()) or torch.isinf(fisher).any():
        raise ShapeError("fisher: negative or infinite values")


def check_signatures(
    extras: Extras, shared: int, domains: int, samples: int, *, noised: bool = False
) -> None:
    """Refuse signatures that are none: of ``shared`` channels, ``domains``, ``samples`` in all.

    Raises
    ------
    ShapeError
        Wrong shapes or types, unknown domains, more samples than the client has, no distribution.
    """
    if noised:
        _check_noised(extras, shared, domains)
        return
    ids, counts, rows = (extras.get(n, EMPTY) for n in ("domains", "counts", "signatures"))
    if rows.shape != (len(ids), shared) or ids.shape != counts.shape:
        raise ShapeError(f"signatures: shape {tuple(rows.shape)} for {len(ids)} domains")
    types = (ids.dtype, counts.dtype, rows.dtype)
    if types != (torch.int64, torch.int64, torch.float16):
        raise ShapeError(f"domains, counts, signatures: {types}, not int64, int64, float16")
    if not ((ids >= 0) & (ids < domains) & (counts > 0)).all() or len(set(ids.tolist())) < len(ids):
        raise ShapeError(f"signatures: unknown domain, one twice, or no samples ({ids}, {counts})")
    if (total := sum(counts.tolist())) > samples:
        raise ShapeError(f"counts: {total} of {samples} samples")
    if not torch.isfinite(rows).all() or (rows < 0).any():
        raise ShapeError("signatures: not a distribution")


def _check_noised(extras: Extras, shared: int, domains: int) -> None:
    rows = extras.get("signatures", EMPTY)
    if rows.shape != (domains, shared) or rows.dtype != torch.float32:
        raise ShapeError(
            f"signatures: shape {tuple(rows.shape)} {rows.dtype}, expected ({domains}, {shared}) "
            "torch.float32; do client and server agree on privacy.noise-multiplier?"
        )
    if not torch.isfinite(rows).all():
        raise ShapeError("signatures: NaN or infinite values")


def pack_mask(mask: Bools) -> Tensor:
    """Return one bit per channel, as uint8."""
    return torch.from_numpy(np.packbits(mask))


def unpack_mask(packed: Tensor, channels: int) -> Bools:
    """Return the mask that ``pack_mask`` packed.

    Raises
    ------
    ShapeError
        Wrong shape or type.
    """
    if packed.shape != (-(-channels // 8),) or packed.dtype != torch.uint8:
        raise ShapeError(f"held: {tuple(packed.shape)} {packed.dtype}, not a channel mask")
    return np.unpackbits(packed.numpy(), count=channels).astype(bool)


def _to_half(rows: Tensor) -> Tensor:
    return (rows * rows.shape[1]).half()
