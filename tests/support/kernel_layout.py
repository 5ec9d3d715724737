"""The weight layout of Humming's kernels as a scalar program, weight by weight, after process.cuh's loops.

Slow and plain on purpose: the vectorised decoder is held against it. One tile is 64 rows by 64 columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TILE = 64


def pack_tiles(
    codes: Array, bits: int, act: int, *, mode: int, packed_k: bool, transposed: bool, plain: bool
) -> Array:
    """`(N, K)` codes as packed words `(K / rows, N * rows * bits / 32)`; N and K are multiples of 64."""
    shape_n, shape_k = codes.shape
    rows = 64 if packed_k else 256 // act
    out = np.zeros((shape_k // rows, shape_n * rows * bits // 32), np.uint32)
    for tile_n in range(shape_n // TILE):
        for tile_k in range(shape_k // TILE):
            tile = codes[tile_n * TILE : (tile_n + 1) * TILE, tile_k * TILE : (tile_k + 1) * TILE]
            for thread in range(32):
                words = _thread_words(tile, thread, bits, act, mode, transposed, plain)
                _store(out, words, thread, tile_n, tile_k, bits, act, packed_k)
    return out


def _thread_words(
    tile: Array, thread: int, bits: int, act: int, mode: int, transposed: bool, plain: bool
) -> list[int]:
    gathered = np.zeros((act // 4, 16 // act, act // 4, 2, 2, 32 // act), np.uint32)
    for i in range(8):
        row = i * 8 + thread // 4
        for j in range(act // 2):
            for k in range(32 // act):
                column = j * (128 // act) + thread % 4 * (32 // act) + k
                place = [j // 2, (i * 8) // (act * 4), (i * 8) % (act * 4) // 16, i % 2, j % 2, k]
                if transposed:
                    place[3], place[4] = place[4], place[3]
                gathered[tuple(place)] = tile[row, column]
    values = [int(value) for value in gathered.reshape(-1)]
    padded = 1 << (bits - 1).bit_length()
    per_word, stride = 32 // padded, 32 // act
    sign, low = 1 << (bits - 1), (1 << (bits - 1)) - 1
    words: list[int] = []
    for group in range(4):
        block = []
        for j in range(padded):
            word = 0
            for k in range(per_word):
                here = values[group * 32 + j * per_word + k]
                if plain:
                    word |= here << (k * padded)
                    continue
                size = per_word // stride
                crossed = values[group * 32 + j * per_word + k % size * stride + k // size]
                word |= ((crossed if mode % 2 else here) & low) << (k * padded)
                word |= ((crossed if mode // 2 else here) & sign) << (k * padded)
            block.append(word)
        words += _squeeze(block, bits)
    return words


def _squeeze(w: list[int], bits: int) -> list[int]:
    if bits == 3:
        return [
            (w[0] & 0x77777777) | ((w[1] & 0x44444444) << 1),
            (w[1] & 0x33333333) | ((w[2] & 0x66666666) << 1),
            (w[2] & 0x11111111) | ((w[3] & 0x77777777) << 1),
        ]
    if bits == 5:
        return [
            (w[0] & 0x1F1F1F1F) | ((w[1] & 0x1C1C1C1C) << 3),
            (w[1] & 0x03030303) | ((w[2] & 0x1F1F1F1F) << 2) | ((w[3] & 0x10101010) << 3),
            (w[3] & 0x0F0F0F0F) | ((w[4] & 0x1E1E1E1E) << 3),
            (w[4] & 0x01010101) | ((w[5] & 0x1F1F1F1F) << 1) | ((w[6] & 0x18181818) << 3),
            (w[6] & 0x07070707) | ((w[7] & 0x1F1F1F1F) << 3),
        ]
    if bits == 6:
        return [
            word
            for a, b, c, d in (w[:4], w[4:])
            for word in (
                (a & 0x3F3F3F3F) | ((b & 0x30303030) << 2),
                (b & 0x0F0F0F0F) | ((c & 0x3C3C3C3C) << 2),
                (c & 0x03030303) | ((d & 0x3F3F3F3F) << 2),
            )
        ]
    if bits == 7:
        lows = (0x7F, 0x3F, 0x1F, 0x0F, 0x07, 0x03, 0x01)
        highs = (0x40, 0x60, 0x70, 0x78, 0x7C, 0x7E, 0x7F)
        return [(w[i] & lows[i] * 0x01010101) | ((w[i + 1] & highs[i] * 0x01010101) << 1) for i in range(7)]
    return w


def _store(
    out: Array, words: list[int], thread: int, tile_n: int, tile_k: int, bits: int, act: int, packed_k: bool
) -> None:
    per_row = 16 * bits // act
    for i in range(act // 4):
        for j in range(16 // act):
            for k in range(bits):
                word = words[i * per_row + j * bits + k]
                if packed_k:
                    half = bits // 2
                    region = tile_n * 4 + j * 2 + k // half
                    out[tile_k, region * 32 * bits + thread * bits + i * half + k % half] = word
                    continue
                column = (256 // act) * TILE * tile_n * bits // 32 + j * 32 * bits + thread * bits + k
                out[tile_k * (act // 4) + i, column] = word
