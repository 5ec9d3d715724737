"""Integers under Humming's own schema: what formats share whose tensors become its form by steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from humming_convert.formats.base import Rule, Sublayer, broken, check_group, one_dtype, rounding_check
from humming_convert.plan import Step

# Humming packs 32 codes of K, and 32 zero points of N, at a time.
CODES_PER_PACK = 32


class Groups(NamedTuple):
    """Weights of a row that share a scale: `stored` in the file, `size` in the kernel (0: a whole row). Columns of
    scales are repeated `repeat` times and cut to `columns` to get there."""

    size: int
    stored: int
    repeat: int = 1
    columns: int = 1

    @property
    def steps(self) -> tuple[Step, ...]:
        """What a tensor with one column for each stored group passes."""
        if self.repeat == 1:
            return ()
        return (Step("regroup_columns", (("repeat", self.repeat), ("columns", self.columns))),)


def groups_of(sublayer: Sublayer, told: object, shape_k: int, stored: int) -> Groups:
    """The groups of rows of `shape_k` weights with `stored` scales each; `told` is the config's group size (None: it
    says nothing, -1: one scale a row).

    The last group may be shorter than the others: then all become as long as their greatest common divisor. Raises
    RefusalError for scales that are not as many as the config says, and for groups that the kernels do not have.
    """
    if told is None and stored and shape_k % stored == 0:
        told = shape_k // stored if stored > 1 else -1
    if type(told) is not int or (told < 1 and told != -1):
        raise broken(sublayer, "group_size, a whole number or -1, in the quantization config", f"{told!r}"[:80])
    if told == -1 or told > shape_k:
        if stored != 1:
            raise broken(sublayer, f"one scale a row, as group_size {told} says", f"{stored}")
        return Groups(0, shape_k)
    if stored != math.ceil(shape_k / told):
        expected = f"{math.ceil(shape_k / told)} scales a row of {shape_k}, as group_size {told} says"
        raise broken(sublayer, expected, f"{stored}")
    size = math.gcd(told, shape_k)
    check_group(sublayer, size, shape_k)
    return Groups(size, told, told // size, shape_k // size)


def humming_schema(sublayer: Sublayer, bits: int, groups: Groups, *, has_zero_point: bool) -> dict[str, Any]:
    """Humming's own weight schema for offset-binary codes of `bits`."""
    return {
        "quant_method": "humming",
        "b_dtype": f"uint{bits}",
        "bs_dtype": sublayer.param_dtype,
        "weight_scale_group_size": groups.size,
        "weight_scale_type": "group" if groups.size else "channel",
        "has_zero_point": has_zero_point,
    }


def scale_rule(
    sublayer: Sublayer, parameter: str, rows: Sequence[int], groups: Groups, steps: tuple[Step, ...] = ()
) -> Rule:
    """The rule for scales that `steps` make `[N, stored groups]`. A symmetric scale may be negative."""
    return Rule(
        name="weight_scale",
        parameter=parameter,
        dtype=one_dtype(sublayer, parameter),
        shape=(sum(rows), groups.columns),
        steps=(*steps, *groups.steps),
        check=rounding_check(sublayer, parameter, "finite"),
    )


def zero_point_rule(
    parameter: str, bits: int, rows: Sequence[int], groups: Groups, steps: tuple[Step, ...], check: str = ""
) -> Rule:
    """The rule for zero points that `steps` make words `[N * bits / 32, stored groups]`, in the codes' own offset."""
    return Rule(
        name="zero_point",
        parameter=parameter,
        dtype="I32",
        shape=(sum(rows) * bits // 32, groups.columns),
        steps=(*steps, *groups.steps),
        check=check,
    )
