"""GPTQ's packing, which AutoGPTQ, GPTQModel and auto-round write."""

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
    unsupported,
)
from humming_convert.formats.gptq_config import V1, V2, GptqScheme, gptq_scheme
from humming_convert.formats.integers import (
    CODES_PER_PACK,
    Groups,
    groups_of,
    humming_schema,
    scale_rule,
    zero_point_rule,
)
from humming_convert.plan import Step

_METHODS = ("gptq", "auto-round", "")


class Gptq:
    """`qweight` I32 [K*b/32, N] packed along K, `scales` [G, N], `qzeros` I32 [G, N*b/32], `g_idx` I32 [K]."""

    name = "gptq"
    summary = "GPTQ 2, 3, 4 and 8 bit, v1 and v2, symmetric or not (AutoGPTQ, GPTQModel; auto-round also 5, 6, 7 bit)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """qweight as wide as the scales; AWQ's is an eighth of that."""
        if sublayer.is_fused or not sublayer.has(qweight="I32", scales=FLOATS):
            return Rejected("there is no qweight I32 with scales")
        if sublayer.method not in _METHODS:
            return Rejected(f"quant_method is {sublayer.method}")
        stacks = sublayer.stacks
        if any(not {"qweight", "scales"} <= stack.keys() for stack in stacks) or any(
            len(stack[name].shape) != 2 or 0 in stack[name].shape for stack in stacks for name in ("qweight", "scales")
        ):
            raise broken(sublayer, "qweight [K*b/32, N] and scales [G, N] in every projection", sublayer.describe())
        if any(stack["qweight"].shape[1] != stack["scales"].shape[1] for stack in stacks):
            raise broken(sublayer, "qweight [K*b/32, N] as wide as scales [G, N]", sublayer.describe())
        return self._accept(sublayer, gptq_scheme(sublayer, _bits_of_zero_points(sublayer)))

    def _accept(self, sublayer: Sublayer, scheme: GptqScheme) -> Accepted:
        bits = scheme.bits
        rows = tuple(stack["scales"].shape[1] for stack in sublayer.stacks)
        words, stored = sublayer.stacks[0]["qweight"].shape[0], sublayer.stacks[0]["scales"].shape[0]
        if words * 32 % bits:
            raise broken(sublayer, f"columns of qweight that are filled at {bits} bit", f"{words} words")
        shape_k = words * 32 // bits
        check_multiple(sublayer, "K", [shape_k], CODES_PER_PACK)
        require_shapes(sublayer, "qweight", [(words, n) for n in rows])
        require_shapes(sublayer, "scales", [(stored, n) for n in rows])
        groups = groups_of(sublayer, scheme.group_size, shape_k, stored)
        zeros, zero_checks = self._zero_points(sublayer, scheme, rows, stored, groups)
        unused, checks = list(zero_checks), dict(zero_checks)
        if "g_idx" in sublayer.parameters:
            self._check_g_idx(sublayer, shape_k)
            unused.append("g_idx")
            checks["g_idx"] = f"columns:{groups.stored}"
        return Accepted(
            format=self.name,
            stacks_n=rows,
            shape_k=shape_k,
            weight_schema=humming_schema(sublayer, bits, groups, has_zero_point=not scheme.sym),
            source_schema={
                "quant_method": "gptq",
                "bits": bits,
                "group_size": groups.stored if groups.size else 0,
                "desc_act": False,
                "sym": scheme.sym,
                "checkpoint_format": scheme.offset or V1,
            },
            rules=(
                Rule(
                    name="weight",
                    parameter="qweight",
                    dtype="I32",
                    shape=(sum(rows), words),
                    steps=(Step("word_rows"),),
                    is_weight=True,
                ),
                scale_rule(sublayer, "scales", rows, groups, (Step("transposed"),)),
                *zeros,
                *bias_rule(sublayer, rows),
            ),
            unused=tuple(unused),
            checks=checks,
            notes=scheme.notes,
        )

    def _zero_points(
        self, sublayer: Sublayer, scheme: GptqScheme, rows: tuple[int, ...], stored: int, groups: Groups
    ) -> tuple[tuple[Rule, ...], dict[str, str]]:
        """The rule for zero points; or, for weights that have none, the rule that the stored ones must obey."""
        bits, middle = scheme.bits, 1 << (scheme.bits - 1)
        if "qzeros" in sublayer.parameters:
            check_multiple(sublayer, "N", rows, CODES_PER_PACK)
            if not sublayer.has(qzeros="I32"):
                raise broken(sublayer, "qzeros I32", ", ".join(sublayer.dtypes("qzeros")))
            require_shapes(sublayer, "qzeros", [(stored, n * bits // 32) for n in rows])
            if scheme.sym:
                # Labels of the two formats are mixed up in the wild, which does no harm here.
                return (), {"qzeros": f"alike:{bits}:{middle - 1}:{middle}"}
        elif scheme.sym:
            return (), {}
        else:
            name = f"{sublayer.modules[0]}.qzeros"
            hint = "fetch the missing shards, or quantize again"
            raise broken(sublayer, f"{name}, as sym false says", sublayer.describe(), hint)
        if scheme.offset not in (V1, V2):
            hint = "give a config with --quant-config: checkpoint_format gptq or gptq_v2, or a known packing_format"
            found = repr(sublayer.quantization.get("packing_format"))
            raise unsupported(sublayer, "a format that says whether zero points are stored one less", found, hint)
        steps = [Step("one_more", (("bits", bits),))] if scheme.offset == V1 else []
        check = f"below_top:{bits}" if steps and not scheme.is_borrowing else ""
        return (zero_point_rule("qzeros", bits, rows, groups, (*steps, Step("transposed")), check),), {}

    def _check_g_idx(self, sublayer: Sublayer, shape_k: int) -> None:
        if not sublayer.has(g_idx=("I32", "I64")):
            raise broken(sublayer, "g_idx I32", ", ".join(sublayer.dtypes("g_idx")))
        require_shapes(sublayer, "g_idx", [(shape_k,)] * len(sublayer.stacks))


def _bits_of_zero_points(sublayer: Sublayer) -> int | None:
    """The width that qzeros [G, N*b/32] beside scales [G, N] tell; None where they tell none."""
    facts = sublayer.stacks[0].get("qzeros")
    rows = sublayer.stacks[0]["scales"].shape[1]
    if facts is None or len(facts.shape) != 2 or facts.shape[1] * 32 % rows:
        return None
    return facts.shape[1] * 32 // rows
