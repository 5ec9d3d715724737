"""One projection of one expert as the checkpoint stores it, decoded to integer codes and scales.

In numpy alone and from each format's own definition: neither Humming nor the code that converts has a part in
it, so that the two can be held against each other. Arrays are raw: unsigned integers of the element's width,
except F32, which is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from humming_convert.decode_integers import awq, gptq, humming, packed_integers, quark
from humming_convert.decode_values import (
    Codes,
    Floats,
    Projection,
    Raw,
    RawTensor,
    Tensors,
    bias_of,
    bit_fields,
    nibbles,
    to_float32,
)
from humming_convert.errors import Problem, VerificationError

__all__ = [
    "Codes",
    "Floats",
    "Projection",
    "Raw",
    "RawTensor",
    "bit_fields",
    "decode_projection",
    "to_float32",
]

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
    return Projection(codes=codes, bits=8, scale=scale, scale_code="F32", bias=bias_of(tensors))


def _mxfp4(schema: Mapping[str, Any], tensors: Tensors) -> Projection:
    weight = tensors["weight_packed" if "weight_packed" in tensors else "weight"].array.view(np.uint8)
    # gpt-oss keeps its blocks of 16 bytes on an axis of their own.
    codes = nibbles(weight.reshape(weight.shape[0], -1))
    scale = tensors["weight_scale"].array.view(np.uint8)
    return Projection(codes=codes, bits=4, scale=scale, scale_code="F8_E8M0", bias=bias_of(tensors))


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
        bias=bias_of(tensors),
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
        bias=bias_of(tensors),
    )


_DECODERS: dict[str, Decoder] = {
    "fp8": _float8,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "awq": awq,
    "gptq": gptq,
    "quark": quark,
    "humming": humming,
    "compressed-tensors:pack-quantized": packed_integers,
    "compressed-tensors:int-quantized": _bytes,
    "compressed-tensors:float-quantized": _bytes,
    "compressed-tensors:naive-quantized": _bytes,
    "compressed-tensors:nvfp4-pack-quantized": _nvfp4,
    "compressed-tensors:mxfp4-pack-quantized": _mxfp4,
}
