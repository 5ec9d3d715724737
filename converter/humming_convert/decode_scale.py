"""From packed scales, zero points and biases back to `(E, N, groups)`, for every order that Humming stores.

The inverse of `transform_humming_weight_scale` and `transform_humming_zero_point` in transform.py, in numpy.
Values are moved as raw bits and never computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Raw = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]


def rows_of_64(stored: Raw) -> Raw:
    """`(..., N)` whose runs of 64 are stored as an 8x8 block with its axes exchanged, in order of N."""
    blocks = stored.reshape(*stored.shape[:-1], -1, 8, 8).swapaxes(-1, -2)
    return np.ascontiguousarray(blocks).reshape(stored.shape)


def rows_of_32(stored: Raw) -> Raw:
    """`(..., N)` whose runs of 32 are stored as (pair, block of 8, two), in order of N."""
    blocks = stored.reshape(*stored.shape[:-1], -1, 4, 4, 2).swapaxes(-2, -3)
    return np.ascontiguousarray(blocks).reshape(stored.shape)


def group_scales(stored: Raw, *, per_row: bool) -> Raw:
    """`(E, N, G)` of ordinary scales `(E, G, N)`; `per_row`: they are applied to the result (rows of 32)."""
    ordered = rows_of_32(stored) if per_row else rows_of_64(stored)
    return np.ascontiguousarray(ordered.swapaxes(-1, -2))


def block_scales(stored: Raw) -> Raw:
    """`(E, N / block, G)` of block scales `(E, G, N / block)`."""
    return stored.swapaxes(-1, -2)


def umma_scales(stored: Raw) -> Codes:
    """`(E, N, G)` bytes of UMMA scale words `(E, G / 4, N)`: tiles of 128 rows and 4 groups."""
    experts, groups, rows = stored.shape
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(experts, groups, rows // 128, 32, 4, 4)
    return raw.transpose(0, 2, 4, 3, 1, 5).reshape(experts, rows, groups * 4)


def mma_scale_words(stored: Raw) -> Codes:
    """`(E, N, G)` bytes of scale words `(E, G / 4, N)`, each with four consecutive groups of a row."""
    experts, groups, rows = stored.shape
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(experts, groups, rows, 4)
    return raw.transpose(0, 2, 1, 3).reshape(experts, rows, groups * 4)


def mma_scale_pairs(stored: Raw) -> Codes:
    """`(E, N, G)` bytes of scale words `(E, G / 2, N / 2)`, each with two groups of the rows n and n + 8."""
    experts, groups, halves = stored.shape
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(experts, groups, halves // 8, 8, 2, 2)
    return raw.transpose(0, 2, 4, 3, 1, 5).reshape(experts, halves * 2, groups * 2)


def zero_points(stored: Raw, bits: int, groups_per_tile: int = 1) -> Codes:
    """`(E, N, G)` zero points of the words `(E, G, N * width / 32)`; up to 4 bits take 4, more take 8.

    `groups_per_tile` above 1: the words hold, byte by byte, that many consecutive groups of the same rows.
    """
    experts, tiles = stored.shape[:2]
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(experts, tiles, -1)
    if groups_per_tile > 1:
        tiled = raw.reshape(experts, tiles, -1, groups_per_tile).swapaxes(-1, -2)
        raw = np.ascontiguousarray(tiled).reshape(experts, tiles * groups_per_tile, -1)
    if bits <= 4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)
    return np.ascontiguousarray(rows_of_64(raw).swapaxes(-1, -2))
