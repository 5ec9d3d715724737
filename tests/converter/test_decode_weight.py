from __future__ import annotations

import numpy as np
import pytest
from tests.support.kernel_layout import pack_tiles

from humming_convert.decode_weight import (
    RepackedForm,
    decode_repacked,
    decode_rows,
    split_words,
    undo_int_to_float,
    unflatten,
)

FORMS = [
    *(RepackedForm(bits, 16) for bits in range(1, 9)),
    *(RepackedForm(bits, 8) for bits in range(1, 8)),
    *(RepackedForm(bits, 4) for bits in range(1, 4)),
    *(RepackedForm(bits, 8, packed_k=True, transposed=True) for bits in (2, 4, 6)),
    RepackedForm(4, 8, signs_only=True),
    RepackedForm(4, 8, packed_k=True, signs_only=True),
    *(RepackedForm(bits, 16, plain=True) for bits in (4, 6, 8)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_repacked_weights_against_the_scalar_layout(form: RepackedForm) -> None:
    rng = np.random.default_rng(form.bits * 100 + form.activation_bits)
    experts, n, k = 2, 128, 128
    codes = rng.integers(0, 1 << form.bits, (experts, n, k)).astype(np.uint8)
    packed = [
        pack_tiles(
            one,
            form.bits,
            form.activation_bits,
            mode=2 if form.signs_only else 3,
            packed_k=form.packed_k,
            transposed=form.transposed,
            plain=form.plain,
        )
        for one in codes
    ]
    np.testing.assert_array_equal(decode_repacked(np.stack(packed), form, n, k), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_are_bit_streams(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (2, 3, 64)).astype(np.uint8)
    streams = [sum(int(code) << (bits * at) for at, code in enumerate(row)) for row in codes.reshape(-1, 64)]
    data = b"".join(stream.to_bytes(64 * bits // 8, "little") for stream in streams)
    words = np.frombuffer(data, np.uint32).reshape(2, 3, -1)
    np.testing.assert_array_equal(decode_rows(words, bits, 64), codes)
    np.testing.assert_array_equal(decode_rows(words, bits, 50), codes[..., :50])


def test_flat_weights_by_columns_of_16_bytes() -> None:
    # transform.py: reshape(E, N/64, 64, chunks, 4) and permute(0, 3, 1, 2, 4).
    words = np.arange(2 * 128 * 8, dtype=np.uint32).reshape(2, 128, 8)
    flat = np.empty_like(words).reshape(-1)
    for expert in range(2):
        for row in range(128):
            for word in range(8):
                chunk, rest = divmod(word, 4)
                place = ((expert * 2 + chunk) * 128 + row) * 4 + rest
                flat[place] = words[expert, row, word]
    np.testing.assert_array_equal(unflatten(flat.reshape(2, 128, 8), 128), words)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_stored_for_floats_for_every_code_and_zero_point(bits: int) -> None:
    top = (1 << bits) - 1
    for zero in range(top + 1):
        codes = np.arange(top + 1)
        stored = np.where(codes >= zero, codes - zero, top - codes).astype(np.uint8)
        np.testing.assert_array_equal(undo_int_to_float(stored.copy(), zero, bits), codes)
        many = undo_int_to_float(stored.copy(), np.full(top + 1, zero, np.uint8), bits)
        np.testing.assert_array_equal(many, codes)


def test_split_words_is_in_the_order_of_bits() -> None:
    word = np.array([[0x76543210, 0xFEDCBA98, 0, 0]], np.uint32)
    np.testing.assert_array_equal(split_words(word, 4)[0, :2], [np.arange(8), np.arange(8, 16)])
