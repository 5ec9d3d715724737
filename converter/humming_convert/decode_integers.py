"""Integers as AutoAWQ, GPTQ, auto-round and compressed-tensors pack them, decoded in numpy from their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from humming_convert.decode_values import Codes, Projection, Raw, Tensors, bias_of, bit_fields, to_float32

# Nibble j of an AWQ word is this column of its eight.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def columns_of_words(words: Raw, order: tuple[int, ...]) -> Codes:
    """Codes `(N, rows)` of words `(rows, N / 8)` whose nibble j is column `order[j]` of eight."""
    turned = np.ascontiguousarray(words.T)
    raw = turned.view(np.uint8).reshape(*turned.shape, 4)
    out = np.empty((turned.shape[0], 8, turned.shape[1]), np.uint8)
    for byte in range(4):
        np.bitwise_and(raw[..., byte], 15, out=out[:, order[2 * byte]])
        np.right_shift(raw[..., byte], 4, out=out[:, order[2 * byte + 1]])
    return out.reshape(-1, turned.shape[1])


def awq(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """AutoAWQ's GEMM packing: 4 bit, along N."""
    zero_point = None
    if schema.get("zero_point", True):
        zero_point = columns_of_words(tensors["qzeros"].array, _AWQ_COLUMNS)
    return Projection(
        codes=columns_of_words(tensors["qweight"].array, _AWQ_COLUMNS),
        bits=4,
        scale=to_float32(tensors["scales"]).T,
        scale_code="F32",
        zero_point=zero_point,
        bias=bias_of(tensors),
    )


def gptq(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """GPTQ: codes along K in `weight` `(K * b / 32, N)`, zero points along N in `zero_point` `(G, N * b / 32)`.

    The first format keeps them one less: what its writer took away from a whole row of words is given back to it.
    """
    bits, group = int(schema["bits"]), int(schema["group_size"])
    codes = bit_fields(tensors["weight"].array.T, bits)
    zero_point = None
    if not schema.get("sym", True):
        words = tensors["zero_point"].array
        zero_point = bit_fields(words, bits)
        if schema["checkpoint_format"] == "gptq":
            if 32 % bits == 0:
                ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
                zero_point = bit_fields(words + ones, bits)
            else:
                zero_point = (zero_point + np.uint8(1)) & np.uint8((1 << bits) - 1)
        zero_point = _even_groups(zero_point.T, group, codes.shape[1])
    scale = _even_groups(to_float32(tensors["weight_scale"]).T, group, codes.shape[1])
    return Projection(
        codes=codes, bits=bits, scale=scale, scale_code="F32", zero_point=zero_point, bias=bias_of(tensors)
    )


def _even_groups(values: Raw, group: int, columns: int) -> Raw:
    """`(N, G)` of groups of which the last may be shorter, for groups of their greatest common divisor."""
    if not group or columns % group == 0:
        return values
    size = math.gcd(group, columns)
    return values.repeat(group // size, axis=1)[:, : columns // size]


def packed_integers(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """compressed-tensors' integers of 2 to 8 bit: packed along K in `weight_packed`, or a byte each in `weight`."""
    bits = int(schema["num_bits"])
    is_packed, is_asymmetric = "weight_packed" in tensors, not schema.get("symmetric", True)
    zero_point = None
    if is_packed:
        codes = bit_fields(tensors["weight_packed"].array, bits)
        if is_asymmetric:
            zero_point = bit_fields(tensors["weight_zero_point"].array.T, bits).T
    else:
        # Signed bytes: what is added is half the range, modulo 256.
        middle = np.uint8(1 << (bits - 1))
        codes = tensors["weight"].array.view(np.uint8) + middle
        if is_asymmetric:
            zero_point = tensors["zero_point"].array.view(np.uint8) + middle
    return Projection(
        codes=codes,
        bits=bits,
        scale=to_float32(tensors["weight_scale"]),
        scale_code="F32",
        zero_point=zero_point,
        bias=bias_of(tensors),
    )


def quark(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """Quark's int4 and uint4 along N; signed nibbles are two's complement, and so are their zero points."""
    order = _AWQ_COLUMNS if schema["pack_method"] == "reorder" else _IN_ORDER
    middle = np.uint8(8 if schema["dtype"] == "int4" else 0)
    codes = columns_of_words(tensors["weight"].array, order)
    zero_point = None
    if "zero_point" in tensors:
        zero_point = columns_of_words(tensors["zero_point"].array, order) ^ middle
    return Projection(
        codes=codes ^ middle,
        bits=4,
        scale=to_float32(tensors["weight_scale"]).T,
        scale_code="F32",
        zero_point=zero_point,
        bias=bias_of(tensors),
    )


def humming(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """Humming's standard form: codes along K, zero points along N; `floatBe0m(B-1)` is sign and magnitude."""
    name = str(schema["b_dtype"])
    bits = int(name.removeprefix("uint").removeprefix("float").partition("e")[0])
    codes = bit_fields(tensors["weight"].array, bits)
    middle = np.uint8(1 << (bits - 1))
    if "e0m" in name:
        magnitude = codes & np.uint8(middle - 1)
        codes = np.where(codes & middle, middle - magnitude, middle + magnitude).astype(np.uint8)
    scale, code = tensors["weight_scale"], "F32"
    if schema["bs_dtype"] in ("float8e4m3", "float8e8m0"):
        code = "F8_E4M3" if schema["bs_dtype"] == "float8e4m3" else "F8_E8M0"
    scale_2 = tensors.get("weight_scale_2")
    return Projection(
        codes=codes,
        bits=bits,
        scale=to_float32(scale) if code == "F32" else scale.array.view(np.uint8),
        scale_code=code,
        zero_point=bit_fields(tensors["zero_point"].array.T, bits).T if "zero_point" in tensors else None,
        scale_2=None if scale_2 is None or scale_2.array.size > 1 else np.float32(to_float32(scale_2).reshape(-1)[0]),
        bias=bias_of(tensors),
    )
