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
# Codes decoded at once: source and result then stay in a processor's cache.
_BLOCK_CODES = 1 << 18

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
    experts = weight.shape[0]
    threads = _by_threads(weight, form, shape_n, shape_k)
    out = np.empty((experts, shape_n, shape_k), np.uint8)
    step = max(1, _BLOCK_CODES // (TILE_N * shape_k))
    for expert in range(experts):
        for tile in range(0, shape_n // TILE_N, step):
            block = split_words(np.ascontiguousarray(threads[expert, :, tile : tile + step]), form.bits)
            rows = out[expert, tile * TILE_N : (tile + step) * TILE_N]
            if not form.signs_only:
                _place(block, form, rows, crossed=not form.plain)
                continue
            sign = np.uint8(1 << (form.bits - 1))
            signs = np.empty_like(rows)
            _place(block & ~sign, form, rows, crossed=False)
            _place(block & sign, form, signs, crossed=True)
            rows |= signs
    return out


def _by_threads(weight: Words, form: RepackedForm, shape_n: int, shape_k: int) -> Words:
    """`(E, packed rows, tiles, halves, thread, bits)`: the words of each thread's 32 weights."""
    experts, tiles, halves = weight.shape[0], shape_n // TILE_N, 16 // form.activation_bits
    rows = shape_k * form.activation_bits // 256
    if not form.packed_k:
        return weight.reshape(experts, rows, tiles, halves, 32, form.bits)
    half = form.bits // 2
    blocks = weight.reshape(experts, rows // 2, tiles, halves, 2, 32, 2, half)
    # (K block, tile, half tile, upper or lower words, thread, row, words) -> the row beside its block
    ordered = blocks.transpose(0, 1, 6, 2, 3, 5, 4, 7)
    return ordered.reshape(experts, rows, tiles, halves, 32, form.bits)


def _place(fields: Codes, form: RepackedForm, out: Codes, *, crossed: bool) -> None:
    """Write fields `(rows, tiles, halves, thread, words, in a word)` to their places in `out` `(N, K)`.

    `crossed`: field k = row * group + column of a word holds its weight column * stride + row.
    """
    rows, tiles, halves = fields.shape[:3]
    word_axes = fields.shape[4].bit_length() - 1
    pair_axes = (32 // form.activation_bits).bit_length() - 1
    # The place of a weight among a thread's 32 as five binary digits, most significant first.
    digits = list(range(5))
    if crossed:
        digits = digits[:word_axes] + digits[word_axes + pair_axes :] + digits[word_axes : word_axes + pair_axes]
    # process.cuh counts a thread's weights by (i3, i4, i5, i6); transposed mini blocks exchange i4 and i5.
    i6 = digits[5 - pair_axes :]
    *i3, i4, i5 = digits[: 5 - pair_axes]
    if form.transposed:
        i4, i5 = i5, i4
    first = 5
    axes = [1, 2, *(first + digit for digit in i3), first + i4, 3, 0, first + i5, 4]
    axes += [first + digit for digit in i6]
    # row n = (tile, half, i3, i4, thread / 4), column k = (packed row, i5, thread % 4, i6)
    source = fields.reshape(rows, tiles, halves, 8, 4, *(2,) * 5).transpose(axes)
    target = out.reshape(source.shape)
    # numpy's inner loop runs over the last axis, so the short ones at the end are walked here.
    for place in np.ndindex(*source.shape[-2 - pair_axes :]):
        target[(..., *place)] = source[(..., *place)]


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
