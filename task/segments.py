"""Coordinates of an axis compressed to segments, for JSON and for the wire."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack", "unpack"]


def pack(group: NDArray[np.int32], channel: NDArray[np.int64]) -> list[list[int]]:
    """Compress coordinates to `[group, start, length, repeat]`.

    A segment is `length` channels counted from `start`, each `repeat` times in a row: a flattened
    convolution of 512 channels on 7 x 7 places is one segment instead of 25,088 pairs.

    Parameters
    ----------
    group : (n,) int
        Group index of each coordinate.
    channel : (n,) int
        Channel inside that group.

    Returns
    -------
    list of [group, start, length, repeat]
        What `unpack` turns back into the two arrays.
    """
    if len(group) == 0:
        return []
    runs = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(channel) != 0)))
    repeat = np.diff(np.append(runs, len(group)))
    group, channel = group[runs], channel[runs]
    broken = (np.diff(group) != 0) | (np.diff(channel) != 1) | (np.diff(repeat) != 0)
    first = np.flatnonzero(np.append(True, broken))
    length = np.diff(np.append(first, len(runs)))
    rows = zip(group[first], channel[first], length, repeat[first], strict=True)
    return [[int(value) for value in row] for row in rows]


def unpack(segments: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Undo `pack`.

    Parameters
    ----------
    segments : list of [group, start, length, repeat]

    Returns
    -------
    group : (n,) int32
    channel : (n,) int64
    """
    groups = [np.full(length * repeat, group) for group, _, length, repeat in segments]
    channels = [np.repeat(np.arange(s, s + length), repeat) for _, s, length, repeat in segments]
    return (
        np.concatenate([np.zeros(0, np.int64), *groups]).astype(np.int32),
        np.concatenate([np.zeros(0, np.int64), *channels]),
    )
