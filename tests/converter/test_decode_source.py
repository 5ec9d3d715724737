from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.checkpoints import pack_awq, pack_words

from humming_convert.decode_source import RawTensor, bit_fields, decode_projection, to_float32
from humming_convert.errors import VerificationError
from humming_convert.expected import _shrink_table, round_to, widen

CT = {"quant_method": "compressed-tensors", "symmetric": True}


def raw(values: NDArray[Any], code: str) -> RawTensor:
    return RawTensor(code, values)


def f32(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0.1, 2.0, shape).astype(np.float32)


def codes_of(bits: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape).astype(np.uint8)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_integers_of_every_width(bits: int) -> None:
    codes, zeros = codes_of(bits, 32, 64), codes_of(bits, 2, 32).T
    tensors = {
        "weight_packed": raw(pack_words(codes, bits).view(np.uint32), "I32"),
        "weight_scale": raw(f32(32, 2), "F32"),
        "weight_zero_point": raw(pack_words(np.ascontiguousarray(zeros.T), bits).view(np.uint32).T, "I32"),
    }
    schema = CT | {"format": "pack-quantized", "num_bits": bits, "symmetric": False}
    found = decode_projection(schema, tensors)
    np.testing.assert_array_equal(found.codes, codes)
    assert found.zero_point is not None
    np.testing.assert_array_equal(found.zero_point, zeros)
    symmetric = decode_projection(schema | {"symmetric": True}, tensors)
    assert symmetric.zero_point is None


def test_awq_columns_and_transposed_scales() -> None:
    codes, zeros, scale = codes_of(4, 128, 32), codes_of(4, 2, 32), f32(2, 32)
    tensors = {
        "qweight": raw(pack_awq(codes).view(np.uint32), "I32"),
        "qzeros": raw(pack_awq(zeros).view(np.uint32), "I32"),
        "scales": raw(scale.astype(np.float16).view(np.uint16), "F16"),
    }
    found = decode_projection({"quant_method": "awq", "zero_point": True}, tensors)
    np.testing.assert_array_equal(found.codes, codes.T)
    np.testing.assert_array_equal(found.zero_point, zeros.T)
    np.testing.assert_array_equal(found.scale, scale.astype(np.float16).astype(np.float32).T)
    assert decode_projection({"quant_method": "awq", "zero_point": False}, tensors).zero_point is None


def test_awq_word_by_hand() -> None:
    # Nibble j of the word is column (0, 2, 4, 6, 1, 3, 5, 7)[j].
    tensors = {
        "qweight": raw(np.array([[0x76543210]], np.uint32), "I32"),
        "qzeros": raw(np.array([[0]], np.uint32), "I32"),
        "scales": raw(np.ones((1, 8), np.float32), "F32"),
    }
    found = decode_projection({"quant_method": "awq"}, tensors)
    assert found.codes.ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_signed_bytes_become_offset_codes() -> None:
    tensors = {
        "weight": raw(np.array([[-128, -1, 0, 127]], np.int8).view(np.uint8), "I8"),
        "weight_scale": raw(np.array([[0.5]], np.float32), "F32"),
        "weight_zero_point": raw(np.array([[-3]], np.int8).view(np.uint8), "I8"),
    }
    found = decode_projection(CT | {"format": "int-quantized", "symmetric": False}, tensors)
    assert found.codes.tolist() == [[0, 127, 128, 255]]
    assert found.zero_point is not None
    assert found.zero_point.tolist() == [[125]]


