from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.support.kernel_layout import pack_tiles

from humming_convert.decode import Raw, decode, number_type, parse_layout, raw_array
from humming_convert.decode_scale import (
    group_scales,
    mma_scale_pairs,
    mma_scale_words,
    rows_of_32,
    rows_of_64,
    umma_scales,
    zero_points,
)
from humming_convert.errors import VerificationError
from humming_loader.fingerprint import FLAGS

CONFIG: dict[str, Any] = {
    "sm_version": 90,
    "shape_n": 256,
    "shape_k": 128,
    "pad_shape_n": 64,
    "pad_shape_k": 64,
    "b_dtype": "uint4",
    "a_dtype": "bfloat16",
    "c_dtype": "bfloat16",
    "bs_dtype": "bfloat16",
    "weight_scale_group_size": 64,
    "weight_scale_group_size_n": 0,
    "weight_scale_type": "group",
    "weight_scale_2_type": "none",
    "has_zero_point": False,
    "is_fp_zero_point": False,
}
OFF = dict.fromkeys(FLAGS, False)


def packed(codes: Raw, scale: Raw) -> dict[str, Raw]:
    """Codes `(E, N, K)` and scales `(E, N, G)`, padding included, in the layout of CONFIG."""
    tiles = [pack_tiles(one, 4, 16, mode=3, packed_k=False, transposed=False, plain=False) for one in codes]
    order = [8 * j + i for i in range(8) for j in range(8)]
    stored = scale.swapaxes(1, 2).reshape(-1, 64)[:, order].reshape(scale.shape[0], scale.shape[2], -1)
    return {"weight": np.stack(tiles), "weight_scale": stored}


def sublayer() -> tuple[Raw, Raw]:
    rng = np.random.default_rng(3)
    codes = np.zeros((2, 256, 128), np.uint8)
    codes[:, :192, :64] = rng.integers(0, 16, (2, 192, 64))
    scale = np.zeros((2, 256, 2), np.uint16)
    scale[:, :192, :1] = rng.integers(1, 1 << 15, (2, 192, 1))
    return codes, scale


def test_padding_is_taken_off() -> None:
    codes, scale = sublayer()
    found = decode(parse_layout(json.dumps(CONFIG), OFF), packed(codes, scale))
    np.testing.assert_array_equal(found.codes, codes[:, :192, :64])
    np.testing.assert_array_equal(found.scale, scale[:, :192, :1])
    assert (found.zero_point, found.scale_2, found.bias) == (None, None, None)


@pytest.mark.parametrize(("row", "column"), [(192, 0), (0, 64), (255, 127)])
def test_weights_in_the_padding_are_refused(row: int, column: int) -> None:
    codes, scale = sublayer()
    codes[1, row, column] = 1
    with pytest.raises(VerificationError) as caught:
        decode(parse_layout(json.dumps(CONFIG), OFF), packed(codes, scale))
    assert str(caught.value) == "weight: expected padding without weights, found weights in the padding"


@pytest.mark.parametrize(("row", "group"), [(192, 0), (0, 1)])
def test_scales_in_the_padding_are_refused(row: int, group: int) -> None:
    codes, scale = sublayer()
    scale[0, row, group] = 1
    with pytest.raises(VerificationError) as caught:
        decode(parse_layout(json.dumps(CONFIG), OFF), packed(codes, scale))
    assert str(caught.value) == "weight_scale: expected padding of zeros, found other values in the padding"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "spoils a field"),
        ("{}", "'shape_n'"),
        (json.dumps(CONFIG | {"shape_k": None}), "spoils a field"),
    ],
)
def test_layer_config_that_is_not_whole(text: str, found: str) -> None:
    with pytest.raises(VerificationError, match=r"^layer_config: expected Humming's LayerConfig") as caught:
        parse_layout(text, OFF)
    assert found in str(caught.value)


