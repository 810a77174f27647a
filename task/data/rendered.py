"""A domain of digits rendered with the fonts of installed packages, in the manner of SYN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from task.data.split import generator

if TYPE_CHECKING:
    from PIL import ImageFont

__all__ = ["build"]

SIDE = 32
_SCALE = 2  # drawn at twice the size, so that rotation and shift have half a pixel
_FONTS = (  # of the DejaVu family, without the two Display fonts, which hold no digits
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold"),
    *("DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
)
_HEIGHTS = range(34, 57, 2)  # font sizes on the drawing, pixels
_TURN = 15.0  # degrees either way
_SHIFT = 4  # drawing pixels either way
_CONTRAST = 80.0  # least difference of luminance between digit and background
_LUMINANCE = np.array([0.299, 0.587, 0.114])


def build(seed: int, per_class: int = 250) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the domain ``syn``: digits of printed fonts in random colours.

    Font, size, rotation, shift, colours, a neighbour on either side, blur and noise are random.
    The idea is that of the Synthetic Digits of Ganin and Lempitsky (Unsupervised Domain
    Adaptation by Backpropagation, ICML 2015), but these are not the published images, and
    accuracies on them do not compare with those in papers.

    Parameters
    ----------
    seed : int
        Decides every random choice.
    per_class : int
        Images of each of the ten digits.

    Returns
    -------
    x : (10 * per_class, 3, 32, 32) uint8
    y : (10 * per_class,) int64
    source : (10 * per_class,) int64
        Running number, since every image is drawn once.
    """
    rng = generator(seed, "syn")
    fonts = _fonts()
    y = np.tile(np.arange(10, dtype=np.int64), per_class)
    x = np.empty((len(y), 3, SIDE, SIDE), dtype=np.uint8)
    for i, digit in enumerate(y):
        x[i] = _colour(_shape(int(digit), fonts[rng.integers(len(fonts))], rng), rng)
    return x, y, np.arange(len(y))


def _fonts() -> list[ImageFont.FreeTypeFont]:
    import matplotlib
    from PIL import ImageFont

    # The basic layout gives the same pixels whether or not Pillow finds libraqm.
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = [
        ImageFont.truetype(folder / f"{name}.ttf", size, layout_engine=ImageFont.Layout.BASIC)
        for name in _FONTS
        for size in _HEIGHTS
    ]
    own = [ImageFont.load_default(size) for size in _HEIGHTS]
    return found + [font for font in own if isinstance(font, ImageFont.FreeTypeFont)]


def _shape(digit: int, font: ImageFont.FreeTypeFont, rng: np.random.Generator) -> np.ndarray:
    """Draw the digit between two others and return how much each pixel is covered, 0 to 1."""
    from PIL import Image, ImageDraw, ImageFilter

    image = Image.new("L", (SIDE * _SCALE, SIDE * _SCALE))
    draw = ImageDraw.Draw(image)
    centre = SIDE * _SCALE / 2
    x, y = centre + rng.integers(-_SHIFT, _SHIFT + 1, size=2)
    gap = font.getlength("0") * rng.uniform(1.1, 1.8)
    left, right = rng.integers(10, size=2)
    for text, place in ((digit, x), (left, x - gap), (right, x + gap)):
        draw.text((place, y), str(text), fill=255, font=font, anchor="mm")
    turned = image.rotate(rng.uniform(-_TURN, _TURN), Image.Resampling.BILINEAR)
    small = turned.resize((SIDE, SIDE), Image.Resampling.BOX)
    soft = small.filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 0.8)))
    return np.asarray(soft, dtype=np.float64) / 255


def _colour(cover: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the (3, 32, 32) image of a digit of one colour on another, with noise."""
    ink, paper = rng.uniform(0, 255, size=(2, 3))
    while abs((ink - paper) @ _LUMINANCE) < _CONTRAST:
        ink, paper = rng.uniform(0, 255, size=(2, 3))
    clean = paper[:, None, None] + cover * (ink - paper)[:, None, None]
    noisy = clean + rng.normal(0.0, rng.uniform(0.0, 12.0), size=clean.shape)
    image: np.ndarray = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    return image
