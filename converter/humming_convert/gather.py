"""Bring the tensors of one sublayer into memory, stacked as Humming's schemas want them.

Only this file knows how a plan's parts become one tensor. It reads, applies the plan's pure steps and
checks scales; it never decides a layout and never names an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from humming_convert import steps
from humming_convert.checks import check_scale, check_unequal
from humming_convert.errors import CheckpointError, Problem
from humming_convert.plan import StackedTensor
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
        if tensor.check and tensor.steps:
            self._check_parts(tensor)
        if tensor.parts[0].expert is None:
            self._fill_fused(tensor, chosen, out)
        elif self._is_one_run(tensor):
            self._read_run(tensor, chosen, out)
        else:
            self._fill_per_expert(tensor, chosen, out)
        if tensor.check and not tensor.steps:
            problem = check_scale(tensor.name, out, tensor.check)
            if problem is not None:
                self._check_parts(tensor)
                raise CheckpointError([problem])
        per_expert = len(tensor.parts) // tensor.shape[0]
        sources = [part.source for part in tensor.parts[chosen.start * per_expert : chosen.stop * per_expert]]
        unequal = check_unequal(sources, out, tensor.check)
        if unequal:
            raise CheckpointError(unequal)
        return out

    def _check_parts(self, tensor: StackedTensor) -> None:
        """Say of the source's own tensors, as they are stored, what is wrong with their values."""
        found = (
            check_scale(part.source, self._read(self.checkpoint.tensors[part.source]), tensor.check)
            for part in tensor.parts
        )
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise CheckpointError(problems)

    def _is_one_run(self, tensor: StackedTensor) -> bool:
        """Whether the parts, one after the other as they are stored, are the stacked tensor's bytes."""
        same_dtype = all(self.checkpoint.tensors[part.source].dtype == tensor.dtype for part in tensor.parts)
        return not tensor.steps and tensor.axis == 0 and same_dtype

    def _read_run(self, tensor: StackedTensor, experts: range, out: torch.Tensor) -> None:
        """Read every part to where it belongs, with no copy on the way."""
        per_expert = len(tensor.parts) // tensor.shape[0]
        target = _bytes_of(out)
        offset = 0
        for part in tensor.parts[experts.start * per_expert : experts.stop * per_expert]:
            end = offset + self.checkpoint.tensors[part.source].nbytes
            self.payload.read_into(part.source, target[offset:end])
            offset = end
        if offset != target.nbytes:
            raise ValueError(f"{tensor.name}: parts of {offset} bytes for {target.nbytes}")

    def _fill_per_expert(self, tensor: StackedTensor, experts: range, out: torch.Tensor) -> None:
        per_expert = len(tensor.parts) // tensor.shape[0]
        for row, expert in enumerate(experts):
            parts = tensor.parts[expert * per_expert : (expert + 1) * per_expert]
            values = [self._through_steps(tensor, self._read(self.checkpoint.tensors[part.source])) for part in parts]
            _place(values, out[row], tensor.axis)

    def _fill_fused(self, tensor: StackedTensor, experts: range, out: torch.Tensor) -> None:
        headers = (self.checkpoint.tensors[part.source] for part in tensor.parts)
        values = [self._through_steps(tensor, self._read(header, experts)) for header in headers]
        _place(values, out, 1 + tensor.axis)

    def _through_steps(self, tensor: StackedTensor, value: torch.Tensor) -> torch.Tensor:
        for step in tensor.steps:
            value = steps.apply(step, value)
        return value

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


def _place(values: Sequence[torch.Tensor], out: torch.Tensor, axis: int) -> None:
    """Lay `values` one after the other along `axis` of `out`; a value may have its other axes in another form."""
    if not out.ndim:
        out.copy_(values[0].reshape(()))
        return
    offset = 0
    for value in values:
        shape = list(out.shape)
        shape[axis] = value.numel() * out.shape[axis] // out.numel()
        out.narrow(axis, offset, shape[axis]).copy_(value.reshape(shape))
        offset += shape[axis]


def chunks_of(experts: int, bytes_per_expert: int, chunk_bytes: int) -> Iterable[range]:
    """Consecutive runs of experts of about `chunk_bytes` each, at least one expert a run."""
    size = max(1, chunk_bytes // max(1, bytes_per_expert))
    return [range(start, min(start + size, experts)) for start in range(0, experts, size)]
