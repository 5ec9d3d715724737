"""A packed sublayer back in logical form: integer codes, scales, zero points and bias, without padding.

Independent of the code that packs: it reads the stored `LayerConfig` and the layout flags, and inverts the
layout as Humming's sources define it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from humming_convert import decode_scale
from humming_convert.decode_weight import (
    Codes,
    RepackedForm,
    decode_repacked,
    decode_rows,
    undo_int_to_float,
    unflatten,
)
from humming_convert.errors import Problem, VerificationError
from humming_loader.dtypes import dtype_info

Raw = npt.NDArray[Any]

_DTYPE = re.compile(r"(?P<kind>u?int|b?float)(?P<bits>\d+)(?:e(?P<exponent>\d+)m(?P<mantissa>\d+))?")


@dataclass(frozen=True, slots=True)
class NumberType:
    """One of Humming's number types by its name: `uint4`, `float4e2m1`, `bfloat16`, `float8e0m7`."""

    name: str
    bits: int
    is_integer: bool
    exponent_bits: int | None

    @property
    def is_sign_magnitude(self) -> bool:
        """Whether it is a `float{b}e0m{b-1}`: an integer stored as sign and magnitude."""
        return self.exponent_bits == 0


def number_type(name: str) -> NumberType:
    """Humming's number type called `name`. Raises VerificationError for what is none."""
    match = _DTYPE.fullmatch(name)
    if match is None:
        raise VerificationError([Problem("layer_config", "one of Humming's number types", repr(name))])
    exponent = match["exponent"]
    bits, is_integer = int(match["bits"]), match["kind"].endswith("int")
    return NumberType(name, bits, is_integer, None if exponent is None else int(exponent))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What decides where the bits of a sublayer lie: its `LayerConfig` and the resolved flags.

    `shape_n` and `shape_k` include the padding `pad_n` and `pad_k`; `group` is the kernel's (0: one per row).
    """

    shape_n: int
    shape_k: int
    pad_n: int
    pad_k: int
    activation: NumberType
    weight: NumberType
    scale: NumberType
    result: NumberType
    group: int
    group_n: int
    scale_type: str
    scale_2_type: str
    has_zero_point: bool
    sm: int
    flags: Mapping[str, bool]

    @property
    def logical_n(self) -> int:
        """Rows of one expert without padding."""
        return self.shape_n - self.pad_n

    @property
    def logical_k(self) -> int:
        """Columns of one expert without padding."""
        return self.shape_k - self.pad_k

    @property
    def is_block_scaled(self) -> bool:
        """Whether the tensor cores take the scales themselves, in an order of their own."""
        return self.flags["use_block_scaled_mma"] and self.scale_type in ("group", "block")

    @property
    def is_offset_signed(self) -> bool:
        """Whether integer codes are stored with their top bit inverted, as two's complement."""
        same_width = self.activation.is_integer and self.weight.is_integer
        same_width = same_width and self.activation.bits == self.weight.bits
        return same_width or self.flags["use_ldmatrix_dequant"]

    @property
    def is_int_to_float(self) -> bool:
        """Whether integer codes are stored relative to their zero point (or to the middle)."""
        if not self.weight.is_integer or self.activation.is_integer or self.is_in_rows:
            return False
        if self.activation.bits < 16:
            return True
        most = 6 if self.has_zero_point else 7
        return self.activation.name == "bfloat16" and self.weight.bits > most

    @property
    def is_in_rows(self) -> bool:
        """Whether the weight is stored by rows (raw or flat) instead of by threads."""
        same_width = self.activation.bits == self.weight.bits
        return self.flags["use_raw_weight"] or self.flags["use_flat_weight"] or same_width


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sublayer in logical order, for the experts given.

    `codes` is `(E, N, K)`: floating-point codes as stored, integers offset by half their range.
    `scale` is `(E, N, G)` (`(E, N / block, G)`, or `(E,)` for one per tensor), uint8 or uint16 as raw bits or
    float32. `zero_point` `(E, N, G)`; `scale_2` `(E,)` float32 or `(E, N)` uint16; `bias` `(E, N)` uint16.
    """

    codes: Codes
    scale: Raw
    zero_point: Codes | None
    scale_2: Raw | None
    bias: Raw | None


def parse_layout(layer_config: str, flags: Mapping[str, bool]) -> PackedLayout:
    """The layout of a manifest's sublayer. Raises VerificationError when `layer_config` is not complete."""
    try:
        config = json.loads(layer_config)
        return PackedLayout(
            shape_n=int(config["shape_n"]),
            shape_k=int(config["shape_k"]),
            pad_n=int(config["pad_shape_n"]),
            pad_k=int(config["pad_shape_k"]),
            activation=number_type(config["a_dtype"]),
            weight=number_type(config["b_dtype"]),
            scale=number_type(config["bs_dtype"]),
            result=number_type(config["c_dtype"]),
            group=int(config["weight_scale_group_size"]),
            group_n=int(config["weight_scale_group_size_n"]),
            scale_type=str(config["weight_scale_type"]),
            scale_2_type=str(config["weight_scale_2_type"]),
            has_zero_point=bool(config["has_zero_point"]) and not config["is_fp_zero_point"],
            sm=int(config["sm_version"]),
            flags=dict(flags),
        )
    except (ValueError, KeyError, TypeError) as error:
        found = f"text that lacks or spoils a field ({error})"
        raise VerificationError([Problem("layer_config", "Humming's LayerConfig", found)]) from error


