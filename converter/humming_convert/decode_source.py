"""One projection of one expert as the checkpoint stores it, decoded to integer codes and scales.

In numpy alone and from each format's own definition: neither Humming nor the code that converts has a part in
it, so that the two can be held against each other. Arrays are raw: unsigned integers of the element's width,
except F32, which is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from humming_convert.errors import Problem, VerificationError

Raw = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Nibble j of an AWQ word is this column of its eight.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A source tensor: its dtype code and its raw elements in the stored shape."""

    dtype: str
    array: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """`codes` `(N, K)`: float codes as stored, integers offset by half their range. `bits` is their width.

    `scale` is float32 `(N, G)` or `(1,)` (one for all), or uint8 `(N, G)` when `scale_code` says F8_E8M0 or
    F8_E4M3. `zero_point` `(N, G)` in the codes' own offset; None means the middle. `scale_2` is one more
    factor for all. `bias` `(N,)`.
    """

    codes: Codes
    bits: int
    scale: Raw
    scale_code: str
    zero_point: Codes | None = None
    scale_2: np.float32 | None = None
    bias: Floats | None = None


Tensors = Mapping[str, RawTensor]
Decoder = Callable[[Mapping[str, Any], Tensors], Projection]


def decode_projection(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """Decode the tensors (under the schema's names) of one projection.

    `schema` is the manifest's source schema. Raises VerificationError for a schema without a decoder here.
    """
    method = schema.get("quant_method")
    key = f"{method}:{schema.get('format')}" if method == "compressed-tensors" else str(method)
    decoder = _DECODERS.get(key)
    if decoder is None:
        raise VerificationError([Problem("source_schema", "one of " + ", ".join(_DECODERS), key)])
    return decoder(schema, tensors)


def to_float32(tensor: RawTensor) -> Floats:
    """The values of a float or e8m0 tensor, exactly. Raises VerificationError for other dtypes."""
    raw = tensor.array
    if tensor.dtype == "F32":
        return raw.astype(np.float32, copy=False)
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if tensor.dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    if tensor.dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32)
    raise VerificationError([Problem("scale", "a float dtype", tensor.dtype)])


def nibbles(packed: Raw) -> Codes:
    """`(..., 2 w)` of bytes `(..., w)`, low nibble first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def bit_fields(words: Raw, bits: int) -> Codes:
    """Codes along the last axis of 32-bit words, lowest bit first, across the borders of words."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        return nibbles(raw)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    fields = stream.reshape(*raw.shape[:-1], -1, bits)
    out = np.zeros(fields.shape[:-1], np.uint8)
    for index in range(bits):
        out |= fields[..., index] << np.uint8(index)
    return out


def _bias(tensors: Tensors) -> Floats | None:
    return to_float32(tensors["bias"]) if "bias" in tensors else None


def _scale_name(tensors: Tensors) -> str:
    return "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"


def _float8(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    codes = tensors["weight"].array.view(np.uint8)
    scale = to_float32(tensors[_scale_name(tensors)])
    block = schema.get("weight_block_size") or schema.get("block_structure")
    if scale.size == 1 and block is None:
        scale = scale.reshape(1)
    elif block is not None:
        rows, columns = codes.shape
        group = math.gcd(int(block[1]), columns)
        scale = scale.repeat(int(block[0]), axis=0)[:rows]
        scale = scale.repeat(int(block[1]) // group, axis=1)[:, : columns // group]
    return Projection(codes=codes, bits=8, scale=scale, scale_code="F32", bias=_bias(tensors))


def _mxfp4(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    weight = tensors["weight_packed" if "weight_packed" in tensors else "weight"].array.view(np.uint8)
    # gpt-oss keeps its blocks of 16 bytes on an axis of their own.
    codes = nibbles(weight.reshape(weight.shape[0], -1))
    scale = tensors["weight_scale"].array.view(np.uint8)
    return Projection(codes=codes, bits=4, scale=scale, scale_code="F8_E8M0", bias=_bias(tensors))


def _nvfp4(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    codes = nibbles(tensors["weight_packed"].array)
    # compressed-tensors stores what the values were multiplied with before they were rounded.
    reciprocal = to_float32(tensors["weight_global_scale"]).reshape(-1)[0]
    return Projection(
        codes=codes,
        bits=4,
        scale=tensors["weight_scale"].array,
        scale_code="F8_E4M3",
        scale_2=np.float32(1) / reciprocal,
        bias=_bias(tensors),
    )


def _awq(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    def columns(words: Raw) -> Codes:
        """Codes `(N, rows)` of words `(rows, N / 8)`."""
        turned = np.ascontiguousarray(words.T)
        raw = turned.view(np.uint8).reshape(*turned.shape, 4)
        out = np.empty((turned.shape[0], 8, turned.shape[1]), np.uint8)
        for byte in range(4):
            np.bitwise_and(raw[..., byte], 15, out=out[:, _AWQ_COLUMNS[2 * byte]])
            np.right_shift(raw[..., byte], 4, out=out[:, _AWQ_COLUMNS[2 * byte + 1]])
        return out.reshape(-1, turned.shape[1])

    zero_point = columns(tensors["qzeros"].array) if schema.get("zero_point", True) else None
    return Projection(
        codes=columns(tensors["qweight"].array),
        bits=4,
        scale=to_float32(tensors["scales"]).T,
        scale_code="F32",
        zero_point=zero_point,
        bias=_bias(tensors),
    )


def _gptq(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    bits = int(schema["bits"])
    if not schema.get("sym", True):
        # Whether a zero point is stored as it is or one less depends on the writer.
        raise VerificationError([Problem("source_schema", "symmetric GPTQ", "asymmetric")])
    return Projection(
        codes=bit_fields(tensors["qweight"].array.T, bits),
        bits=bits,
        scale=to_float32(tensors["scales"]).T,
        scale_code="F32",
        bias=_bias(tensors),
    )


def _packed_integers(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    bits = int(schema["num_bits"])
    zero_point = None
    if not schema.get("symmetric", True):
        packed = tensors["weight_zero_point"].array
        zero_point = bit_fields(packed.T, bits).T
    return Projection(
        codes=bit_fields(tensors["weight_packed"].array, bits),
        bits=bits,
        scale=to_float32(tensors["weight_scale"]),
        scale_code="F32",
        zero_point=zero_point,
        bias=_bias(tensors),
    )


def _bytes(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    """Signed bytes, or FP8: the element type says which."""
    if tensors["weight"].dtype != "I8":
        return _float8(schema, tensors)
    middle = np.uint8(128)
    zero_point = None
    if not schema.get("symmetric", True):
        zero_point = tensors["weight_zero_point"].array.view(np.uint8) ^ middle
    scale = to_float32(tensors["weight_scale"])
    return Projection(
        codes=tensors["weight"].array.view(np.uint8) ^ middle,
        bits=8,
        scale=scale.reshape(1) if scale.size == 1 else scale,
        scale_code="F32",
        zero_point=zero_point,
        bias=_bias(tensors),
    )


_DECODERS: dict[str, Decoder] = {
    "fp8": _float8,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors:pack-quantized": _packed_integers,
    "compressed-tensors:int-quantized": _bytes,
    "compressed-tensors:float-quantized": _bytes,
    "compressed-tensors:naive-quantized": _bytes,
    "compressed-tensors:nvfp4-pack-quantized": _nvfp4,
    "compressed-tensors:mxfp4-pack-quantized": _mxfp4,
}
