"""From packed weight words back to one code per weight, for every way in which Humming lays a weight out.

Written from the layout's definition: `weight_repack_nk` and `humming_pack_weight` in Humming's process.cuh
say which weight goes to which thread, word and bit; `transform_humming_weight` in transform.py says the rest.
It is the inverse, in numpy, and shares nothing with the code that packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

TILE_N = 64

# (word of the dense form, word of the padded form, bits of a field, shift between them). Widths that do not
# divide 32 are packed as if they had the next power of two bits, then those words are squeezed together:
# dense |= (padded & bits) << shift.
_SQUEEZE: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    3: ((0, 0, 0x7, 0), (0, 1, 0x4, 1), (1, 1, 0x3, 0), (1, 2, 0x6, 1), (2, 2, 0x1, 0), (2, 3, 0x7, 1)),
    5: (
        *((0, 0, 0x1F, 0), (0, 1, 0x1C, 3), (1, 1, 0x03, 0), (1, 2, 0x1F, 2), (1, 3, 0x10, 3)),
        *((2, 3, 0x0F, 0), (2, 4, 0x1E, 3), (3, 4, 0x01, 0), (3, 5, 0x1F, 1), (3, 6, 0x18, 3)),
        *((4, 6, 0x07, 0), (4, 7, 0x1F, 3)),
    ),
    6: (
        *((0, 0, 0x3F, 0), (0, 1, 0x30, 2), (1, 1, 0x0F, 0), (1, 2, 0x3C, 2), (2, 2, 0x03, 0)),
        *((2, 3, 0x3F, 2), (3, 4, 0x3F, 0), (3, 5, 0x30, 2), (4, 5, 0x0F, 0), (4, 6, 0x3C, 2)),
        *((5, 6, 0x03, 0), (5, 7, 0x3F, 2)),
    ),
    7: tuple(
        row
        for word in range(7)
        for row in (
            (word, word, 0x7F >> word, 0),
            (word, word + 1, (0x7F << (6 - word)) & 0x7F, 1),
        )
    ),
}


@dataclass(frozen=True, slots=True)
class RepackedForm:
    """The choices that decide a repacked weight: widths and the order within words.

    `signs_only` means that only the sign bits are interleaved (fused e8m0 scales with FP8 activations),
    `plain` that nothing is (native dequantization), `packed_k` that two rows of tiles share one packed row
    (SM90), `transposed` that the 8x8 mini blocks are taken in the other order.
    """

    bits: int
    activation_bits: int
    packed_k: bool = False
    transposed: bool = False
    signs_only: bool = False
    plain: bool = False

    @property
    def rows_per_pack(self) -> int:
        """K of one packed row."""
        return 64 if self.packed_k else 256 // self.activation_bits


def padded_bits(bits: int) -> int:
    """The width of a field while words are formed: the next power of two."""
    return 1 << (bits - 1).bit_length()


def split_words(words: Words, bits: int) -> Codes:
    """`(..., bits)` words of 32 weights as `(..., padded words, fields)` codes in the order of their bits."""
    padded = padded_bits(bits)
    if padded != bits:
        words = _unsqueeze(words, bits)
    raw = np.ascontiguousarray(words).view(np.uint8)
    lead = words.shape[:-1]
    if padded == 8:
        return raw.reshape(*lead, 8, 4)
    per_byte = 8 // padded
    fields = np.empty((*raw.shape, per_byte), np.uint8)
    for index in range(per_byte):
        np.right_shift(raw, np.uint8(index * padded), out=fields[..., index])
    fields &= np.uint8((1 << padded) - 1)
    return fields.reshape(*lead, padded, 32 // padded)


def _unsqueeze(words: Words, bits: int) -> Words:
    padded = padded_bits(bits)
    spread = np.uint32(sum(1 << shift for shift in range(0, 32, padded)))
    out = np.zeros((*words.shape[:-1], padded), np.uint32)
    for dense, field, mask, shift in _SQUEEZE[bits]:
        out[..., field] |= (words[..., dense] >> np.uint32(shift)) & (np.uint32(mask) * spread)
    return out


def decode_repacked(weight: Words, form: RepackedForm, shape_n: int, shape_k: int) -> Codes:
    """Codes `(E, N, K)`, padding included, of a repacked weight `(E, K / rows, N * rows * bits / 32)`."""
    bits, act = form.bits, form.activation_bits
    experts = weight.shape[0]
    tiles, halves, rows = shape_n // TILE_N, 16 // act, shape_k * act // 256
    if form.packed_k:
        half = bits // 2
        blocks = weight.reshape(experts, rows // 2, tiles, halves, 2, 32, 2, half)
        # (K block, tile, half tile, upper or lower half of the words, thread, row, words)
        threads = blocks.transpose(0, 1, 6, 2, 3, 5, 4, 7)
        words = np.ascontiguousarray(threads).reshape(experts, rows, tiles, halves, 32, bits)
    else:
        words = weight.reshape(experts, rows, tiles, halves, 32, bits)
    fields = _in_element_order(split_words(words, bits), form)
    # 32 weights of a thread: (i3, i4, i5, i6) of process.cuh, i4 and i5 swapped for transposed mini blocks.
    pair = 32 // act
    grid = fields.reshape(experts, rows, tiles, halves, 8, 4, act // 4, 2, 2, pair)
    if form.transposed:
        grid = grid.swapaxes(7, 8)
    # row n = (tile, half, i3, i4, thread / 4), column k = (row, i5, thread % 4, i6)
    source = grid.transpose(0, 2, 3, 6, 7, 4, 1, 8, 5, 9)
    out = np.empty(source.shape, np.uint8)
    # numpy's inner loop is over the last axis, so the short axes are walked here.
    for first in range(2):
        for second in range(4):
            for third in range(pair):
                out[..., first, second, third] = source[..., first, second, third]
    return out.reshape(experts, shape_n, shape_k)


def _in_element_order(fields: Codes, form: RepackedForm) -> Codes:
    """`(..., words, fields)` in the order of bits as `(..., 32)` in the order of the thread's weights."""
    shape = fields.shape
    stride = 32 // form.activation_bits
    straight = fields.reshape(*shape[:-2], 32)
    if form.plain:
        return straight
    # Field k = row * group + column of a word holds weight column * stride + row.
    crossed = fields.reshape(*shape[:-1], stride, shape[-1] // stride).swapaxes(-1, -2)
    crossed = np.ascontiguousarray(crossed).reshape(*shape[:-2], 32)
    if not form.signs_only:
        return crossed
    sign = np.uint8(1 << (form.bits - 1))
    return (straight & ~sign) | (crossed & sign)


def decode_rows(weight: Words, bits: int, shape_k: int) -> Codes:
    """Codes `(E, N, K)` of rows `(E, N, words)` whose weights follow each other bit by bit, lowest bit first.

    Words beyond `shape_k` weights are left out.
    """
    raw = np.ascontiguousarray(weight).view(np.uint8)
    if bits == 8:
        return raw[..., :shape_k]
    if 8 % bits == 0:
        per_byte = 8 // bits
        out = np.empty((*raw.shape, per_byte), np.uint8)
        for index in range(per_byte):
            np.right_shift(raw, np.uint8(index * bits), out=out[..., index])
        out &= np.uint8((1 << bits) - 1)
        return out.reshape(*raw.shape[:-1], -1)[..., :shape_k]
    count = raw.shape[-1] * 8 // bits
    stream = np.unpackbits(raw, axis=-1, bitorder="little")[..., : count * bits]
    grouped = stream.reshape(*raw.shape[:-1], count, bits)
    out = np.zeros(grouped.shape[:-1], np.uint8)
    for index in range(bits):
        out |= grouped[..., index] << np.uint8(index)
    return out[..., :shape_k]


def unflatten(weight: Words, shape_n: int) -> Words:
    """The rows `(E, N, words)` of a flat weight, stored by columns of 16 bytes and tiles of 64 rows."""
    experts = weight.shape[0]
    chunks = weight.size // (experts * shape_n * 4)
    blocks = weight.reshape(experts, chunks, shape_n // TILE_N, TILE_N, 4)
    return np.ascontiguousarray(blocks.transpose(0, 2, 3, 1, 4)).reshape(experts, shape_n, chunks * 4)


def undo_int_to_float(codes: Codes, zero_point: Codes | int, bits: int) -> Codes:
    """Integer codes that were stored for conversion to floating point: the distance from the zero point for
    those at or above it, the rest counted down from the top.

    `zero_point` is one number, or an array that broadcasts against `codes`. Writes into `codes`, returns it.
    """
    top = np.uint8((1 << bits) - 1)
    zero = np.asarray(zero_point, np.uint8)
    below = codes > top - zero
    np.add(codes, zero, out=codes, where=~below)
    np.subtract(top, codes, out=codes, where=below)
    return codes
