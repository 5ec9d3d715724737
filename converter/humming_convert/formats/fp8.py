"""FP8 with one scale per tensor or per block, as DeepSeek, Qwen, Mistral, AutoFP8 and auto-round write it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from humming_convert.formats.base import (
    FLOATS,
    MIN_GROUP,
    Accepted,
    Answer,
    Refused,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    require_shapes,
    rounding_check,
    tensor_scale_rule,
    unsupported,
)
from humming_convert.plan import Step

_METHODS = ("fp8", "auto-round", "")


def weight_shapes(sublayer: Sublayer, parameter: str = "weight") -> tuple[tuple[int, ...], int] | Refused:
    """Rows per projection and the common K of a plain [N, K] weight, or why there is none."""
    shapes = [stack[parameter].shape for stack in sublayer.stacks if parameter in stack]
    if len(shapes) != len(sublayer.stacks):
        return broken(sublayer, f"{parameter} in every projection", sublayer.describe())
    if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
        return broken(sublayer, f"{parameter} [N, K] with one K", f"{[list(shape) for shape in shapes]}")
    return tuple(shape[0] for shape in shapes), shapes[0][1]


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
) -> tuple[Rule, dict[str, Any]] | Refused:
    """The rule for a block scale [ceil(N/bn), ceil(K/bk)] per projection, and the schema that then fits.

    Where blocks do not divide a projection's rows, concatenating gate and up would shift every scale of up, so each
    is expanded to rows first; where they do not divide K, groups become the greatest common divisor. `schema` is the
    weight schema to keep when neither happens (None: Humming's fp8 schema).
    """
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(extent) is int and extent > 0 for extent in block)
    ):
        hint = "give the block size with --quant-config; it cannot be told from shapes"
        return broken(sublayer, "a block size [rows, columns] in the quantization config", f"{block}", hint)
    block_n, block_k = block
    shapes = [(math.ceil(n / block_n), math.ceil(shape_k / block_k)) for n in rows]
    wrong = require_shapes(sublayer, parameter, shapes)
    if wrong is not None:
        return wrong
    steps: list[Step] = []
    code = sublayer.dtypes(parameter)[0]
    if code == "F8_E8M0":
        steps.append(Step("e8m0_to_float32"))
    group = math.gcd(block_k, shape_k)
    if group < MIN_GROUP or group & -group < MIN_GROUP:
        expected = f"blocks whose columns and K = {shape_k} share a multiple of {MIN_GROUP}"
        return unsupported(sublayer, expected, f"{block_k}", "Humming's kernels have no smaller groups")
    columns = shape_k // group
    is_regrouped = group != block_k
    is_expanded = any(n % block_n for n in rows)
    if is_regrouped:
        steps.append(Step("regroup_columns", (("repeat", block_k // group), ("columns", columns))))
    if is_expanded:
        if len(set(rows)) != 1:
            return broken(sublayer, "gate and up of the same size", f"{list(rows)} rows")
        steps.append(Step("expand_rows", (("block", block_n), ("rows", rows[0]))))
    shape = (sum(rows) if is_expanded else sum(rows) // block_n, columns)
    is_changed = is_regrouped or is_expanded
    if schema is None or is_changed:
        schema = {"quant_method": "fp8", "weight_block_size": [1 if is_expanded else block_n, group]}
    check = "e8m0" if code == "F8_E8M0" else rounding_check(sublayer, parameter, "nonnegative")
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

    def match(self, sublayer: Sublayer) -> Answer:
        """FP8 weight and a one-element `weight_scale`."""
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale=FLOATS):
            return Rejected("there is no weight F8_E4M3 with weight_scale in F32, BF16 or F16")
        if any(
            math.prod(stack["weight_scale"].shape) != 1
            for stack in sublayer.stacks
            if "weight_scale" in stack
        ):
            return Rejected("weight_scale has more than one element")
        if sublayer.quantization.get("weight_block_size"):
            return broken(sublayer, "weight_scale_inv, as weight_block_size says", sublayer.describe())
        found = weight_shapes(sublayer)
        if isinstance(found, Refused):
            return found
        rows, shape_k = found
        is_static = "input_scale" in sublayer.parameters
        scheme = "static" if is_static else "dynamic"
        inputs = (tensor_scale_rule(sublayer, "input_scale", "input_scale", "positive"),) if is_static else ()
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema={"quant_method": "fp8"},
            input_schema={"quant_method": "fp8", "activation_scheme": scheme},
            rules=(
                Rule(
                    name="weight",
                    parameter="weight",
                    dtype="F8_E4M3",
                    shape=(sum(rows), shape_k),
                    is_weight=True,
                ),
                tensor_scale_rule(sublayer, "weight_scale", "weight_scale", "nonnegative"),
                *bias_rule(sublayer, sum(rows)),
            ),
            inputs=inputs,
        )


class Fp8Block:
    """`weight` F8_E4M3 [N, K] with `weight_scale_inv` [ceil(N/bn), ceil(K/bk)], which multiplies in spite of its name."""

    name = "fp8-block"
    summary = (
        "FP8 E4M3 with one scale per block of weights (DeepSeek V3, Qwen3, MiniMax, auto-round FP8_BLOCK)"
    )

    def match(self, sublayer: Sublayer) -> Answer:
        """FP8 weight and `weight_scale_inv`; the block size comes from the config."""
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale_inv=(*FLOATS, "F8_E8M0")):
            return Rejected("there is no weight F8_E4M3 with weight_scale_inv in F32, BF16, F16 or F8_E8M0")
        if len(sublayer.dtypes("weight_scale_inv")) != 1:
            return broken(
                sublayer, "weight_scale_inv of one dtype", ", ".join(sublayer.dtypes("weight_scale_inv"))
            )
        found = weight_shapes(sublayer)
        if isinstance(found, Refused):
            return found
        rows, shape_k = found
        block = block_size_of(sublayer.quantization, sublayer.method)
        scale = block_scale(sublayer, "weight_scale_inv", rows, shape_k, block, None)
        if isinstance(scale, Refused):
            return scale
        rule, schema = scale
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=schema,
            source_schema={
                "quant_method": "fp8",
                "weight_block_size": list(block) if isinstance(block, list) else None,
            },
            input_schema={"quant_method": "fp8", "activation_scheme": "dynamic"},
            rules=(
                Rule(
                    name="weight",
                    parameter="weight",
                    dtype="F8_E4M3",
                    shape=(sum(rows), shape_k),
                    is_weight=True,
                ),
                rule,
                *bias_rule(sublayer, sum(rows)),
            ),
        )
