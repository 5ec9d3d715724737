"""AWQ in its GEMM packing, which AutoAWQ, llm-awq converters and auto-round write."""

from __future__ import annotations

from humming_convert.formats.base import (
    FLOATS,
    Accepted,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    check_group,
    check_multiple,
    one_dtype,
    require_shapes,
    rounding_check,
    unsupported,
)
from humming_convert.formats.module_rules import scheme_fields
from humming_convert.plan import Step

_METHODS = ("awq", "auto-round", "")
_PER_WORD = 8
# Humming packs 32 codes of K, and 32 zero points of N, at a time.
_MULTIPLE = 32


class AwqGemm:
    """`qweight` I32 [K, N/8] in AWQ's nibble order, `qzeros` I32 [G, N/8], `scales` [G, N]."""

    name = "awq"
    summary = "AWQ 4 bit, GEMM packing (AutoAWQ, auto-round auto_awq)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """qweight as tall as K and an eighth as wide as the scales; GPTQ's is the other way round."""
        if sublayer.is_fused or not sublayer.has(qweight="I32", scales=FLOATS):
            return Rejected("there is no qweight I32 with scales")
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        shapes = [
            (stack["qweight"].shape, stack["scales"].shape)
            for stack in sublayer.stacks
            if "qweight" in stack and "scales" in stack
        ]
        if len(shapes) != len(sublayer.stacks) or any(len(a) != 2 or len(b) != 2 for a, b in shapes):
            raise broken(sublayer, "qweight [K, N/8] and scales [G, N] in every projection", sublayer.describe())
        if all(weight[1] == scale[1] for weight, scale in shapes):
            return Rejected("qweight is as wide as the scales, which is GPTQ's packing")
        if any(weight[1] * _PER_WORD != scale[1] for weight, scale in shapes):
            raise broken(sublayer, "qweight [K, N/8] and scales [G, N], which is 4 bit AWQ", sublayer.describe())
        return self._accept(sublayer, shapes)

    def _accept(self, sublayer: Sublayer, shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Accepted | Rejected:
        rows = tuple(scale[1] for _, scale in shapes)
        shape_k, groups = shapes[0][0][0], shapes[0][1][0]
        require_shapes(sublayer, "qweight", [(shape_k, n // _PER_WORD) for n in rows])
        require_shapes(sublayer, "scales", [(groups, n) for n in rows])
        require_shapes(sublayer, "qzeros", [(groups, n // _PER_WORD) for n in rows])
        self._check_config(sublayer, shape_k, groups)
        check_multiple(sublayer, "N", rows, _MULTIPLE)
        check_multiple(sublayer, "K", [shape_k], _MULTIPLE)
        has_zeros = "qzeros" in sublayer.parameters
        zero_point = self._has_zero_point(sublayer, has_zeros)
        total = sum(rows)
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema={
                "quant_method": "awq",
                "bits": 4,
                "group_size": shape_k // groups,
                "zero_point": zero_point,
            },
            rules=(
                Rule(
                    name="qweight",
                    parameter="qweight",
                    dtype="I32",
                    shape=(total, shape_k // _PER_WORD),
                    # Projection by projection into rows: stacked first, every code would be moved once more.
                    steps=(Step("awq_rows"),),
                    is_weight=True,
                ),
                Rule(
                    name="scales",
                    parameter="scales",
                    dtype=one_dtype(sublayer, "scales"),
                    shape=(groups, total),
                    axis=1,
                    # auto-round's symmetric scales may be negative.
                    check=rounding_check(sublayer, "scales", "finite"),
                ),
                *self._zeros(has_zeros, zero_point, (groups, total // _PER_WORD)),
                *bias_rule(sublayer, rows),
            ),
        )

    def _has_zero_point(self, sublayer: Sublayer, has_zeros: bool) -> bool:
        """What the config says; where it says nothing, zero points that are there count."""
        config = {**sublayer.quantization, **scheme_fields(sublayer)}
        for key in ("zero_point", "sym"):
            if config.get(key) is not None and type(config[key]) is not bool:
                raise broken(sublayer, f"{key} true or false in the quantization config", f"{config[key]!r}")
        stated, symmetric = config.get("zero_point"), config.get("sym")
        if has_zeros:
            return symmetric is not True if stated is None else bool(stated)
        if stated is False or (stated is None and symmetric is True):
            return False
        name = f"{sublayer.modules[0]}.qzeros"
        if stated is None and symmetric is None:
            expected = f"{name}, which only a config with zero_point false can spare"
        else:
            expected = f"{name}, as {'zero_point true' if stated else 'sym false'} says"
        hint = "fetch the missing shards, or quantize again"
        raise broken(sublayer, expected, sublayer.describe(), hint)

    def _zeros(self, has_zeros: bool, zero_point: bool, shape: tuple[int, int]) -> tuple[Rule, ...]:
        if not has_zeros:
            return ()
        # Without zero_point Humming takes 8 for granted and never looks.
        check = "" if zero_point else "eights"
        return (Rule(name="qzeros", parameter="qzeros", dtype="I32", shape=shape, axis=1, check=check),)

    def _check_config(self, sublayer: Sublayer, shape_k: int, groups: int) -> None:
        config = sublayer.quantization
        fields = {**config, **scheme_fields(sublayer)}
        packing = str(config.get("packing_format", "auto_round:auto_awq"))
        if sublayer.method == "auto-round" and "awq" not in packing:
            raise broken(sublayer, f"tensors packed as packing_format {packing!r} says", "AWQ's packing")
        version = str(config.get("version", "gemm")).lower()
        if sublayer.method == "awq" and version != "gemm":
            hint = "gemv, gemv_fast and marlin pack otherwise: convert the checkpoint to gemm first"
            raise unsupported(sublayer, "AWQ version gemm", repr(version), hint)
        bits = fields.get("bits", config.get("w_bit", 4))
        if type(bits) is not int:
            raise broken(sublayer, "bits, a whole number, in the quantization config", f"{bits!r}")
        if bits != 4:
            raise broken(sublayer, f"{bits!r} bit weights, as the quantization config says", "4 bit weights")
        if groups == 0 or shape_k % groups:
            raise broken(sublayer, f"a number of groups that divides K = {shape_k}", f"{groups}")
        group = shape_k // groups
        told = fields.get("group_size", config.get("q_group_size", group))
        if told not in (group, -1) or (told == -1 and groups != 1):
            raise broken(sublayer, f"groups of {told!r}, as the quantization config says", f"groups of {group}")
        check_group(sublayer, group, shape_k)
