"""The registry of pure functions that a plan may name; each turns one source tensor into another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from humming_convert import repack, scales
from humming_convert.plan import StackedTensor, Step

STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "view": scales.view_as,
    "to_dtype": scales.to_dtype,
    "e8m0_to_float32": scales.e8m0_to_float32,
    "expand_rows": scales.expand_rows,
    "regroup_columns": scales.regroup_columns,
    "transpose": scales.transpose,
    "pack_int8_zero_point": repack.pack_int8_zero_point,
    "pack_signed_zero_point": repack.pack_signed_zero_point,
    "awq_rows": repack.awq_rows,
    "word_rows": repack.word_rows,
    "signed_rows": repack.signed_rows,
    "ordered_rows": repack.ordered_rows,
    "transposed": repack.transposed,
    "in_order": repack.in_order,
    "inverted_signs": repack.inverted_signs,
    "one_more": repack.one_more,
}

# Steps that leave a weight in Humming's packed form, int32 (N, K * bits / 32), instead of its schema's own.
PACKING: dict[str, Callable[..., None]] = {
    "awq_rows": repack.awq_rows_into,
    "word_rows": repack.word_rows_into,
    "signed_rows": repack.signed_rows_into,
    "ordered_rows": repack.ordered_rows_into,
}


def packing(step: Step) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """What writes the rows that a packing step gives into memory; None for a step of another kind."""
    found = PACKING.get(step.name)
    return None if found is None else partial(found, **dict(step.args))


def packs(tensor: StackedTensor) -> bool:
    """Whether the steps of a weight give it in Humming's packed form."""
    return any(step.name in PACKING for step in tensor.steps)


def apply(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """The result of one step; never changes `tensor`. Raises KeyError for a step that does not exist."""
    arguments: dict[str, Any] = dict(step.args)
    return STEPS[step.name](tensor, **arguments)
