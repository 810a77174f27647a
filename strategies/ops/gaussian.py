"""The Gaussian mechanism: bound a vector, add noise, and what that costs.

Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014; Balle, Wang, "Improving
the Gaussian Mechanism for Differential Privacy", ICML 2018.
"""

import math
import os

import numpy as np
import torch
from torch import Tensor

from strategies.errors import ShapeError

__all__ = ["clip", "direction", "epsilon", "normal"]


def clip(vector: Tensor, bound: float) -> Tensor:
    """Return ``vector * min(1, bound / norm)``: never longer than ``bound``, whatever comes in.

    Parameters
    ----------
    vector : (n,) float64 tensor
        One with NaN or infinite values has no direction and becomes zero.
    bound : float > 0
        Largest Euclidean norm.
    """
    norm = float(torch.linalg.vector_norm(vector))
    if not math.isfinite(norm):
        return torch.zeros_like(vector)
    # A little less than the bound, so that rounding cannot lift the norm above it.
    return vector if norm <= bound else vector * (bound / norm * (1 - 1e-12))


def direction(vector: Tensor) -> Tensor:
    """Return ``vector`` at norm 1, (n,) float64; zero where it has no direction."""
    norm = torch.linalg.vector_norm(vector)
    return clip(vector / norm, 1.0) if norm > 0 else clip(vector, 1.0)


def normal(count: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` standard normal numbers, float64.

    Without a generator they are made of the operating system's entropy, by the inverse of the
    distribution function: nobody who knows a seed, or has seen other draws, can foretell them.
    """
    if generator is not None:
        return torch.randn(count, generator=generator, dtype=torch.float64)
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**52  # exact, and never 0 or 1
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return drawn


def epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which a Gaussian mechanism is (epsilon, delta)-private.

    ``delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) * Phi(-mu / 2 - epsilon / mu)``, exact in
    both directions. Rounds compose exactly: noise multipliers ``z_t``, each chosen without
    looking at the data, are together one mechanism with ``mu^2 = sum_t 1 / z_t^2``.

    Parameters
    ----------
    mu : float >= 0
        Sensitivity / standard deviation of the noise; 0 tells nothing.
    delta : float in (0, 1)

    Raises
    ------
    ShapeError
        A number is out of range.
    """
    if not (0 <= mu < math.inf and 0 < delta < 1):
        raise ShapeError(f"mu = {mu}, delta = {delta}: mu must be finite and >= 0, delta in (0, 1)")
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    if mu == 0 or _delta(mu, low) <= delta:
        return 0.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _delta(mu, middle) > delta else (low, middle)
    return high


def _delta(mu: float, epsilon: float) -> float:
    # In logarithms: exp(epsilon) overflows long before the product does.
    tails = torch.tensor([mu / 2, -mu / 2], dtype=torch.float64) - epsilon / mu
    log_left, log_right = torch.special.log_ndtr(tails).tolist()
    # The product is a probability, which rounding can lift above 1 when mu is huge.
    return math.exp(log_left) - math.exp(min(0.0, epsilon + log_right))
