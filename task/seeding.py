"""Randomness that depends on what it is for, never on the order of calls."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["derive", "generator", "seeded"]


def derive(seed: int, purpose: str, *keys: int | str) -> int:
    """Return a 63-bit seed made from ``(seed, purpose, *keys)``."""
    digest = hashlib.sha256(repr((seed, purpose, *keys)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """Return a CPU generator seeded with ``derive(seed, purpose, *keys)``."""
    return torch.Generator().manual_seed(derive(seed, purpose, *keys))


@contextmanager
def seeded(seed: int, purpose: str, *keys: int | str) -> Iterator[None]:
    """Seed torch's global generators inside the block (initial weights, dropout), restore after."""
    # Asking CUDA for its generators would open it in processes that never compute there.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(derive(seed, purpose, *keys))
        yield