def test_number_types() -> None:
    types = [number_type(name) for name in ("uint4", "int8", "bfloat16", "float4e2m1", "float8e0m7")]
    assert [one.bits for one in types] == [4, 8, 16, 4, 8]
    assert [one.is_integer for one in types] == [True, True, False, False, False]
    assert [one.is_sign_magnitude for one in types] == [False, False, False, False, True]
    with pytest.raises(VerificationError, match="one of Humming's number types, found 'complex64'"):
        number_type("complex64")


def test_raw_arrays_keep_bits() -> None:
    values = np.array([[np.nan, -0.0], [1.5, np.inf]], np.float32)
    assert raw_array(values.tobytes(), "F32", (2, 2), "t").tobytes() == values.tobytes()
    assert raw_array(b"\x01\x02\xff\x7f", "BF16", (2,), "t").tolist() == [0x0201, 0x7FFF]
    assert raw_array(b"\xff", "F8_E8M0", (1,), "t").tolist() == [255]


def test_scale_orders_against_the_lists_of_transform_py() -> None:
    """Each order is given in Humming as a list of places, or as a reshape and permutation written out here."""
    eight = [0, 8, 16, 24, 32, 40, 48, 56]
    wide = [start + step for step in range(8) for start in eight]
    narrow = [start + 2 * step for step in range(4) for start in (0, 1, 8, 9, 16, 17, 24, 25)]
    values = np.arange(2 * 3 * 128).reshape(2, 3, 128)
    np.testing.assert_array_equal(rows_of_64(values.reshape(-1, 64)[:, wide].reshape(values.shape)), values)
    short = values.reshape(-1, 32)[:, narrow].reshape(values.shape)
    np.testing.assert_array_equal(rows_of_32(short), values)
    stored = values.reshape(-1, 64)[:, wide].reshape(values.shape)
    np.testing.assert_array_equal(group_scales(stored, per_row=False), values.swapaxes(1, 2))


def test_scale_words_of_the_tensor_cores_place_by_place() -> None:
    rng = np.random.default_rng(5)
    scale = rng.integers(0, 256, (2, 256, 8)).astype(np.uint8)
    words, pairs = np.zeros((2, 2, 256, 4), np.uint8), np.zeros((2, 4, 128, 4), np.uint8)
    umma = np.zeros((2, 2, 2, 32, 4, 4), np.uint8)
    for e, n, g in np.ndindex(*scale.shape):
        value = scale[e, n, g]
        words[e, g // 4, n, g % 4] = value
        pairs[e, g // 2, n // 16 * 8 + n % 8, n % 16 // 8 * 2 + g % 2] = value
        umma[e, g // 4, n // 128, n % 32, n % 128 // 32, g % 4] = value
    np.testing.assert_array_equal(mma_scale_words(words.view(np.uint32)[..., 0]), scale)
    np.testing.assert_array_equal(mma_scale_pairs(pairs.view(np.uint32)[..., 0]), scale)
    np.testing.assert_array_equal(umma_scales(umma.view(np.uint32).reshape(2, 2, 256)), scale)


@pytest.mark.parametrize(("bits", "groups_per_tile"), [(2, 1), (4, 1), (5, 1), (8, 1), (2, 2), (4, 2)])
def test_zero_points_place_by_place(bits: int, groups_per_tile: int) -> None:
    rng = np.random.default_rng(bits)
    zeros = rng.integers(0, 1 << bits, (2, 128, 4)).astype(np.uint8)
    ordered = np.zeros((2, 4, 128), np.uint8)
    for e, n, g in np.ndindex(*zeros.shape):
        ordered[e, g, n // 64 * 64 + n % 8 * 8 + n % 64 // 8] = zeros[e, n, g]
    data = ordered if bits > 4 else ordered[..., ::2] | (ordered[..., 1::2] << 4)
    if groups_per_tile > 1:
        tiled = np.zeros((2, 4 // groups_per_tile, data.shape[2] * groups_per_tile), np.uint8)
        for e, g, byte in np.ndindex(*data.shape):
            tiled[e, g // groups_per_tile, byte * groups_per_tile + g % groups_per_tile] = data[e, g, byte]
        data = tiled
    np.testing.assert_array_equal(zero_points(data.view(np.uint32), bits, groups_per_tile), zeros)
