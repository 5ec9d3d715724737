"""Tensors that no kernel reads, but whose values have to be what the plan takes for granted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from humming_convert.checks import check_scale
from humming_convert.errors import CheckpointError, Problem, UnsupportedError
from humming_convert.plan import SublayerPlan
from humming_convert.source import Checkpoint, Payload, TensorHeader

_DTYPES = {"I32": torch.int32, "I64": torch.int64}
_SHOWN = 4


def check_unused(checkpoint: Checkpoint, payload: Payload, plans: Sequence[SublayerPlan]) -> None:
    """Hold the values of `plan.checks`, tensors of whole numbers, against their rules.

    Raises UnsupportedError for weights in another order of columns (a `columns` rule), CheckpointError for the rest.
    """
    order: list[Problem] = []
    others: list[Problem] = []
    for plan in plans:
        for name, rule in plan.checks:
            problem = check_scale(name, _read(payload, checkpoint.tensors[name]), rule)
            if problem is not None:
                (order if rule.startswith("columns") else others).append(problem)
    if others:
        raise CheckpointError(_shortened([*others, *order]))
    if order:
        raise UnsupportedError(_shortened(order))


def _read(payload: Payload, header: TensorHeader) -> torch.Tensor:
    raw = bytearray(header.nbytes)
    payload.read_into(header.name, memoryview(raw))
    return torch.frombuffer(raw, dtype=_DTYPES[header.dtype]).view(header.shape)


def _shortened(problems: Sequence[Problem]) -> list[Problem]:
    """The first few: where one tensor is in another order, thousands are."""
    rest = len(problems) - _SHOWN
    if rest <= 0:
        return list(problems)
    last = problems[_SHOWN]
    more = Problem(f"{last.where} and {rest - 1} more", last.expected, "likewise", last.hint)
    return [*problems[:_SHOWN], more]
