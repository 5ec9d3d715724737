"""FP8 with one scale per tensor or per block, as DeepSeek, Qwen, Mistral, AutoFP8 and auto-round write it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from humming_convert.formats.base import (
    FLOATS,
    MIN_GROUP,
    Accepted,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    check_multiple,
    one_dtype,
    require_shapes,
    rounding_check,
    tensor_scale_rule,
    unequal_check,
    unsupported,
    weight_shapes,
)
from humming_convert.plan import Step

# Humming packs the bytes of a row into words.
BYTES_PER_WORD = 4
_METHODS = ("fp8", "auto-round", "")


def block_size_of(quantization: Mapping[str, Any], method: str) -> object:
    """What the config says of the block: `weight_block_size`, or auto-round's two-element `group_size`."""
    return quantization.get("group_size" if method == "auto-round" else "weight_block_size")


def block_scale(
    sublayer: Sublayer,
    parameter: str,
    rows: Sequence[int],
    shape_k: int,
    block: object,
    schema: dict[str, Any] | None,
) -> tuple[Rule, dict[str, Any]]:
    """The rule for a block scale [ceil(N/bn), ceil(K/bk)] per projection, and the schema that then fits.

    Where blocks do not divide a projection's rows, concatenating gate and up would shift every scale of up,
    so each is expanded to rows first; where they do not divide K, groups become the greatest common divisor.
    `schema` is the weight schema to keep when neither happens (None: Humming's fp8 schema).
    """
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(extent) is int and extent > 0 for extent in block)
    ):
        hint = "give the block size with --quant-config; it cannot be told from shapes"
        raise broken(sublayer, "a block size [rows, columns] in the quantization config", f"{block!r}", hint)
    block_n, block_k = block
    shapes = [(math.ceil(n / block_n), math.ceil(shape_k / block_k)) for n in rows]
    require_shapes(sublayer, parameter, shapes)
    steps: list[Step] = []
    code = one_dtype(sublayer, parameter)
    if code == "F8_E8M0":
        steps.append(Step("e8m0_to_float32"))
    group = math.gcd(block_k, shape_k)
    if group < MIN_GROUP or group & -group < MIN_GROUP:
        expected = f"blocks whose columns and K = {shape_k} share a multiple of {MIN_GROUP}"
        raise unsupported(sublayer, expected, f"{block_k}", "Humming's kernels have no smaller groups")
    columns = shape_k // group
    is_regrouped = group != block_k
    is_expanded = any(n % block_n for n in rows)
    if is_regrouped:
        steps.append(Step("regroup_columns", (("repeat", block_k // group), ("columns", columns))))
    if is_expanded:
        if len(set(rows)) != 1:
            raise broken(sublayer, "gate and up of the same size", f"{list(rows)} rows")
        steps.append(Step("expand_rows", (("block", block_n), ("rows", rows[0]))))
    shape = (sum(rows) if is_expanded else sum(rows) // block_n, columns)
    is_changed = is_regrouped or is_expanded
    if schema is None or is_changed:
        schema = {"quant_method": "fp8", "weight_block_size": [1 if is_expanded else block_n, group]}
    check = rounding_check(sublayer, parameter, "e8m0" if code == "F8_E8M0" else "nonnegative")
    rule = Rule(
        name="weight_scale_inv" if schema["quant_method"] == "fp8" else "weight_scale",
        parameter=parameter,
        dtype="F32" if code == "F8_E8M0" else code,
        shape=shape,
        steps=tuple(steps),
        check=check,
    )
    return rule, schema


class Fp8Tensor:
    """`weight` F8_E4M3 [N, K] with one `weight_scale` () or (1,), perhaps with a static `input_scale`."""

    name = "fp8-tensor"
    summary = "FP8 E4M3 with one scale per expert and projection (AutoFP8, Mixtral-FP8)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """FP8 weight and a one-element `weight_scale`."""
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale=FLOATS):
            return Rejected("there is no weight F8_E4M3 with weight_scale in F32, BF16 or F16")
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        if sublayer.quantization.get("weight_block_size"):
            raise broken(sublayer, "weight_scale_inv, as weight_block_size says", sublayer.describe())
        rows, shape_k = weight_shapes(sublayer)
        check_multiple(sublayer, "K (columns of weight)", [shape_k], BYTES_PER_WORD)
        is_static = "input_scale" in sublayer.parameters
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema={"quant_method": "fp8"},
            input_schema={"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"},
            rules=(
                _weight(rows, shape_k),
                tensor_scale_rule(sublayer, "weight_scale", "weight_scale", unequal_check(sublayer, "nonnegative")),
                *bias_rule(sublayer, rows),
            ),
            inputs=(tensor_scale_rule(sublayer, "input_scale", "input_scale", "positive"),) if is_static else (),
        )


class Fp8Block:
    """`weight` F8_E4M3 with `weight_scale_inv` [ceil(N/bn), ceil(K/bk)], which multiplies."""

    name = "fp8-block"
    summary = "FP8 E4M3 with one scale per block of weights (DeepSeek V3, Qwen3, auto-round FP8_BLOCK)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """FP8 weight and `weight_scale_inv`; the block size comes from the config."""
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale_inv=(*FLOATS, "F8_E8M0")):
            return Rejected("there is no weight F8_E4M3 with weight_scale_inv in F32, BF16, F16 or F8_E8M0")
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        rows, shape_k = weight_shapes(sublayer)
        block = block_size_of(sublayer.quantization, sublayer.method)
        rule, schema = block_scale(sublayer, "weight_scale_inv", rows, shape_k, block, None)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=schema,
            source_schema={"quant_method": "fp8", "weight_block_size": block},
            input_schema={"quant_method": "fp8", "activation_scheme": "dynamic"},
            rules=(_weight(rows, shape_k), rule, *bias_rule(sublayer, rows)),
        )


def _weight(rows: Sequence[int], shape_k: int) -> Rule:
    return Rule(name="weight", parameter="weight", dtype="F8_E4M3", shape=(sum(rows), shape_k), is_weight=True)
