"""Value rules on stored integers. Each is a name and its whole numbers, separated by colons."""

from __future__ import annotations

from functools import lru_cache

import torch

from humming_convert import repack
from humming_convert.errors import Problem

SEPARATOR = ":"
_DAMAGED = "the checkpoint is damaged: fetch it or quantize it again"
_ORDER = "Humming's kernels have no g_idx: quantize again without activation order (desc_act false)"
_BORROWED = "a zero point of 0 cannot be told from one of 2**bits here: save it as gptq_v2, or quantize again"


def check_integers(name: str, tensor: torch.Tensor, rule: str) -> Problem | None:
    """What is wrong with the integers of source tensor `name`, or None.

    `signed:B` (bytes that hold signed integers of B bits), `below_top:B` (no packed B-bit code is 2**B - 1),
    `alike:B:V:W...` (all packed B-bit codes are V, or all are W), `columns:G` (number i is i // G). Raises KeyError
    for another rule.
    """
    kind, *numbers = rule.split(SEPARATOR)
    return _RULES[kind](name, tensor, *(int(number) for number in numbers))


def _check_signed(name: str, tensor: torch.Tensor, bits: int) -> Problem | None:
    middle = 1 << (bits - 1)
    values = tensor.numpy()  # numpy's minimum and maximum are several times faster than torch's
    least, greatest = int(values.min()), int(values.max())
    if -middle <= least and greatest < middle:
        return None
    expected = f"integers from {-middle} to {middle - 1}, which is {bits} bit"
    return Problem(f"tensor {name}", expected, f"{least} to {greatest}", _DAMAGED)


def _check_below_top(name: str, tensor: torch.Tensor, bits: int) -> Problem | None:
    top = (1 << bits) - 1
    count = int((repack.unpacked(tensor, bits) == top).sum())
    found = f"{count} of {tensor.numel() * 32 // bits} that are {top}"
    return Problem(f"tensor {name}", f"zero points stored one less, below {top}", found, _BORROWED) if count else None


def _check_alike(name: str, tensor: torch.Tensor, bits: int, *values: int) -> Problem | None:
    codes = repack.unpacked(tensor, bits).numpy()
    least, greatest = int(codes.min()), int(codes.max())
    if least == greatest and least in values:
        return None
    expected = f"zero points that are all {' or all '.join(str(value) for value in values)}, as symmetric weights have"
    hint = "the quantization config says symmetric; if that is wrong, correct it with --quant-config"
    return Problem(f"tensor {name}", expected, f"{least} to {greatest}" if least < greatest else f"{least}", hint)


@lru_cache(maxsize=16)
def _groups_of(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // group


def _check_columns(name: str, tensor: torch.Tensor, group: int) -> Problem | None:
    expected = _groups_of(tensor.numel(), group)
    values = tensor.reshape(-1)
    if torch.equal(values.to(torch.int64), expected):
        return None
    first = int((values != expected).to(torch.uint8).argmax())
    found = f"column {first} in group {int(values[first])}"
    return Problem(f"tensor {name}", f"columns in the order of their groups of {group}", found, _ORDER)


_RULES = {
    "signed": _check_signed,
    "below_top": _check_below_top,
    "alike": _check_alike,
    "columns": _check_columns,
}
