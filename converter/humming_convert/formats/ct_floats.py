"""compressed-tensors with floats: FP8, MXFP4 (also auto-round's) and NVFP4."""

from __future__ import annotations

from typing import Any

from humming_convert.formats.base import (
    FLOATS,
    Accepted,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    check_multiple,
    exponent_check,
    require_shapes,
    tensor_scale_rule,
    unequal_check,
    unsupported,
    weight_shapes,
)
from humming_convert.formats.ct_config import METHOD, Scheme, input_rules, row_scale, scheme_of, weight_schema
from humming_convert.formats.fp8 import BYTES_PER_WORD, block_scale
from humming_convert.plan import Step

_MXFP4_GROUP = 32
_NVFP4_GROUP = 16


class CtFloat8:
    """`weight` F8_E4M3 [N, K] with `weight_scale` one, [N, 1] or per block, perhaps `input_scale`."""

    name = "ct-float8"
    summary = "compressed-tensors float-quantized and naive-quantized: FP8, tensor, channel or block"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """FP8 weight with a scale, under compressed-tensors' config."""
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale=FLOATS):
            return Rejected("there is no weight F8_E4M3 with weight_scale in F32, BF16 or F16")
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        scheme = scheme_of(sublayer)
        is_float8 = (scheme.type, scheme.num_bits) == ("float", 8)
        if scheme.format not in ("float-quantized", "naive-quantized") or not is_float8:
            raise broken(sublayer, scheme.told(), sublayer.describe())
        if not scheme.symmetric:
            raise unsupported(sublayer, "symmetric FP8 weights", "asymmetric ones")
        rows, shape_k = weight_shapes(sublayer)
        check_multiple(sublayer, "K (columns of weight)", [shape_k], BYTES_PER_WORD)
        source_schema = schema = weight_schema(scheme)
        if scheme.strategy == "tensor":
            check = unequal_check(sublayer, "nonnegative")
            scale = tensor_scale_rule(sublayer, "weight_scale", "weight_scale", check)
        elif scheme.strategy == "block":
            scale, schema = block_scale(sublayer, "weight_scale", rows, shape_k, scheme.block, schema)
        else:
            scale = row_scale(sublayer, scheme, rows, shape_k)
        weight = Rule(name="weight", parameter="weight", dtype="F8_E4M3", shape=(sum(rows), shape_k), is_weight=True)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=schema,
            source_schema=source_schema,
            input_schema=scheme.input_schema(),
            rules=(weight, scale, *bias_rule(sublayer, rows)),
            inputs=input_rules(sublayer, scheme, "input_scale"),
        )


class CtMxfp4:
    """`weight_packed` U8 [N, K/2] (low nibble first), `weight_scale` U8 e8m0 [N, K/32]."""

    name = "ct-mxfp4"
    summary = "MXFP4 per expert (compressed-tensors mxfp4-pack-quantized, auto-round MXFP4)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Packed bytes with exponent bytes; both writers store the same."""
        if sublayer.is_fused or not sublayer.has(weight_packed="U8", weight_scale=("U8", "F8_E8M0")):
            return Rejected("there is no weight_packed U8 with weight_scale U8 or F8_E8M0")
        if sublayer.method not in (METHOD, "auto-round", ""):
            return Rejected(f"quant_method is {sublayer.method}")
        input_schema = None
        if sublayer.method == METHOD:
            scheme = _four_bit_scheme(sublayer, "mxfp4-pack-quantized", _MXFP4_GROUP)
            input_schema = scheme.input_schema()
        is_bytes = sublayer.dtypes("weight_scale") == ("U8",)
        return _four_bit(
            sublayer,
            self.name,
            _schema("mxfp4-pack-quantized", "group", _MXFP4_GROUP),
            dtype="U8",
            steps=() if is_bytes else (Step("view", (("dtype", "uint8"),)),),
            check=exponent_check(sublayer),
            input_schema=input_schema,
        )


class CtNvfp4:
    """`weight_packed` U8, `weight_scale` F8_E4M3 [N, K/16], `weight_global_scale` F32 (1,), a reciprocal."""

    name = "ct-nvfp4"
    summary = "compressed-tensors nvfp4-pack-quantized, with or without input scales"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Packed bytes with FP8 scales; without the second scale the first means nothing."""
        if sublayer.is_fused or not sublayer.has(weight_packed="U8", weight_scale="F8_E4M3"):
            return Rejected("there is no weight_packed U8 with weight_scale F8_E4M3")
        if sublayer.method not in (METHOD, ""):
            return Rejected(f"quant_method is {sublayer.method}")
        if "weight_global_scale" not in sublayer.parameters:
            raise broken(sublayer, "weight_global_scale beside weight_packed", sublayer.describe())
        inputs: tuple[Rule, ...] = ()
        input_schema = None
        check = unequal_check(sublayer, "positive,reciprocal", is_reciprocal=True)
        if sublayer.method == METHOD:
            scheme = _four_bit_scheme(sublayer, "nvfp4-pack-quantized", _NVFP4_GROUP)
            inputs = input_rules(sublayer, scheme, "input_global_scale")
            input_schema = scheme.input_schema()
        return _four_bit(
            sublayer,
            self.name,
            _schema("nvfp4-pack-quantized", "tensor_group", _NVFP4_GROUP),
            dtype="F8_E4M3",
            check="nonnegative",
            more=(tensor_scale_rule(sublayer, "weight_global_scale", "weight_global_scale", check),),
            inputs=inputs,
            input_schema=input_schema,
        )


def _schema(text: str, strategy: str, group: int) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "format": text,
        "type": "float",
        "num_bits": 4,
        "strategy": strategy,
        "symmetric": True,
        "group_size": group,
    }


def _four_bit_scheme(sublayer: Sublayer, text: str, group: int) -> Scheme:
    scheme = scheme_of(sublayer)
    if (scheme.format, scheme.type, scheme.num_bits) != (text, "float", 4):
        raise broken(sublayer, scheme.told(), sublayer.describe())
    if scheme.group_size != group or not scheme.symmetric:
        raise unsupported(sublayer, f"symmetric groups of {group}", f"groups of {scheme.group_size}")
    return scheme


def _four_bit(
    sublayer: Sublayer,
    name: str,
    schema: dict[str, Any],
    *,
    dtype: str,
    check: str,
    steps: tuple[Step, ...] = (),
    more: tuple[Rule, ...] = (),
    inputs: tuple[Rule, ...] = (),
    input_schema: dict[str, Any] | None,
) -> Accepted:
    """Packed 4 bit floats [N, K/2] with one scale of `dtype` per group, and `more` tensors."""
    rows, width = weight_shapes(sublayer, "weight_packed")
    total, shape_k, group = sum(rows), width * 2, int(schema["group_size"])
    check_multiple(sublayer, "K", [shape_k], 32)
    require_shapes(sublayer, "weight_scale", [(n, shape_k // group) for n in rows])
    weight = Rule(name="weight_packed", parameter="weight_packed", dtype="U8", shape=(total, width), is_weight=True)
    scale = Rule(
        name="weight_scale",
        parameter="weight_scale",
        dtype=dtype,
        shape=(total, shape_k // group),
        steps=steps,
        check=check,
    )
    return Accepted(
        format=name,
        stacks_n=rows,
        shape_k=shape_k,
        weight_schema=schema,
        input_schema=input_schema,
        rules=(weight, scale, *more, *bias_rule(sublayer, rows)),
        inputs=inputs,
    )
