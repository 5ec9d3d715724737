"""Checkpoints in Humming's own standard form, which its quantizers write (`quant_method: humming`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    exponent_check,
    one_dtype,
    rounding_check,
    unsupported,
)
from humming_convert.formats.integers import CODES_PER_PACK

METHOD = "humming"
# A field's own name and those that Humming takes for it.
_NAMES: dict[str, tuple[str, ...]] = {
    "b_dtype": ("b_dtype", "weight_dtype", "dtype"),
    "bs_dtype": ("bs_dtype", "weight_scale_dtype", "scale_dtype"),
    "weight_scale_group_size": ("weight_scale_group_size", "group_size"),
    "weight_scale_group_size_n": ("weight_scale_group_size_n", "group_size_n"),
    "weight_scale_type": ("weight_scale_type", "scale_type"),
    "weight_scale_2_type": ("weight_scale_2_type", "scale_2_type"),
    "has_zero_point": ("has_zero_point",),
    "is_fp_zero_point": ("is_fp_zero_point",),
    "hadamard_block_size": ("hadamard_block_size",),
}
_INTEGER = re.compile(r"u?int([2-8])")
_FLOAT = re.compile(r"float([3-8])e([0-5])m([1-7])")
_SCALES: dict[str, tuple[str, ...]] = {
    "bfloat16": FLOATS,
    "float16": FLOATS,
    "float32": FLOATS,
    "float8e4m3": ("F8_E4M3",),
    "float8e8m0": ("F8_E8M0", "U8"),
}


class _Scheme(NamedTuple):
    """Humming's schema as the config has it, completed; `group` 0: a whole row."""

    bits: int
    scale_dtype: str
    group: int
    scale_type: str
    scale_2_type: str
    has_zero_point: bool
    b_dtype: str

    def as_schema(self) -> dict[str, Any]:
        return {
            "quant_method": METHOD,
            "b_dtype": self.b_dtype,
            "bs_dtype": self.scale_dtype,
            "weight_scale_group_size": self.group,
            "weight_scale_type": self.scale_type,
            "weight_scale_2_type": self.scale_2_type,
            "has_zero_point": self.has_zero_point,
        }


