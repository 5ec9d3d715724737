"""Quark's 4 bit integers in groups, packed along N as AWQ's are."""

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
    require_shapes,
    unsupported,
)
from humming_convert.formats.integers import (
    CODES_PER_PACK,
    groups_of,
    humming_schema,
    scale_rule,
    zero_point_rule,
)
from humming_convert.formats.quark_scheme import METHOD, QuarkScheme, scheme_of
from humming_convert.plan import Step

_BITS = 4
_PER_WORD = 8
_ORDERS = ("reorder", "order")


class QuarkIntegers:
    """`weight` I32 [K, N/8], `weight_scale` [G, N], `weight_zero_point` I32 [G, N/8], also where it is zero."""

    name = "quark-int4"
    summary = "Quark int4 and uint4 per group, pack_method reorder and order"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Words of weights with a scale as tall as there are groups, under Quark's config."""
        if sublayer.is_fused or not sublayer.has(weight="I32", weight_scale=FLOATS):
            return Rejected("there is no weight I32 with weight_scale in F32, BF16 or F16")
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        scheme = scheme_of(sublayer)
        weight = scheme.weight
        if weight.get("dtype") not in ("int4", "uint4"):
            raise broken(sublayer, scheme.told(), sublayer.describe())
        if weight.get("qscheme") != "per_group" or weight.get("ch_axis") not in (-1, 1):
            raise unsupported(sublayer, "4 bit integers in groups along K", scheme.told())
        if str(weight.get("zero_point_type", "int32")) != "int32":
            raise unsupported(sublayer, "zero_point_type int32", f"{weight['zero_point_type']!r}"[:80])
        return self._accept(sublayer, scheme, self._order(sublayer))

    def _order(self, sublayer: Sublayer) -> str:
        export = sublayer.quantization.get("export")
        order = export.get("pack_method") if isinstance(export, dict) else None
        if order not in _ORDERS:
            hint = "it says how nibbles lie within a word"
            expected = f"export.pack_method {' or '.join(_ORDERS)} in the quantization config"
            raise broken(sublayer, expected, f"{order!r}"[:80], hint)
        return str(order)

    def _accept(self, sublayer: Sublayer, scheme: QuarkScheme, order: str) -> Accepted:
        shapes = [(stack["weight"].shape, stack["weight_scale"].shape) for stack in sublayer.stacks]
        if any(len(weight) != 2 or len(scale) != 2 or weight[1] * _PER_WORD != scale[1] for weight, scale in shapes):
            raise broken(sublayer, "weight [K, N/8] and weight_scale [G, N]", sublayer.describe())
        rows = tuple(scale[1] for _, scale in shapes)
        shape_k, stored = shapes[0][0][0], shapes[0][1][0]
        require_shapes(sublayer, "weight", [(shape_k, n // _PER_WORD) for n in rows])
        require_shapes(sublayer, "weight_scale", [(stored, n) for n in rows])
        check_multiple(sublayer, "N", rows, CODES_PER_PACK)
        check_multiple(sublayer, "K", [shape_k], CODES_PER_PACK)
        weight = scheme.weight
        groups = groups_of(sublayer, weight.get("group_size"), shape_k, stored)
        is_signed = weight.get("dtype") == "int4"
        # Quark writes zero points of 0 beside symmetric signed weights.
        has_zero_point = not is_signed or weight.get("symmetric") is False
        inverted = (Step("inverted_signs", (("bits", _BITS),)),) if is_signed else ()
        in_order = () if order == "order" else (Step("in_order"),)
        rows_step = Step("awq_rows") if order == "reorder" else Step("ordered_rows", (("bits", _BITS),))
        has_zeros = self._check_zero_points(sublayer, rows, stored, has_zero_point)
        zeros: tuple[Rule, ...] = ()
        if has_zero_point:
            steps = (*in_order, *inverted, Step("transposed"))
            zeros = (zero_point_rule("weight_zero_point", _BITS, rows, groups, steps),)
        unused = ("weight_zero_point",) if has_zeros and not has_zero_point else ()
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=humming_schema(sublayer, _BITS, groups, has_zero_point=has_zero_point),
            source_schema=_source_schema(scheme, order),
            input_schema=scheme.input_schema(),
            rules=(
                Rule(
                    name="weight",
                    parameter="weight",
                    dtype="I32",
                    shape=(sum(rows), shape_k // _PER_WORD),
                    steps=(rows_step, *inverted),
                    is_weight=True,
                ),
                scale_rule(sublayer, "weight_scale", rows, groups, (Step("transposed"),)),
                *zeros,
                *bias_rule(sublayer, rows),
            ),
            unused=unused,
            checks=dict.fromkeys(unused, f"alike:{_BITS}:0"),
        )

    def _check_zero_points(self, sublayer: Sublayer, rows: tuple[int, ...], stored: int, is_needed: bool) -> bool:
        """Whether there are any, in the form that they must have."""
        name = "weight_zero_point"
        if name not in sublayer.parameters:
            if is_needed:
                hint = "fetch the missing shards, or quantize again"
                raise broken(sublayer, f"{sublayer.modules[0]}.{name}", sublayer.describe(), hint)
            return False
        if not sublayer.has(**{name: "I32"}):
            raise broken(sublayer, f"{name} I32", ", ".join(sublayer.dtypes(name)))
        require_shapes(sublayer, name, [(stored, n // _PER_WORD) for n in rows])
        return True


def _source_schema(scheme: QuarkScheme, order: str) -> dict[str, Any]:
    keys = ("dtype", "qscheme", "ch_axis", "group_size", "symmetric")
    return {"quant_method": METHOD, "pack_method": order} | {key: scheme.weight.get(key) for key in keys}
