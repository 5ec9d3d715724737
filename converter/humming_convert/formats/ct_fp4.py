"""compressed-tensors with 4 bit floats: MXFP4 (also auto-round's) and NVFP4."""

from __future__ import annotations

from typing import Any

from humming_convert.formats.base import (
    Accepted,
    Answer,
    Refused,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    require_shapes,
    tensor_scale_rule,
    unsupported,
)
from humming_convert.formats.compressed_tensors import METHOD, input_rules
from humming_convert.formats.ct_config import Scheme, scheme_of
from humming_convert.formats.fp8 import weight_shapes
from humming_convert.plan import Step

_MXFP4_GROUP = 32
_NVFP4_GROUP = 16


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


def _matching_scheme(sublayer: Sublayer, text: str, group: int) -> Scheme | Refused:
    scheme = scheme_of(sublayer)
    if isinstance(scheme, Refused):
        return scheme
    if (scheme.format, scheme.type, scheme.num_bits) != (text, "float", 4):
        expected = f"{scheme.format} {scheme.type}{scheme.num_bits} weights, as the quantization config says"
        return broken(sublayer, expected, sublayer.describe())
    if scheme.group_size != group or not scheme.symmetric:
        return unsupported(sublayer, f"symmetric groups of {group}", f"groups of {scheme.group_size}")
    return scheme


def _scale_shapes(sublayer: Sublayer, group: int) -> tuple[tuple[int, ...], int] | Refused:
    """Rows and K of packed 4 bit weights [N, K/2], once the scales [N, K/group] fit them."""
    found = weight_shapes(sublayer, "weight_packed")
    if isinstance(found, Refused):
        return found
    rows, shape_k = found[0], found[1] * 2
    if shape_k % 32:
        return unsupported(sublayer, "K that is a multiple of 32", f"{shape_k}")
    return require_shapes(sublayer, "weight_scale", [(n, shape_k // group) for n in rows]) or (rows, shape_k)


class CtMxfp4:
    """`weight_packed` U8 [N, K/2] (low nibble first), `weight_scale` U8 e8m0 [N, K/32]."""

    name = "ct-mxfp4"
    summary = "MXFP4 per expert (compressed-tensors mxfp4-pack-quantized, auto-round MXFP4)"

    def match(self, sublayer: Sublayer) -> Answer:
        """Packed bytes with exponent bytes; both writers store the same."""
        if sublayer.is_fused or not sublayer.has(weight_packed="U8", weight_scale=("U8", "F8_E8M0")):
            return Rejected("there is no weight_packed U8 with weight_scale U8 or F8_E8M0")
        if sublayer.method not in (METHOD, "auto-round", ""):
            return Rejected(f"quant_method is {sublayer.method}")
        scheme: Scheme | Refused | None = None
        if sublayer.method == METHOD:
            scheme = _matching_scheme(sublayer, "mxfp4-pack-quantized", _MXFP4_GROUP)
            if isinstance(scheme, Refused):
                return scheme
        found = _scale_shapes(sublayer, _MXFP4_GROUP)
        if isinstance(found, Refused):
            return found
        rows, shape_k = found
        total = sum(rows)
        steps = () if sublayer.dtypes("weight_scale") == ("U8",) else (Step("view", (("dtype", "uint8"),)),)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=_schema("mxfp4-pack-quantized", "group", _MXFP4_GROUP),
            input_schema=scheme.input_schema() if isinstance(scheme, Scheme) else None,
            rules=(
                Rule(
                    name="weight_packed",
                    parameter="weight_packed",
                    dtype="U8",
                    shape=(total, shape_k // 2),
                    is_weight=True,
                ),
                Rule(
                    name="weight_scale",
                    parameter="weight_scale",
                    dtype="U8",
                    shape=(total, shape_k // _MXFP4_GROUP),
                    steps=steps,
                    check="e8m0",
                ),
                *bias_rule(sublayer, total),
            ),
        )


class CtNvfp4:
    """`weight_packed` U8 [N, K/2], `weight_scale` F8_E4M3 [N, K/16], `weight_global_scale` F32 (1,), a reciprocal."""

    name = "ct-nvfp4"
    summary = "compressed-tensors nvfp4-pack-quantized, with or without input scales"

    def match(self, sublayer: Sublayer) -> Answer:
        """Packed bytes with FP8 scales; without the second scale the first means nothing."""
        if sublayer.is_fused or not sublayer.has(weight_packed="U8", weight_scale="F8_E4M3"):
            return Rejected("there is no weight_packed U8 with weight_scale F8_E4M3")
        if sublayer.method not in (METHOD, ""):
            return Rejected(f"quant_method is {sublayer.method}")
        if not sublayer.has(weight_global_scale="F32"):
            return broken(sublayer, "weight_global_scale F32 beside weight_packed", sublayer.describe())
        inputs: tuple[Rule, ...] = ()
        input_schema = None
        if sublayer.method == METHOD:
            scheme = _matching_scheme(sublayer, "nvfp4-pack-quantized", _NVFP4_GROUP)
            if isinstance(scheme, Refused):
                return scheme
            rules = input_rules(sublayer, scheme, "input_global_scale")
            if isinstance(rules, Refused):
                return rules
            inputs, input_schema = rules, scheme.input_schema()
        found = _scale_shapes(sublayer, _NVFP4_GROUP)
        if isinstance(found, Refused):
            return found
        wrong = require_shapes(
            sublayer, "weight_global_scale", [(1,)] * len(sublayer.stacks), [()] * len(sublayer.stacks)
        )
        return wrong or self._accept(sublayer, found[0], found[1], inputs, input_schema)

    def _accept(
        self,
        sublayer: Sublayer,
        rows: tuple[int, ...],
        shape_k: int,
        inputs: tuple[Rule, ...],
        input_schema: dict[str, Any] | None,
    ) -> Accepted:
        total = sum(rows)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=_schema("nvfp4-pack-quantized", "tensor_group", _NVFP4_GROUP),
            input_schema=input_schema,
            rules=(
                Rule(
                    name="weight_packed",
                    parameter="weight_packed",
                    dtype="U8",
                    shape=(total, shape_k // 2),
                    is_weight=True,
                ),
                Rule(
                    name="weight_scale",
                    parameter="weight_scale",
                    dtype="F8_E4M3",
                    shape=(total, shape_k // _NVFP4_GROUP),
                    check="nonnegative",
                ),
                tensor_scale_rule(sublayer, "weight_global_scale", "weight_global_scale", "positive"),
                *bias_rule(sublayer, total),
            ),
            inputs=inputs,
        )
