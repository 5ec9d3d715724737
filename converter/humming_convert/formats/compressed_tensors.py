"""compressed-tensors with one scale level: packed and plain integers, and FP8."""

from __future__ import annotations

from typing import Any

from humming_convert.formats.base import (
    FLOATS,
    Accepted,
    Answer,
    Facts,
    Refused,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    check_group,
    require_shapes,
    rounding_check,
    tensor_scale_rule,
    unsupported,
)
from humming_convert.formats.ct_config import Scheme, scheme_of
from humming_convert.formats.fp8 import block_scale, weight_shapes
from humming_convert.plan import Step

METHOD = "compressed-tensors"


def weight_schema(scheme: Scheme) -> dict[str, Any]:
    """Humming's weight schema for a group, with nothing in it that Humming does not read."""
    schema: dict[str, Any] = {
        "quant_method": METHOD,
        # Humming adds the offset to signed bytes only under this name.
        "format": "int-quantized"
        if scheme.format == "naive-quantized" and scheme.type == "int"
        else scheme.format,
        "type": scheme.type,
        "num_bits": scheme.num_bits,
        "strategy": scheme.strategy,
        "symmetric": scheme.symmetric,
    }
    if scheme.group_size:
        schema["group_size"] = scheme.group_size
    if scheme.block is not None and scheme.strategy == "block":
        schema["block_structure"] = list(scheme.block)
    return schema


def input_rules(sublayer: Sublayer, scheme: Scheme, name: str) -> tuple[Rule, ...] | Refused:
    """The rule for the activations' static scale, if the config says that there is one."""
    if not scheme.has_static_input() or name not in sublayer.parameters:
        return ()
    if not sublayer.has(**{name: FLOATS}):
        return broken(sublayer, f"{name} in F32, BF16 or F16", ", ".join(sublayer.dtypes(name)))
    return (tensor_scale_rule(sublayer, name, name, "positive"),)