class HummingStandard:
    """`weight` I32 [N, K*b/32], `weight_scale` [N, G], `zero_point` I32 [N*b/32, G], `weight_scale_2`, `bias`.

    Per expert and projection, or [E, ...] with gate over up.
    """

    name = "humming"
    summary = "Humming's own standard form (quant_method humming): integers and floats of 2 to 8 bit, group or channel"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """By its config first: words of weights say nothing of what they hold."""
        if sublayer.method != METHOD:
            return Rejected(f"quant_method is {sublayer.method or 'not given'}")
        if not sublayer.has(weight="I32") or "weight_scale" not in sublayer.parameters:
            raise broken(sublayer, "weight I32 with weight_scale, as quant_method humming says", sublayer.describe())
        scheme = _scheme_of(sublayer)
        rows, words = self._rows(sublayer)
        if words * 32 % scheme.bits:
            raise broken(sublayer, f"rows of weight that are filled at {scheme.bits} bit", f"{words} words")
        shape_k = words * 32 // scheme.bits
        check_multiple(sublayer, "K", [shape_k], CODES_PER_PACK)
        if scheme.scale_type == "group":
            check_group(sublayer, scheme.group, shape_k)
        is_stacked = sublayer.is_fused and sublayer.name == "w13"
        if is_stacked and rows[0] % 2:
            raise broken(sublayer, "as many gate as up rows", f"{rows[0]} rows")
        groups = shape_k // scheme.group if scheme.group else 1
        return Accepted(
            format=self.name,
            stacks_n=(rows[0] // 2, rows[0] // 2) if is_stacked else rows,
            shape_k=shape_k,
            weight_schema=scheme.as_schema(),
            rules=(
                Rule(name="weight", parameter="weight", dtype="I32", shape=(sum(rows), words), is_weight=True),
                _scale(sublayer, scheme, rows, groups),
                *_scale_2(sublayer, scheme),
                *_zero_point(sublayer, scheme, rows, groups),
                *bias_rule(sublayer, rows),
            ),
        )

    def _rows(self, sublayer: Sublayer) -> tuple[tuple[int, ...], int]:
        """Rows of each projection (gate and up together where one tensor has both) and words per row."""
        found = []
        for stack in sublayer.stacks:
            shape = stack["weight"].shape if "weight" in stack else ()
            if sublayer.is_fused and len(shape) == 3 and shape[0] == sublayer.num_experts:
                shape = shape[1:]
            if len(shape) != 2 or 0 in shape:
                raise broken(sublayer, "weight [N, K*b/32] in every projection", sublayer.describe())
            found.append(shape)
        if len({shape[1] for shape in found}) != 1:
            raise broken(sublayer, "weight with one K", f"{[list(shape) for shape in found]}")
        return tuple(shape[0] for shape in found), found[0][1]


def _require(sublayer: Sublayer, parameter: str, shapes: Sequence[tuple[int, ...]], codes: tuple[str, ...]) -> None:
    if not sublayer.has(**{parameter: codes}):
        found = ", ".join(sublayer.dtypes(parameter)) or "none"
        raise broken(sublayer, f"{parameter} in {', '.join(codes)}", found)
    leading = (sublayer.num_experts,) if sublayer.is_fused else ()
    for stack, shape in zip(sublayer.stacks, shapes, strict=True):
        facts = stack.get(parameter)
        if facts is not None and facts.shape != (*leading, *shape):
            raise broken(sublayer, f"{parameter} of shape {[*leading, *shape]}", f"{list(facts.shape)}")


def _scale(sublayer: Sublayer, scheme: _Scheme, rows: tuple[int, ...], groups: int) -> Rule:
    name, codes = "weight_scale", _SCALES[scheme.scale_dtype]
    _require(sublayer, name, [(n, groups) for n in rows], codes)
    if scheme.scale_dtype == "float8e8m0":
        check = exponent_check(sublayer)
    elif codes is FLOATS:
        check = rounding_check(sublayer, name, "finite")
    else:
        check = "finite"
    shape = (sum(rows), groups)
    return Rule(name=name, parameter=name, dtype=one_dtype(sublayer, name), shape=shape, check=check)


def _scale_2(sublayer: Sublayer, scheme: _Scheme) -> tuple[Rule, ...]:
    name = "weight_scale_2"
    if scheme.scale_2_type == "none":
        if name in sublayer.parameters:
            raise broken(sublayer, f"no {name}, as the quantization config says", sublayer.describe())
        return ()
    _require(sublayer, name, [()], ("F32",))
    return (Rule(name=name, parameter=name, dtype="F32", shape=(), check="finite"),)


def _zero_point(sublayer: Sublayer, scheme: _Scheme, rows: tuple[int, ...], groups: int) -> tuple[Rule, ...]:
    name = "zero_point"
    if not scheme.has_zero_point:
        if name in sublayer.parameters:
            raise broken(sublayer, "no zero_point, as has_zero_point says", sublayer.describe())
        return ()
    check_multiple(sublayer, "N", rows, CODES_PER_PACK)
    _require(sublayer, name, [(n * scheme.bits // 32, groups) for n in rows], ("I32",))
    return (Rule(name=name, parameter=name, dtype="I32", shape=(sum(rows) * scheme.bits // 32, groups)),)


def _scheme_of(sublayer: Sublayer) -> _Scheme:
    """The config's fields under any of their names, with what `dynamic` says of this layer."""
    config = _resolved(sublayer)
    given = {
        field: next((config[name] for name in names if config.get(name) is not None), None)
        for field, names in _NAMES.items()
    }
    b_dtype = str(given["b_dtype"])
    integer = _INTEGER.fullmatch(b_dtype)
    found = integer or _FLOAT.fullmatch(b_dtype)
    if found is None:
        raise unsupported(sublayer, "b_dtype uint2 to uint8, or a float of 3 to 8 bit", repr(given["b_dtype"]))
    group, group_n = (_whole(sublayer, given, f"weight_scale_group_size{axis}") for axis in ("", "_n"))
    scale_dtype = str(given["bs_dtype"] or sublayer.param_dtype)
    if scale_dtype not in _SCALES:
        raise unsupported(sublayer, f"bs_dtype {', '.join(_SCALES)}", repr(scale_dtype))
    scale_type = str(given["weight_scale_type"] or ("group" if group else "channel"))
    if scale_type not in ("group", "channel") or group_n > 1 or (scale_type == "group") != (group > 0):
        raise unsupported(sublayer, "one scale per group or per channel", f"{scale_type}, {group_n or 1} x {group}")
    scale_2_type = str(given["weight_scale_2_type"] or "none")
    if scale_2_type not in ("none", "tensor"):
        raise unsupported(sublayer, "weight_scale_2_type none or tensor", repr(scale_2_type))
    if scale_2_type == "tensor" and len(sublayer.stacks) > 1:
        raise unsupported(sublayer, "one second scale for gate and up together", "one for each")
    has_zero_point = given["has_zero_point"] is True
    if given["is_fp_zero_point"]:
        raise unsupported(sublayer, "zero points that are integers", "is_fp_zero_point")
    if has_zero_point and integer is None:
        raise unsupported(sublayer, "zero points beside integers", f"has_zero_point with {b_dtype}")
    if _whole(sublayer, given, "hadamard_block_size") not in (0, 1):
        hint = "activations would have to be transformed as well: quantize again without it"
        raise unsupported(sublayer, "weights that are not transformed", "hadamard_block_size", hint)
    bits = int(found[1])
    # Humming takes int4 for uint4: codes are offset-binary, whatever the name says of signs.
    name = f"uint{bits}" if integer else b_dtype
    return _Scheme(bits, scale_dtype, group, scale_type, scale_2_type, has_zero_point, name)


def _whole(sublayer: Sublayer, given: Mapping[str, Any], field: str) -> int:
    value = given[field] or 0
    if type(value) is not int or value < 0:
        raise broken(sublayer, f"{field}, a whole number, in the quantization config", f"{value!r}"[:80])
    return value


def _resolved(sublayer: Sublayer) -> Mapping[str, Any]:
    """As vLLM does: the first `+:` pattern of `dynamic` that fits the layer's experts changes the config."""
    config, dynamic = sublayer.quantization, sublayer.quantization.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise broken(sublayer, "dynamic that maps patterns to settings", f"{str(dynamic)[:80]!a}")
    experts = sublayer.where.partition(" ")[0]
    for pattern, overrides in dynamic.items():
        if pattern.startswith("+") and isinstance(overrides, dict) and _fits(pattern[2:], experts):
            return {**config, **overrides}
    return config


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False
