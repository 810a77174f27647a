"""Arrays on the wire: typed buffers, checked before any memory is taken for them.

A buffer is in numpy's format, never a pickle. Its header, the metadata beside it and its length
must say the same, so that a lying header costs nothing.
"""

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from strategies.errors import ShapeError
from task.channels import Bools

__all__ = ["decode_arrays", "decode_bits", "encode_arrays", "encode_bits"]

FORMAT = "numpy.ndarray"
TYPES = frozenset(
    np.dtype(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
)


def encode_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Write tensors, wherever they are, as arrays."""
    record = {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
    return ArrayRecord(record, keep_input=False)


def decode_arrays(record: ArrayRecord) -> dict[str, Tensor]:
    """Read arrays as tensors of their own memory.

    Raises
    ------
    ShapeError
        Not an array of numbers, or header, metadata and length disagree.
    """
    # A copy: the record's buffers are read-only bytes.
    return {
        name: torch.from_numpy(np.array(_view(name, array), order="C"))
        for name, array in record.items()
    }


def encode_bits(mask: Bools) -> Array:
    """Write one bit per entry."""
    return Array(np.packbits(mask))


def decode_bits(name: str, array: Array, size: int) -> Bools:
    """Read ``size`` bits.

    Raises
    ------
    ShapeError
        They are not that many.
    """
    packed = _view(name, array)
    if packed.dtype != np.uint8 or packed.shape != (-(-size // 8),):
        raise ShapeError(f"{name}: {packed.dtype} {packed.shape}, expected {size} bits")
    return np.unpackbits(packed, count=size).astype(bool)


def _view(name: str, array: Array) -> NDArray[Any]:
    """Return the buffer of ``array`` in its type and shape, without a copy."""
    try:
        shape, column_major, dtype, start = _header(array)
        held, needed = len(array.data) - start, dtype.itemsize * math.prod(shape)
        if held != needed:
            raise ValueError(f"{dtype} {shape} takes {needed} bytes, there are {held}")
        return np.ndarray(shape, dtype, array.data, start, order="F" if column_major else "C")
    except Exception as error:  # what numpy makes of a damaged header can be any error
        raise ShapeError(f"{name}: not an array ({type(error).__name__}: {error})") from None


def _header(array: Array) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order, type and where the numbers start."""
    if array.stype != FORMAT:
        raise ValueError(f"serialised as {array.stype!r}, only {FORMAT!r} is read")
    file = BytesIO(array.data)
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, column_major, dtype = read(file)
    if dtype not in TYPES:
        raise TypeError("a pickle" if dtype.hasobject else f"{dtype} is no type of numbers here")
    if (array.dtype, tuple(array.shape)) != (str(dtype), shape):
        said = f"{array.dtype} {tuple(array.shape)}"
        raise ValueError(f"said to be {said}, its header says {dtype} {shape}")
    return shape, column_major, dtype, file.tell()