def row_scale(sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> Rule | Refused:
    """The rule for `weight_scale` [N, K/g] or [N, 1]."""
    if len(sublayer.dtypes("weight_scale")) != 1:
        return broken(sublayer, "weight_scale of one dtype", ", ".join(sublayer.dtypes("weight_scale")))
    groups = 1
    if scheme.strategy == "group":
        wrong = check_group(sublayer, scheme.group_size, shape_k)
        if wrong is not None:
            return wrong
        groups = shape_k // scheme.group_size
    elif scheme.strategy != "channel":
        return unsupported(sublayer, "one scale per group or per channel", f"strategy {scheme.strategy!r}")
    wrong = require_shapes(sublayer, "weight_scale", [(n, groups) for n in rows])
    if wrong is not None:
        return wrong
    return Rule(
        name="weight_scale",
        parameter="weight_scale",
        dtype=sublayer.dtypes("weight_scale")[0],
        shape=(sum(rows), groups),
        check=rounding_check(sublayer, "weight_scale", "nonnegative"),
    )


class PackedIntegers:
    """`weight_packed` I32 [N, K*b/32], `weight_scale`, `weight_shape`, asymmetric also `weight_zero_point` [N*b/32, G]."""

    name = "ct-pack-quantized"
    summary = "compressed-tensors pack-quantized: 2 to 8 bit integers, group or channel, symmetric or not"

    def match(self, sublayer: Sublayer) -> Answer:
        """Words of packed integers; the width of one integer comes from the config and is checked against shapes."""
        if sublayer.is_fused or not sublayer.has(weight_packed="I32", weight_scale=FLOATS):
            return Rejected("there is no weight_packed I32 with weight_scale in F32, BF16 or F16")
        if sublayer.method != METHOD:
            hint = "the width of the integers cannot be told from the file: name a config with --quant-config"
            found = f"quant_method {sublayer.method!r}" if sublayer.method else "no quantization config"
            return broken(sublayer, f"a quantization config of {METHOD}", found, hint)
        scheme = scheme_of(sublayer)
        if isinstance(scheme, Refused):
            return scheme
        if scheme.format != "pack-quantized" or scheme.type != "int" or not 2 <= scheme.num_bits <= 8:
            expected = (
                f"{scheme.format} {scheme.type}{scheme.num_bits} weights, as the quantization config says"
            )
            return broken(sublayer, expected, sublayer.describe())
        if "weight_g_idx" in sublayer.parameters:
            return unsupported(sublayer, "weights in the order of their columns", "weight_g_idx")
        found = weight_shapes(sublayer, "weight_packed")
        return found if isinstance(found, Refused) else self._accept(sublayer, scheme, *found)

    def _accept(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], words: int) -> Answer:
        shape_k = self._columns(sublayer, scheme, words)
        if isinstance(shape_k, Refused):
            return shape_k
        scale = row_scale(sublayer, scheme, rows, shape_k)
        zeros = self._zero_points(sublayer, scheme, rows, shape_k)
        inputs = input_rules(sublayer, scheme, "input_scale")
        for part in (scale, zeros, inputs):
            if isinstance(part, Refused):
                return part
        weight_shape = require_shapes(sublayer, "weight_shape", [(2,)] * len(rows))
        if weight_shape is not None:
            return weight_shape
        weight = Rule(
            name="weight_packed",
            parameter="weight_packed",
            dtype="I32",
            shape=(sum(rows), words),
            is_weight=True,
        )
        has_shape = "weight_shape" in sublayer.parameters
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=weight_schema(scheme),
            input_schema=scheme.input_schema(),
            rules=(weight, scale, *zeros, *bias_rule(sublayer, sum(rows))),  # type: ignore[arg-type, misc]
            inputs=inputs,  # type: ignore[arg-type]
            unused=("weight_shape",) if has_shape else (),
            expected={"weight_shape": tuple((n, shape_k) for n in rows)} if has_shape else {},
        )

    def _columns(self, sublayer: Sublayer, scheme: Scheme, words: int) -> int | Refused:
        """K, from the width in words. Until mid-2026 widths that do not divide 32 were padded to whole words."""
        bits = scheme.num_bits
        facts = sublayer.stacks[0].get("weight_scale", Facts("", ()))
        groups = facts.shape[-1] if len(facts.shape) == 2 else 0
        if scheme.strategy == "group" and scheme.group_size > 0 and groups:
            shape_k = groups * scheme.group_size
            dense, padded = -(-shape_k * bits // 32), -(-shape_k // (32 // bits))
            if words == padded != dense:
                hint = f"this is the packing of old compressed-tensors, {32 // bits} values a word: quantize again"
                return unsupported(sublayer, f"weight_packed of {dense} words a row", f"{words}", hint)
            if words != dense:
                expected = f"weight_packed of {dense} words a row for {groups} groups of {scheme.group_size}"
                return broken(sublayer, f"{expected} at {bits} bit", f"{words}")
        if words * 32 % bits or (words * 32 // bits) % 32:
            return unsupported(sublayer, f"K that is a multiple of 32 at {bits} bit", f"{words} words a row")
        return words * 32 // bits

    def _zero_points(
        self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int
    ) -> tuple[Rule, ...] | Refused:
        present = "weight_zero_point" in sublayer.parameters
        if scheme.symmetric:
            if present:
                return broken(sublayer, "no weight_zero_point, as symmetric says", sublayer.describe())
            return ()
        groups = shape_k // scheme.group_size if scheme.group_size else 1
        bits = scheme.num_bits
        if any(n * bits % 32 for n in rows):
            return unsupported(sublayer, f"N that fills whole words at {bits} bit", f"N {list(rows)}")
        packed = [(n * bits // 32, groups) for n in rows]
        if not sublayer.has(weight_zero_point="I32") or any(
            stack["weight_zero_point"].shape != shape
            for stack, shape in zip(sublayer.stacks, packed, strict=True)
            if "weight_zero_point" in stack
        ):
            found = [f"{fact.dtype} {list(fact.shape)}" for fact in _facts(sublayer, "weight_zero_point")]
            expected = f"weight_zero_point I32 {list(packed[0])}, packed along N"
            hint = "unpacked zero points do not say how they are meant: save again with compressed-tensors 0.9 or later"
            return broken(sublayer, expected, ", ".join(found) or "none", hint)
        shape = (sum(n * bits // 32 for n in rows), groups)
        return (Rule(name="weight_zero_point", parameter="weight_zero_point", dtype="I32", shape=shape),)


def _facts(sublayer: Sublayer, parameter: str) -> list[Facts]:
    return [stack[parameter] for stack in sublayer.stacks if parameter in stack]


class PlainIntegers:
    """`weight` I8 [N, K] signed, `weight_scale` [N, 1], [N, G] or one; asymmetric also `weight_zero_point` I8 [N, G]."""

    name = "ct-int8"
    summary = "compressed-tensors int-quantized and naive-quantized: 8 bit integers, tensor, channel or group"

    def match(self, sublayer: Sublayer) -> Answer:
        """Signed bytes with a scale."""
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        if sublayer.is_fused or not sublayer.has(weight="I8", weight_scale=FLOATS):
            return Rejected("there is no weight I8 with weight_scale in F32, BF16 or F16")
        scheme = scheme_of(sublayer)
        if isinstance(scheme, Refused):
            return scheme
        if scheme.format not in ("int-quantized", "naive-quantized") or scheme.type != "int":
            expected = (
                f"{scheme.format} {scheme.type}{scheme.num_bits} weights, as the quantization config says"
            )
            return broken(sublayer, expected, sublayer.describe())
        if scheme.num_bits != 8:
            expected = "8 bit integers in the format int-quantized"
            return unsupported(sublayer, expected, f"{scheme.num_bits} bit ones", "this is not supported yet")
        found = weight_shapes(sublayer)
        return found if isinstance(found, Refused) else self._accept(sublayer, scheme, *found)

    def _accept(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> Answer:
        if scheme.strategy == "tensor":
            wrong = require_shapes(sublayer, "weight_scale", [(1,)] * len(rows), [()] * len(rows))
            scale: Rule | Refused = wrong or tensor_scale_rule(
                sublayer, "weight_scale", "weight_scale", "nonnegative"
            )
        else:
            scale = row_scale(sublayer, scheme, rows, shape_k)
        zeros = self._zero_points(sublayer, scheme, rows, shape_k)
        inputs = input_rules(sublayer, scheme, "input_scale")
        for part in (scale, zeros, inputs):
            if isinstance(part, Refused):
                return part
        if shape_k % 32:
            return unsupported(sublayer, "K that is a multiple of 32", f"{shape_k}")
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=weight_schema(scheme),
            input_schema=scheme.input_schema(),
            rules=(
                Rule(
                    name="weight", parameter="weight", dtype="I8", shape=(sum(rows), shape_k), is_weight=True
                ),
                scale,  # type: ignore[arg-type]
                *zeros,  # type: ignore[misc]
                *bias_rule(sublayer, sum(rows)),
            ),
            inputs=inputs,  # type: ignore[arg-type]
        )

    def _zero_points(
        self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int
    ) -> tuple[Rule, ...] | Refused:
        """Humming wants them offset-binary and packed, while the file has one signed byte each."""
        if scheme.symmetric:
            if "weight_zero_point" in sublayer.parameters:
                return broken(sublayer, "no weight_zero_point, as symmetric says", sublayer.describe())
            return ()
        groups = shape_k // scheme.group_size if scheme.group_size else 1
        wrong = require_shapes(sublayer, "weight_zero_point", [(n, groups) for n in rows])
        if wrong is not None:
            return wrong
        if not sublayer.has(weight_zero_point="I8"):
            return broken(
                sublayer, "weight_zero_point I8", ", ".join(sublayer.dtypes("weight_zero_point")) or "none"
            )
        if any(n % 4 for n in rows):
            return unsupported(sublayer, "N that is a multiple of 4", f"N {list(rows)}")
        rule = Rule(
            name="weight_zero_point",
            parameter="weight_zero_point",
            dtype="I32",
            shape=(sum(rows) // 4, groups),
            steps=(Step("pack_int8_zero_point"),),
        )
        return (rule,)


class PlainFloats:
    """`weight` F8_E4M3 [N, K] with `weight_scale` one, [N, 1] or per block, perhaps with a static `input_scale`."""

    name = "ct-float8"
    summary = "compressed-tensors float-quantized and naive-quantized: FP8, tensor, channel or block"

    def match(self, sublayer: Sublayer) -> Answer:
        """FP8 weight with a scale, under compressed-tensors' config."""
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        if sublayer.is_fused or not sublayer.has(weight="F8_E4M3", weight_scale=FLOATS):
            return Rejected("there is no weight F8_E4M3 with weight_scale in F32, BF16 or F16")
        scheme = scheme_of(sublayer)
        if isinstance(scheme, Refused):
            return scheme
        if scheme.format not in ("float-quantized", "naive-quantized") or (scheme.type, scheme.num_bits) != (
            "float",
            8,
        ):
            expected = (
                f"{scheme.format} {scheme.type}{scheme.num_bits} weights, as the quantization config says"
            )
            return broken(sublayer, expected, sublayer.describe())
        if not scheme.symmetric:
            return unsupported(sublayer, "symmetric FP8 weights", "asymmetric ones")
        found = weight_shapes(sublayer)
        return found if isinstance(found, Refused) else self._accept(sublayer, scheme, *found)

    def _accept(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> Answer:
        schema = weight_schema(scheme)
        source_schema = schema
        scale: Rule | Refused
        if scheme.strategy == "tensor":
            wrong = require_shapes(sublayer, "weight_scale", [(1,)] * len(rows), [()] * len(rows))
            scale = wrong or tensor_scale_rule(sublayer, "weight_scale", "weight_scale", "nonnegative")
        elif scheme.strategy == "block":
            found = block_scale(sublayer, "weight_scale", rows, shape_k, scheme.block, schema)
            scale, schema = (found, schema) if isinstance(found, Refused) else found
        else:
            scale = row_scale(sublayer, scheme, rows, shape_k)
        if isinstance(scale, Refused):
            return scale
        inputs = input_rules(sublayer, scheme, "input_scale")
        if isinstance(inputs, Refused):
            return inputs
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=schema,
            source_schema=source_schema,
            input_schema=scheme.input_schema(),
            rules=(
                Rule(
                    name="weight",
                    parameter="weight",
                    dtype="F8_E4M3",
                    shape=(sum(rows), shape_k),
                    is_weight=True,
                ),
                scale,
                *bias_rule(sublayer, sum(rows)),
            ),
            inputs=inputs,
        )
