"""Value rules that a plan attaches to tensors; they run when the tensor is read."""

from __future__ import annotations

import torch

from humming_convert.errors import Problem
from humming_convert.plan import SublayerPlan
from humming_convert.source import Checkpoint, Payload

_E8M0_NAN = 255
_HINT = "the checkpoint is damaged, or calibration never reached this expert: quantize it again"


def check_scale(name: str, tensor: torch.Tensor, kind: str) -> Problem | None:
    """What is wrong with the values of source tensor `name`, or None.

    `kind` is a comma-separated list of: `positive` (finite and > 0; zero would also be a division by zero in
    NVFP4's reciprocal), `nonnegative` (finite and >= 0), `finite`, `e8m0` (no byte 255, which is NaN),
    `float16` (no value is lost when rounded to float16), `eights` (every packed 4 bit zero point is 8, the
    midpoint).
    """
    for rule in kind.split(","):
        problem = _RULES[rule](name, tensor)
        if problem is not None:
            return problem
    return None


def check_expected(checkpoint: Checkpoint, payload: Payload, plan: SublayerPlan) -> list[Problem]:
    """Compare the numbers in the sublayer's bookkeeping tensors with what the plan took from headers."""
    problems = []
    for name, values in plan.expected:
        header = checkpoint.tensors[name]
        raw = bytearray(header.nbytes)
        payload.read_into(name, memoryview(raw))
        width = header.nbytes // len(values)
        found = tuple(
            int.from_bytes(raw[at : at + width], "little", signed=True)
            for at in range(0, header.nbytes, width)
        )
        if found != values:
            problems.append(
                Problem(f"tensor {name}", f"{list(values)}", f"{list(found)}", "the tensors disagree")
            )
    return problems


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32)


def _describe(values: torch.Tensor, bad: torch.Tensor) -> str:
    first = values.reshape(-1)[bad.reshape(-1)][0].item()
    return f"{int(bad.sum())} of {bad.numel()} values such as {first}"


def _check_finite(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~torch.isfinite(values)
    return (
        Problem(f"tensor {name}", "finite scales", _describe(values, bad), _HINT) if bool(bad.any()) else None
    )


def _check_positive(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~(torch.isfinite(values) & (values > 0))
    return (
        Problem(f"tensor {name}", "positive scales", _describe(values, bad), _HINT)
        if bool(bad.any())
        else None
    )


def _check_nonnegative(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    bad = ~(torch.isfinite(values) & (values >= 0))
    return (
        Problem(f"tensor {name}", "scales >= 0", _describe(values, bad), _HINT) if bool(bad.any()) else None
    )


def _check_e8m0(name: str, tensor: torch.Tensor) -> Problem | None:
    count = int((tensor.view(torch.uint8) == _E8M0_NAN).sum())
    found = f"{count} of {tensor.numel()} bytes that mean NaN (255)"
    return Problem(f"tensor {name}", "e8m0 scales", found, _HINT) if count else None


def _check_float16(name: str, tensor: torch.Tensor) -> Problem | None:
    values = _float(tensor)
    rounded = values.to(torch.float16).to(torch.float32)
    # Half an ulp of a normal float16 is 2**-11 of its value; below 2**-14 float16 has fewer bits, and none at
    # last.
    bad = ~((rounded - values).abs() <= values.abs() * 2.0**-8)
    if not bool(bad.any()):
        return None
    hint = "use --dtype bfloat16"
    return Problem(f"tensor {name}", "scales that float16 can hold", _describe(values, bad), hint)


def _check_eights(name: str, tensor: torch.Tensor) -> Problem | None:
    count = int((tensor.view(torch.uint8) != 0x88).sum())
    found = f"{count} of {tensor.nbytes} bytes that hold another"
    hint = "the quantization config says zero_point false; if that is wrong, correct it with --quant-config"
    return Problem(f"tensor {name}", "zero point 8 throughout", found, hint) if count else None


_RULES = {
    "positive": _check_positive,
    "nonnegative": _check_nonnegative,
    "finite": _check_finite,
    "e8m0": _check_e8m0,
    "float16": _check_float16,
    "eights": _check_eights,
}
