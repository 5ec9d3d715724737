"""compressed-tensors with integers: packed into words, and as plain bytes."""

from __future__ import annotations

from humming_convert.formats.base import (
    FLOATS,
    Accepted,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    check_multiple,
    require_shapes,
    tensor_scale_rule,
    unequal_check,
    unsupported,
    weight_shapes,
)
from humming_convert.formats.ct_config import METHOD, Scheme, input_rules, row_scale, scheme_of, weight_schema
from humming_convert.formats.integers import CODES_PER_PACK, Groups, humming_schema, zero_point_rule
from humming_convert.plan import Step

# Humming packs the codes of a row 32 at a time.
_COLUMNS = 32


class CtPackedIntegers:
    """`weight_packed` I32 [N, K*b/32], `weight_scale`, `weight_shape`, `weight_zero_point` [N*b/32, G]."""

    name = "ct-pack-quantized"
    summary = "compressed-tensors pack-quantized: integers of 2 to 8 bit, group or channel, symmetric or not"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Words of packed integers; their width comes from the config and is checked against shapes."""
        if sublayer.is_fused or not sublayer.has(weight_packed="I32", weight_scale=FLOATS):
            return Rejected("there is no weight_packed I32 with weight_scale in F32, BF16 or F16")
        if sublayer.method != METHOD:
            hint = "the width of the integers cannot be told from the file: give a config with --quant-config"
            found = f"quant_method {sublayer.method!r}" if sublayer.method else "no quantization config"
            raise broken(sublayer, f"a quantization config of {METHOD}", found, hint)
        scheme = scheme_of(sublayer)
        if scheme.format != "pack-quantized" or scheme.type != "int" or not 2 <= scheme.num_bits <= 8:
            raise broken(sublayer, scheme.told(), sublayer.describe())
        if "weight_g_idx" in sublayer.parameters:
            raise unsupported(sublayer, "weights in the order of their columns", "weight_g_idx")
        rows, words = weight_shapes(sublayer, "weight_packed")
        shape_k = self._columns(sublayer, scheme, words)
        require_shapes(sublayer, "weight_shape", [(2,)] * len(rows))
        has_shape = "weight_shape" in sublayer.parameters
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=weight_schema(scheme),
            input_schema=scheme.input_schema(),
            rules=(
                Rule(
                    name="weight_packed",
                    parameter="weight_packed",
                    dtype="I32",
                    shape=(sum(rows), words),
                    is_weight=True,
                ),
                row_scale(sublayer, scheme, rows, shape_k),
                *self._zero_points(sublayer, scheme, rows, shape_k),
                *bias_rule(sublayer, rows),
            ),
            inputs=input_rules(sublayer, scheme, "input_scale"),
            unused=("weight_shape",) if has_shape else (),
            expected={"weight_shape": tuple((n, shape_k) for n in rows)} if has_shape else {},
        )

    def _columns(self, sublayer: Sublayer, scheme: Scheme, words: int) -> int:
        """K, from the width in words. Until mid-2026 3, 5, 6 and 7 bit did not cross words."""
        bits = scheme.num_bits
        shape = sublayer.stacks[0]["weight_scale"].shape if "weight_scale" in sublayer.stacks[0] else ()
        if scheme.group_size > 0 and len(shape) == 2:
            shape_k = shape[1] * scheme.group_size
            dense, padded = -(-shape_k * bits // 32), -(-shape_k // (32 // bits))
            if words == padded != dense:
                hint = f"old compressed-tensors packed {32 // bits} values a word: quantize again"
                raise unsupported(sublayer, f"weight_packed of {dense} words a row", f"{words}", hint)
            if words != dense:
                expected = f"weight_packed of {dense} words a row for {shape[1]} groups of {scheme.group_size}"
                raise broken(sublayer, f"{expected} at {bits} bit", f"{words}")
        if words * 32 % bits:
            raise unsupported(sublayer, f"a row that fills its words at {bits} bit", f"{words} words a row")
        check_multiple(sublayer, "K", [words * 32 // bits], _COLUMNS)
        return words * 32 // bits

    def _zero_points(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> tuple[Rule, ...]:
        """Packed along N and offset-binary, as Humming wants them; unpacked ones are refused."""
        name = "weight_zero_point"
        if scheme.symmetric:
            forbid_zero_points(sublayer)
            return ()
        groups, bits = scheme.groups(shape_k), scheme.num_bits
        if any(n * bits % 32 for n in rows):
            raise unsupported(sublayer, f"rows that fill whole words at {bits} bit", f"{list(rows)} rows")
        packed = [n * bits // 32 for n in rows]
        facts = [stack[name] for stack in sublayer.stacks if name in stack]
        if any(fact.dtype != "I32" for fact in facts) or [fact.shape for fact in facts] != [
            (words, groups) for words in packed
        ]:
            hint = "unpacked zero points do not say how they are meant: quantize again"
            found = ", ".join(f"{fact.dtype} {list(fact.shape)}" for fact in facts)
            expected = f"{name} I32 {[packed[0], groups]}, packed along N"
            raise broken(sublayer, expected, found or "none", hint if facts else "")
        return (Rule(name=name, parameter=name, dtype="I32", shape=(sum(packed), groups)),)


class CtPlainIntegers:
    """`weight` I8 [N, K], `weight_scale` [N, 1], [N, G] or one, `weight_zero_point` I8 like it.

    Integers of fewer than 8 bits have a byte each as well.
    """

    name = "ct-int8"
    summary = "compressed-tensors int-quantized and naive-quantized: integers of 2 to 8 bit, a byte each (W8A8, W4A8)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Signed bytes with a scale."""
        if sublayer.is_fused or not sublayer.has(weight="I8", weight_scale=FLOATS):
            return Rejected("there is no weight I8 with weight_scale in F32, BF16 or F16")
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        scheme = scheme_of(sublayer)
        if scheme.format not in ("int-quantized", "naive-quantized") or scheme.type != "int":
            raise broken(sublayer, scheme.told(), sublayer.describe())
        if not 2 <= scheme.num_bits <= 8:
            raise unsupported(sublayer, "int-quantized weights of 2 to 8 bit", f"{scheme.num_bits} bit")
        rows, shape_k = weight_shapes(sublayer)
        check_multiple(sublayer, "K", [shape_k], _COLUMNS)
        if scheme.num_bits != 8:
            return self._narrow(sublayer, scheme, rows, shape_k)
        if scheme.strategy == "tensor":
            check = unequal_check(sublayer, "nonnegative")
            scale = tensor_scale_rule(sublayer, "weight_scale", "weight_scale", check)
        else:
            scale = row_scale(sublayer, scheme, rows, shape_k)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            # Humming adds the offset to signed bytes only under the name int-quantized.
            weight_schema=weight_schema(scheme) | {"format": "int-quantized"},
            input_schema=scheme.input_schema(),
            rules=(
                Rule(name="weight", parameter="weight", dtype="I8", shape=(sum(rows), shape_k), is_weight=True),
                scale,
                *self._zero_points(sublayer, scheme, rows, shape_k),
                *bias_rule(sublayer, rows),
            ),
            inputs=input_rules(sublayer, scheme, "input_scale"),
        )

    def _narrow(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> Accepted:
        """Humming's schema of this format has 8 bits only, so codes are packed into its own form."""
        bits = scheme.num_bits
        scale = row_scale(sublayer, scheme, rows, shape_k)
        groups = Groups(scheme.group_size, scheme.group_size or shape_k, 1, scheme.groups(shape_k))
        packed = Step("signed_rows", (("bits", bits),))
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=humming_schema(sublayer, bits, groups, has_zero_point=not scheme.symmetric),
            # Humming, and with it vLLM, knows the scheme under the name of its packed form alone.
            source_schema=weight_schema(scheme) | {"format": "pack-quantized", "stored_as": scheme.format},
            input_schema=scheme.input_schema(),
            rules=(
                Rule(
                    name="weight",
                    parameter="weight",
                    dtype="I32",
                    shape=(sum(rows), shape_k * bits // 32),
                    steps=(packed,),
                    is_weight=True,
                    check=f"signed:{bits}",
                ),
                scale,
                *self._narrow_zero_points(sublayer, scheme, rows, groups),
                *bias_rule(sublayer, rows),
            ),
            inputs=input_rules(sublayer, scheme, "input_scale"),
        )

    def _narrow_zero_points(
        self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], groups: Groups
    ) -> tuple[Rule, ...]:
        name, bits = "weight_zero_point", scheme.num_bits
        if scheme.symmetric:
            forbid_zero_points(sublayer)
            return ()
        self._check_zero_points(sublayer, rows, groups.columns, CODES_PER_PACK)
        step = Step("pack_signed_zero_point", (("bits", bits),))
        return (zero_point_rule(name, bits, rows, groups, (step,), f"signed:{bits}"),)

    def _check_zero_points(self, sublayer: Sublayer, rows: tuple[int, ...], groups: int, multiple: int) -> None:
        name = "weight_zero_point"
        require_shapes(sublayer, name, [(n, groups) for n in rows])
        if not sublayer.has(**{name: "I8"}):
            raise broken(sublayer, f"{name} I8", ", ".join(sublayer.dtypes(name)) or "none")
        check_multiple(sublayer, "N", rows, multiple)

    def _zero_points(self, sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> tuple[Rule, ...]:
        """Humming wants them offset-binary and packed, while the file has one signed byte each."""
        name = "weight_zero_point"
        if scheme.symmetric:
            forbid_zero_points(sublayer)
            return ()
        if scheme.strategy == "tensor":
            raise unsupported(sublayer, "asymmetric weights per channel or group", "per tensor")
        groups = scheme.groups(shape_k)
        self._check_zero_points(sublayer, rows, groups, 4)
        steps = (Step("pack_int8_zero_point"),)
        return (Rule(name=name, parameter=name, dtype="I32", shape=(sum(rows) // 4, groups), steps=steps),)


def forbid_zero_points(sublayer: Sublayer) -> None:
    """Zero points of a symmetric scheme would be ignored, so they must not be there."""
    if "weight_zero_point" in sublayer.parameters:
        raise broken(sublayer, "no weight_zero_point, as symmetric says", sublayer.describe())
