"""Value rules that a plan attaches to tensors; they run when the tensor is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from humming_convert.errors import Problem
from humming_convert.packed_checks import SEPARATOR, check_integers
from humming_convert.plan import SublayerPlan
from humming_convert.scales import e8m0_to_float32, extremes
from humming_convert.source import Checkpoint, Payload

_E8M0_NAN = 255
# What Humming's float16 kernels can tell apart of an exponent byte: 2**-14 to 2**15, all below it is zero.
_E5M0 = (113, 142)
_EIGHTS = 0x88  # two packed 4-bit codes of 8
_LEAST_NORMAL_FLOAT16 = 2.0**-14
_UNEQUAL = "unequal_"
_INTERLEAVED = "interleaved"
_ONE_SCALE = "the scale of gate, whose rows alternate with those of up in this family's kernels"
_HINT = "the checkpoint is damaged, or calibration never reached this expert: quantize it again"
_WIDER = "use --dtype bfloat16"


def check_scale(name: str, tensor: torch.Tensor, kind: str) -> Problem | None:
    """What is wrong with the values of source tensor `name`, or None.

    `kind` is a comma-separated list of: `positive` (finite and > 0; zero would also be a division by zero in
    NVFP4's reciprocal), `nonnegative` (finite and >= 0), `finite`, `reciprocal` (1/x is finite as well), `e8m0`
    (no byte 255, which is NaN), `e5m0` (only exponent bytes that Humming's float16 kernels can hold), `float16`
    (no value is lost when rounded to float16), `finite_float16` and `finite_bfloat16` (no value becomes infinite
    when rounded), `eights` (every packed 4 bit zero point is 8, the midpoint). Exponent bytes stand for the
    numbers that they mean. Rules with colons are those of `check_integers`; those of `check_unequal` are left to it.
    """
    ends = extremes(tensor)
    for rule in kind.split(","):
        if rule.startswith(_UNEQUAL) or (ends is not None and _holds_between(name, ends, rule)):
            continue
        problem = check_integers(name, tensor, rule) if SEPARATOR in rule else _RULES[rule](name, tensor)
        if problem is not None:
            return problem
    return None


def _holds_between(name: str, ends: torch.Tensor, rule: str) -> bool:
    """Whether the rule holds for every number from the first of `ends` to the second because it does for both.

    One pass over the stored bytes thus answers for nearly every tensor; a False is to be looked at more closely.
    """
    # Below 2**-14 some numbers are halfway between those of float16 and others are not.
    if rule == "eights" or (rule == "float16" and not float(_float(ends)[0]) >= _LEAST_NORMAL_FLOAT16):
        return False
    return _RULES[rule](name, ends) is None


def check_unequal(sources: Sequence[str], values: torch.Tensor, kind: str) -> list[Problem]:
    """The rules `unequal_RULE` and `unequal_reciprocal_RULE` of `kind`, on one number per expert and projection.

    `values` is `(E, projections)`, `sources` names each number's tensor in that order. Humming keeps such
    scales as F32 as long as the projections of every expert agree; only otherwise are they rounded, and only
    then does RULE apply (to the numbers, or to their reciprocals). `unequal_interleaved` allows no difference.
    """
    rules = [rule.removeprefix(_UNEQUAL) for rule in kind.split(",") if rule.startswith(_UNEQUAL)]
    if not rules or values.ndim < 2 or bool((values == values[:, :1]).all()):
        return []
    problems: list[Problem | None] = []
    for rule in rules:
        plain = rule.removeprefix("reciprocal_")
        if rule == _INTERLEAVED:
            differ = zip(sources, (values != values[:, :1]).reshape(-1).tolist(), strict=True)
            problems += [Problem(f"tensor {source}", _ONE_SCALE, "another") for source, is_other in differ if is_other]
            continue
        numbers = _float(values) if plain == rule else _float(values).reciprocal()
        found = zip(sources, numbers.reshape(-1), strict=True)
        problems += [_RULES[plain](source, number) for source, number in found]
    return [problem for problem in problems if problem is not None]


def check_expected(checkpoint: Checkpoint, payload: Payload, plan: SublayerPlan) -> list[Problem]:
    """Compare the numbers in the sublayer's bookkeeping tensors with what the plan took from headers."""
    problems = []
    for name, values in plan.expected:
        header = checkpoint.tensors[name]
        raw = bytearray(header.nbytes)
        payload.read_into(name, memoryview(raw))
        width = header.nbytes // len(values)
        found = tuple(
            int.from_bytes(raw[at : at + width], "little", signed=True) for at in range(0, header.nbytes, width)
        )
        if found != values:
            problems.append(Problem(f"tensor {name}", f"{list(values)}", f"{list(found)}", "the tensors disagree"))
    return problems


def _float(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return e8m0_to_float32(tensor)
    return tensor.to(torch.float32)


def _describe(values: torch.Tensor, bad: torch.Tensor) -> str:
    first = values.reshape(-1)[bad.reshape(-1)][0].item()
    return f"{int(bad.sum())} of {bad.numel()} values such as {first}"


def _check_finite(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~torch.isfinite(values)
    return Problem(f"tensor {name}", "finite scales", _describe(values, bad), _HINT) if bool(bad.any()) else None


def _check_positive(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~(torch.isfinite(values) & (values > 0))
    return Problem(f"tensor {name}", "positive scales", _describe(values, bad), _HINT) if bool(bad.any()) else None


def _check_nonnegative(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~(torch.isfinite(values) & (values >= 0))
    return Problem(f"tensor {name}", "scales >= 0", _describe(values, bad), _HINT) if bool(bad.any()) else None


def _check_e8m0(name: str, tensor: torch.Tensor) -> Problem | None:
    codes = tensor.view(torch.uint8)
    count = int((codes == _E8M0_NAN).sum())
    found = f"{count} of {tensor.numel()} bytes that mean NaN (255)"
    return Problem(f"tensor {name}", "e8m0 scales", found, _HINT) if count else None


def _check_e5m0(name: str, tensor: torch.Tensor) -> Problem | None:
    codes = tensor.view(torch.uint8)
    bad = (codes < _E5M0[0]) | (codes > _E5M0[1])
    if not bool(bad.any()):
        return None
    expected = f"exponent bytes from {_E5M0[0]} to {_E5M0[1]}, which is what float16 kernels hold"
    return Problem(f"tensor {name}", expected, _describe(codes, bad), _WIDER)


def _check_reciprocal(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~torch.isfinite(values.reciprocal())
    expected = "scales whose reciprocals are finite"
    return Problem(f"tensor {name}", expected, _describe(values, bad), _HINT) if bool(bad.any()) else None


def _check_float16(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    rounded = values.to(torch.float16).to(torch.float32)
    # Half an ulp of a normal float16 is 2**-11 of its value; below 2**-14 float16 has fewer bits, and none at
    # last.
    bad = ~((rounded - values).abs() <= values.abs() * 2.0**-8)
    if not bool(bad.any()):
        return None
    return Problem(f"tensor {name}", "scales that float16 can hold", _describe(values, bad), _WIDER)


def _check_finite_float16(name: str, tensor: torch.Tensor) -> Problem | None:
    return _check_overflow(name, tensor, torch.float16, "float16", _WIDER)


def _check_finite_bfloat16(name: str, tensor: torch.Tensor) -> Problem | None:
    return _check_overflow(name, tensor, torch.bfloat16, "bfloat16", _HINT)


def _check_overflow(name: str, tensor: torch.Tensor, dtype: torch.dtype, code: str, hint: str) -> Problem | None:
    values = _float(tensor)
    bad = ~torch.isfinite(values.to(dtype))
    if not bool(bad.any()):
        return None
    return Problem(f"tensor {name}", f"values that {code} can hold", _describe(values, bad), hint)


def _check_eights(name: str, tensor: torch.Tensor) -> Problem | None:
    codes = tensor.view(torch.uint8)
    if not codes.numel() or int(codes.min()) == int(codes.max()) == _EIGHTS:
        return None
    count = int((codes != _EIGHTS).sum())
    found = f"{count} of {tensor.nbytes} bytes that hold another"
    hint = "the quantization config says zero_point false; if that is wrong, correct it with --quant-config"
    return Problem(f"tensor {name}", "zero point 8 throughout", found, hint) if count else None


_RULES = {
    "positive": _check_positive,
    "nonnegative": _check_nonnegative,
    "finite": _check_finite,
    "e8m0": _check_e8m0,
    "e5m0": _check_e5m0,
    "reciprocal": _check_reciprocal,
    "float16": _check_float16,
    "finite_float16": _check_finite_float16,
    "finite_bfloat16": _check_finite_bfloat16,
    "eights": _check_eights,
}
