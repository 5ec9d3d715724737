"""Bring the tensors of one sublayer into memory, stacked as Humming's schemas want them.

Only this file knows how a plan's parts become one tensor. It reads, applies the plan's pure steps and
checks scales; it never decides a layout and never names an output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from humming_convert import steps
from humming_convert.checks import check_scale
from humming_convert.errors import CheckpointError, Problem
from humming_convert.plan import Part, StackedTensor
from humming_convert.source import Checkpoint, Payload, TensorHeader
from humming_loader.dtypes import dtype_info


def torch_dtype(code: str, name: str) -> torch.dtype:
    """The torch dtype of a safetensors code. Raises DtypeError (with `name`) when torch has none."""
    info = dtype_info(code, name)
    found = getattr(torch, info.torch_name) if info.torch_name else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError([Problem(name, "a dtype that torch knows", code)])
    return found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor as writable bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Gatherer:
    """Reads stacked tensors of a checkpoint; safe to call from several threads at once."""

    checkpoint: Checkpoint
    payload: Payload

    def stack(self, tensor: StackedTensor, experts: range | None = None) -> torch.Tensor:
        """`tensor` for `experts` (None: all), shape `(len(experts), ...)`, dtype `tensor.dtype`, on the CPU.

        Raises CheckpointError when a file changed or when a scale holds a value that cannot be (NaN, infinite,
        or negative where the format forbids it).
        """
        chosen = range(tensor.shape[0]) if experts is None else experts
        out = torch.empty((len(chosen), *tensor.shape[1:]), dtype=torch_dtype(tensor.dtype, tensor.name))
        problems: list[Problem] = []
        if tensor.parts[0].expert is None:
            self._fill_fused(tensor, chosen, out, problems)
        else:
            self._fill_per_expert(tensor, chosen, out, problems)
        if problems:
            raise CheckpointError(problems)
        return out

    def _fill_per_expert(
        self, tensor: StackedTensor, experts: range, out: torch.Tensor, problems: list[Problem]
    ) -> None:
        per_expert = len(tensor.parts) // tensor.shape[0]
        for row, expert in enumerate(experts):
            offset = 0
            for part in tensor.parts[expert * per_expert : (expert + 1) * per_expert]:
                offset += self._place(tensor, part, out[row], offset, problems)

    def _place(
        self, tensor: StackedTensor, part: Part, out: torch.Tensor, offset: int, problems: list[Problem]
    ) -> int:
        """Put one part at `offset` along the stacking axis of `out`; the extent that it takes there."""
        header = self.checkpoint.tensors[part.source]
        if (
            not tensor.steps
            and not tensor.check
            and tensor.axis == 0
            and out.ndim
            and header.dtype == tensor.dtype
        ):
            # The destination is one run of bytes: read into it, with no copy on the way.
            extent = math.prod(header.shape) // math.prod(tensor.shape[2:])
            self.payload.read_into(part.source, _bytes_of(out[offset : offset + extent]))
            return extent
        value = self._apply(tensor, part, self._read(header), problems)
        if not out.ndim:
            out.copy_(value.reshape(()))
            return 1
        extent = value.numel() * out.shape[tensor.axis] // out.numel()
        shape = list(out.shape)
        shape[tensor.axis] = extent
        out.narrow(tensor.axis, offset, extent).copy_(value.reshape(shape))
        return extent

    def _fill_fused(
        self, tensor: StackedTensor, experts: range, out: torch.Tensor, problems: list[Problem]
    ) -> None:
        offset = 0
        for part in tensor.parts:
            header = self.checkpoint.tensors[part.source]
            value = self._apply(tensor, part, self._read(header, experts), problems)
            extent = value.numel() * tensor.shape[1 + tensor.axis] // out.numel()
            shape = list(out.shape)
            shape[1 + tensor.axis] = extent
            out.narrow(1 + tensor.axis, offset, extent).copy_(value.reshape(shape))
            offset += extent

    def _read(self, header: TensorHeader, experts: range | None = None) -> torch.Tensor:
        """The source tensor, or the rows `experts` of one that holds every expert on axis 0."""
        shape: Sequence[int] = header.shape
        start = 0
        if experts is not None:
            start = experts.start * (header.nbytes // header.shape[0])
            shape = (len(experts), *header.shape[1:])
        value = torch.empty(tuple(shape), dtype=torch_dtype(header.dtype, header.name))
        self.payload.read_into(header.name, _bytes_of(value), start)
        return value

    def _apply(
        self, tensor: StackedTensor, part: Part, value: torch.Tensor, problems: list[Problem]
    ) -> torch.Tensor:
        if tensor.check:
            problem = check_scale(part.source, value, tensor.check)
            if problem is not None:
                problems.append(problem)
        for step in tensor.steps:
            value = steps.apply(step, value)
        return value


def chunks_of(experts: int, bytes_per_expert: int, chunk_bytes: int) -> Iterable[range]:
    """Consecutive runs of experts of about `chunk_bytes` each, at least one expert a run."""
    size = max(1, chunk_bytes // max(1, bytes_per_expert))
    return [range(start, min(start + size, experts)) for start in range(0, experts, size)]