def raw_array(data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...], name: str) -> Raw:
    """Bytes of a stored tensor in numpy: float32 for F32, unsigned integers of their width for the others."""
    if dtype == "F32":
        return np.frombuffer(data, np.float32).reshape(shape)
    bits = dtype_info(dtype, name).bits
    return np.frombuffer(data, np.dtype(f"u{bits // 8}")).reshape(shape)


def decode(layout: PackedLayout, tensors: Mapping[str, Raw]) -> Decoded:
    """The logical form of packed `tensors` (short names, any run of experts on axis 0, from `raw_array`).

    Raises VerificationError when the padding holds anything but what padding must hold.
    """
    zero_point = None
    if layout.has_zero_point:
        zero_point = decode_scale.zero_points(tensors["zero_point"], layout.weight.bits, _zero_groups(layout))
    codes = _decode_codes(layout, tensors["weight"], zero_point)
    scale = _decode_scale(layout, tensors["weight_scale"])
    scale_2, bias = tensors.get("weight_scale_2"), tensors.get("bias")
    if scale_2 is not None and layout.scale_2_type == "channel":
        scale_2 = decode_scale.rows_of_32(scale_2)
    if bias is not None:
        bias = decode_scale.rows_of_32(bias)
    return _without_padding(layout, Decoded(codes, scale, zero_point, scale_2, bias))


def _zero_groups(layout: PackedLayout) -> int:
    grouped = layout.flags["use_block_scaled_mma"] and layout.activation.bits == 4 and layout.group > 0
    return 256 // layout.activation.bits // layout.group if grouped else 1


def _decode_codes(layout: PackedLayout, weight: Raw, zero_point: Codes | None) -> Codes:
    bits = layout.weight.bits
    if layout.is_in_rows:
        rows = weight.reshape(weight.shape[0], layout.shape_n, -1)
        if layout.flags["use_flat_weight"]:
            rows = unflatten(rows, layout.shape_n)
        codes = decode_rows(rows, bits, layout.shape_k)
    else:
        packed_k, fused = layout.flags["use_packed_k_layout"], layout.flags["use_fused_e8m0_scale"]
        form = RepackedForm(
            bits=bits,
            activation_bits=layout.activation.bits,
            packed_k=packed_k,
            transposed=packed_k and not fused,
            signs_only=fused and layout.activation.name == "float8e4m3",
            plain=layout.flags["use_native_dequant"],
        )
        codes = decode_repacked(weight, form, layout.shape_n, layout.shape_k)
    middle = 1 << (bits - 1)
    if layout.is_offset_signed:
        return codes ^ np.uint8(middle)
    if layout.weight.is_sign_magnitude:
        magnitude = codes & np.uint8(middle - 1)
        return np.where(codes & np.uint8(middle), middle - magnitude, middle + magnitude).astype(np.uint8)
    if not layout.is_int_to_float:
        return codes
    if zero_point is None:
        return undo_int_to_float(codes, middle, bits)
    grouped = codes.reshape(*zero_point.shape, -1)
    return undo_int_to_float(grouped, zero_point[..., None], bits).reshape(codes.shape)


def _decode_scale(layout: PackedLayout, stored: Raw) -> Raw:
    if layout.scale_type == "tensor":
        return stored
    if layout.scale_type == "block":
        return decode_scale.block_scales(stored)
    if not layout.is_block_scaled:
        return decode_scale.group_scales(stored, per_row=layout.flags["should_apply_bs_on_c"])
    if layout.sm // 10 in (10, 11):
        groups = layout.shape_k // layout.group
        return decode_scale.umma_scales(stored)[:, : layout.shape_n, :groups]
    if 256 // layout.activation.bits == layout.group:
        return decode_scale.mma_scale_pairs(stored)
    return decode_scale.mma_scale_words(stored)


def _without_padding(layout: PackedLayout, full: Decoded) -> Decoded:
    n, k = layout.logical_n, layout.logical_k
    nothing = 1 << (layout.weight.bits - 1) if layout.weight.is_sign_magnitude else 0
    if (full.codes[:, n:] != nothing).any() or (full.codes[:, :n, k:] != nothing).any():
        raise VerificationError([Problem("weight", "padding without weights", "weights in the padding")])
    scale, zero_point = full.scale, full.zero_point
    if layout.scale_type in ("group", "channel"):
        groups = max(1, k // layout.group) if layout.group else 1
        _check_scale_padding(layout, (scale[:, n:], scale[:, :n, groups:]))
        scale = scale[:, :n, :groups]
        zero_point = None if zero_point is None else zero_point[:, :n, :groups]
    elif layout.scale_type == "block":
        scale = scale[:, : -(-n // layout.group_n), : -(-k // layout.group)]
    scale_2 = full.scale_2
    if scale_2 is not None and scale_2.ndim == 2:
        scale_2 = scale_2[:, :n]
    bias = full.bias
    if bias is not None:
        if bias[:, n:].any():
            raise VerificationError([Problem("bias", "padding of zeros", "values in the padding")])
        bias = bias[:, :n]
    return Decoded(full.codes[:, :n, :k], scale, zero_point, scale_2, bias)


def _check_scale_padding(layout: PackedLayout, padding: tuple[Raw, ...]) -> None:
    """Padded scales must be harmless: no NaN among e8m0 exponents, zero otherwise."""
    is_exponent = layout.scale.name == "float8e8m0"
    if any((part == 255).any() if is_exponent else part.any() for part in padding):
        expected = "padding without NaN" if is_exponent else "padding of zeros"
        raise VerificationError([Problem("weight_scale", expected, "other values in the padding")])