@pytest.mark.parametrize(("rows", "columns", "group"), [(256, 256, 128), (200, 320, 64), (130, 128, 128)])
def test_block_scales_reach_every_weight(rows: int, columns: int, group: int) -> None:
    scale = f32(-(-rows // 128), -(-columns // 128))
    tensors = {"weight": raw(codes_of(8, rows, columns), "F8_E4M3"), "weight_scale_inv": raw(scale, "F32")}
    found = decode_projection({"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors)
    assert found.scale.shape == (rows, columns // group)
    for row in range(rows):
        for column in range(0, columns, 32):
            assert found.scale[row, column // group] == scale[row // 128, column // 128]


def test_scalars_stay_one_number() -> None:
    for shape in ((), (1,)):
        tensors = {
            "weight": raw(codes_of(8, 2, 4), "F8_E4M3"),
            "weight_scale": raw(np.full(shape, 0.25, np.float32), "F32"),
        }
        assert decode_projection({"quant_method": "fp8"}, tensors).scale.tolist() == [0.25]


def test_mxfp4_low_nibble_first_and_blocks_flattened() -> None:
    weight = np.array([[[0x21, 0x43], [0x65, 0x87]]], np.uint8)
    tensors = {"weight": raw(weight, "U8"), "weight_scale": raw(np.array([[120, 121]], np.uint8), "U8")}
    found = decode_projection({"quant_method": "gpt_oss_mxfp4"}, tensors)
    assert found.codes.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert (found.scale.tolist(), found.scale_code) == ([[120, 121]], "F8_E8M0")


def test_nvfp4_global_scale_is_a_reciprocal() -> None:
    tensors = {
        "weight_packed": raw(np.zeros((1, 8), np.uint8), "U8"),
        "weight_scale": raw(np.array([[0x38]], np.uint8), "F8_E4M3"),
        "weight_global_scale": raw(np.array([3.0], np.float32), "F32"),
    }
    found = decode_projection(CT | {"format": "nvfp4-pack-quantized"}, tensors)
    assert found.scale_2 == np.float32(1) / np.float32(3)


def test_e8m0_is_a_power_of_two_down_to_the_smallest() -> None:
    codes = np.arange(255, dtype=np.uint8)
    found = to_float32(RawTensor("F8_E8M0", codes))
    assert [float(value) for value in found] == [2.0 ** (int(code) - 127) for code in codes]


def test_unknown_schema_and_scale_dtype() -> None:
    with pytest.raises(
        VerificationError, match=r"^source_schema: expected one of fp8, .* found compressed-tensors:x$"
    ):
        decode_projection(CT | {"format": "x"}, {})
    with pytest.raises(VerificationError, match=r"^scale: expected a float dtype, found I8$"):
        to_float32(RawTensor("I8", np.zeros(1, np.uint8)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even(dtype: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, halves]).view(np.float32)
    values = values[np.isfinite(values)]
    wanted = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    found = round_to(values, dtype)
    np.testing.assert_array_equal(found, wanted.view(torch.uint16).numpy())
    np.testing.assert_array_equal(widen(found, dtype), wanted.float().numpy())


def test_shrunk_codes_follow_the_kernels_own_arithmetic() -> None:
    """process_mxfp4.cuh: bits of the float, factor by exponent, round by comparing distances."""

    def kernel(code: int, below: int) -> int:
        code = 0 if code == 8 else code
        if not below:
            return code
        value = np.uint32(((code & 8) << 28) | ((code & 7) << 22)).view(np.float32)
        value = value * np.uint32(0x3F800000 - (below << 23)).view(np.float32)
        bits = int(np.float32(value).view(np.uint32))
        down, up = bits & 0x81C00000, (bits + 0x00200000) & 0x81C00000
        floats = [np.float64(np.uint32(one).view(np.float32)) for one in (down, up)]
        best = up if abs(value - floats[0]) >= abs(value - floats[1]) else down
        return ((best & 0x80000000) >> 28) | ((best & 0x01C00000) >> 22)

    table = _shrink_table()
    for below in range(127):
        for code in range(16):
            assert table[below, code] == kernel(code, below), (below, code)


def test_bit_fields_of_one_row_by_hand() -> None:
    # 0b101_100_011_010_001_000 and so on: 3-bit codes 0 1 2 3 4 5 6 7 and again.
    stream = sum(code % 8 << (3 * code) for code in range(32))
    words = np.frombuffer(stream.to_bytes(12, "little"), np.uint32)
    assert bit_fields(words, 3).tolist() == [code % 8 for code in range(32)]
